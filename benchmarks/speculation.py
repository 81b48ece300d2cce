"""Compare decoding with and without drafts on each kind of text, beside the speculation of llama.cpp and vLLM.

    make peers/llama-cpp peers/vllm
    python -m benchmarks.speculation [--model mini|qwen2-0.5b] [--kinds chat,edit,json,agent] [--rounds 5]

`mini` is the bundled model with conversations from the generators of its text, by the kind of the answer. Every engine
gets the lengths of the model's answers, greedily, so that none goes on after an end and repeats itself. The shape
`qwen2-0.5b` has random weights and random prompts. Requests of `edit` have a `prediction`, which is the answer with
every tenth token changed; the peers have no predictions.

Engines run in turns within a round.
A figure is the output tokens of all requests per second.
`ratio` is the median over rounds of an engine's rate by that of the same engine without drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from models.chat_format import ASSISTANT, render
from models.corpus.chat import generate_documents
from models.corpus.documents import Document
from tokenizers import Tokenizer

from argosy import LLM, SamplingParams
from argosy.models import BUNDLED_MODEL, DRAFT_MODEL
from benchmarks.checkpoints import make_checkpoint
from benchmarks.options import parse_choices
from benchmarks.peers.catalog import FEW, ROOT, Peer, interpreter
from benchmarks.peers.worker import CONTEXT, Request, Settings, Stamps
from benchmarks.processes import Launch, PeerError, Session, exit_on_sigterm
from benchmarks.workloads import SPECIAL

ENGINES = {
    "argosy": Peer("argosy", FEW, speculation="off"),
    "argosy auto": Peer("argosy", FEW, speculation="auto"),
    "argosy draft": Peer("argosy", FEW, speculation="draft"),
    "llama.cpp": Peer("llama_cpp", FEW, "llama-cpp", speculation="off"),
    "llama.cpp ngram": Peer("llama_cpp", FEW, "llama-cpp", speculation="auto"),
    "llama.cpp draft": Peer("llama_cpp", FEW, "llama-cpp", speculation="draft"),
    "vllm": Peer("vllm", FEW, "vllm", speculation="off"),
    "vllm ngram": Peer("vllm", FEW, "vllm", speculation="auto"),
}
"""Engines by name. The first word names the one without drafts."""
KINDS = ("chat", "edit", "json", "agent")
MINI, SEED = "mini", 4242
REQUESTS = 32
SINGLES = 8
"""Requests that run one after another for a batch of 1."""
LEAST_OUTPUT, MOST_OUTPUT = 24, 160
SHAPE_INPUT, SHAPE_OUTPUT = 128, 48
PREDICTED_SHARE = 0.9


def make_requests(kind: str, model: Path) -> list[Request]:
    """Return requests whose lengths are those of the model's answers without drafts."""
    is_mini = model.name == MINI
    prompts = mini_prompts(kind, model) if is_mini else shape_prompts(kind, model)
    params = SamplingParams(
        max_tokens=MOST_OUTPUT if is_mini else SHAPE_OUTPUT, temperature=0.0, ignore_eos=not is_mini
    )
    with LLM(str(model), speculation="off", max_model_len=CONTEXT) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    requests = [
        Request(prompt, len(answer.outputs[0].token_ids), 0.0, predict(answer.outputs[0].token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    if kind != "edit":
        requests = [request._replace(prediction=()) for request in requests]
    return [request for request in requests if request.output >= LEAST_OUTPUT][:REQUESTS]


def predict(output: Sequence[int]) -> list[int]:
    """Return the output with some tokens changed, in runs as an edit leaves them."""
    every = round(4 / (1 - PREDICTED_SHARE))
    return [token ^ (index % every < 4) for index, token in enumerate(output)]


def mini_prompts(kind: str, model: Path) -> list[list[int]]:
    """Return prompts from the generators of the bundled model's text, with a seed that no training had."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = islice(
        (text for document in generate_documents(SEED) for text in ask(kind, document)),
        6 * REQUESTS,
    )
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def ask(kind: str, document: Document) -> Iterator[str]:
    """Yield the text before the last answer of a conversation, if that answer is of this kind."""
    turns = document.messages
    if not turns or turns[-1].role != "assistant":
        return
    is_call, is_json = bool(turns[-1].calls), turns[-1].content.startswith(("{", "["))
    answered = "agent" if is_call or document.tools else "json" if is_json else "chat"
    if answered == {"edit": "json"}.get(kind, kind):
        yield render(replace(document, messages=turns[:-1])) + ASSISTANT


def shape_prompts(kind: str, model: Path) -> list[list[int]]:
    """Return random prompts."""
    rng = random.Random(kind)
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    return [
        [rng.randrange(SPECIAL, vocabulary) for _ in range(SHAPE_INPUT)] for _ in range(REQUESTS)
    ]


def measure(session: Session, requests: list[Request], batch: int) -> tuple[float, float]:
    """Return the output tokens per second, and the tokens per step of a sequence, or 0 where it is not known."""
    groups = [requests[:batch]] if batch > 1 else [[request] for request in requests[:SINGLES]]
    seconds, tokens, steps = 0.0, 0, 0
    for group in groups:
        stamps: Stamps = session.run(group)
        seconds += max(times[-1] for times in stamps)
        tokens += sum(request.output for request in group)
        steps += sum(len(set(times)) for times in stamps)
    return tokens / seconds, tokens / steps if session.launch.peer.module == "argosy" else 0.0


def run(options: argparse.Namespace, model: Path, draft: Path | None) -> list[dict[str, Any]]:
    """Measure all engines, and return the rows."""
    rates: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    missing: dict[str, str] = {}
    versions: dict[str, str] = {}
    work = {kind: make_requests(kind, model) for kind in options.kinds}
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name in options.engines:
            peer = ENGINES[name]
            if peer.speculation == "draft" and draft is None:
                continue
            try:
                settings = Settings(
                    model=str(model),
                    weights="bf16",
                    threads=options.threads,
                    prefix_cache=False,
                    speculation=peer.speculation,
                    draft=str(draft) if draft and peer.speculation == "draft" else None,
                )
                python = interpreter(peer.environment, options.environments)
                log = options.folder / f"{name.replace(' ', '-')}.log"
                session = Session(Launch(python, peer, settings, log, options.patience))
                sessions[name] = stack.enter_context(session)
                versions[name] = session.version
                session.run([request._replace(output=8) for request in work[options.kinds[0]][:4]])
            except (PeerError, FileNotFoundError) as error:
                missing[name] = str(error)
                _log(f"{name}: {error}")
        for number in range(options.rounds):
            for kind in options.kinds:
                for batch in options.batches:
                    for name, session in sessions.items():
                        rates.setdefault((kind, batch, name), []).append(
                            measure(session, work[kind], batch)
                        )
            _log(f"round {number + 1} of {options.rounds}")
    return [
        *_rows(options, rates, versions),
        *({"engine": name, "missing": reason} for name, reason in missing.items()),
    ]


def _rows(
    options: argparse.Namespace,
    rates: dict[tuple[str, int, str], list[tuple[float, float]]],
    versions: dict[str, str],
) -> list[dict[str, Any]]:
    rows = []
    for (kind, batch, name), measured in rates.items():
        plain = rates.get((kind, batch, name.split(" ", 1)[0]), measured)
        ratios = [ours[0] / base[0] for ours, base in zip(measured, plain, strict=True)]
        row: dict[str, Any] = {
            "model": options.model,
            "kind": kind,
            "batch": batch,
            "engine": name,
            "version": versions[name],
            "out_tok_s": round(statistics.median(rate for rate, _ in measured), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(each, 3) for each in ratios],
        }
        per_step = statistics.median(each for _, each in measured)
        rows.append(row | ({"tokens_per_step": round(per_step, 2)} if per_step else {}))
    return rows


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    temporary = Path(tempfile.gettempdir()) / "argosy-bench"
    parser.add_argument("--model", choices=(MINI, "qwen2-0.5b"), default=MINI)
    parser.add_argument("--kinds", type=parse_choices(KINDS), default=list(KINDS))
    parser.add_argument("--batches", type=parse_choices(("1", "8", "32")), default=["1", "8", "32"])
    parser.add_argument("--engines", type=parse_choices(tuple(ENGINES)), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=temporary, help="folder for models and logs")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument(
        "--patience", type=float, default=300.0, help="timeout of an answer in seconds"
    )
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batches]
    exit_on_sigterm()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.model == MINI:  # a copy, because peers write their own formats beside the model
        model, draft = options.folder / MINI, options.folder / "mini-draft"
        shutil.copytree(BUNDLED_MODEL, model, dirs_exist_ok=True)
        shutil.copytree(DRAFT_MODEL, draft, dirs_exist_ok=True)
    else:
        model, draft = make_checkpoint(options.model, options.folder), None
    for row in run(options, model, draft):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
