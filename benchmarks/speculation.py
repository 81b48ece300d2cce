"""Compare decoding with and without drafts on each kind of text, beside the speculation of llama.cpp and vLLM.

    make peers/llama-cpp peers/vllm
    python -m benchmarks.speculation [--model mini|qwen2-0.5b] [--kinds chat,edit,json,agent] [--rounds 5]

`mini` is the bundled model with prompts that it can answer. Every engine gets the lengths of its answers, greedily, so
that no engine goes on after an end and repeats itself. `edit` sends the text to change as `prediction`, in which a
value differs from the answer. The shape `qwen2-0.5b` has random weights: its prompts are random, and `edit` predicts
its own answer with every tenth token changed. The peers have no predictions.

Engines run in turns within a round. A figure is the output tokens of all requests per second, the prompts included, and
`ratio` the median over rounds of an engine's rate by that of the same engine without drafts.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
MINI = "mini"
MOST_REQUESTS = 32
SINGLES = 8
"""Requests that run one after another for a batch of 1."""
MOST_OUTPUT = 160
WORDS = ["river", "stone", "cloud", "maple", "ember", "tide", "raven", "copper", "linen", "harbor"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "send_message",
            "description": "Send a message.",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string"} for name in ("to", "subject", "text")},
                "required": ["to", "subject", "text"],
            },
        },
    }
]


def make_messages(kind: str, rng: random.Random) -> tuple[list[dict[str, Any]], str]:
    """Return the messages of a request of this kind, and the text of its prediction."""
    words = rng.sample(WORDS, 8)
    if kind == "chat":
        return [{"role": "user", "content": f"Tell me a story about a {words[0]}."}], ""
    if kind == "agent":
        address, subject, text = f"{words[0]}@example.com", words[1], " ".join(words[2:])
        text = f"Send a message to {address} with the subject {subject} and the text: {text}"
        return [{"role": "user", "content": text}], ""
    values = {
        f"{key}_{rng.randrange(100)}": f"{rng.choice(WORDS)}{rng.randrange(1000)}" for key in words
    }
    listed = ", ".join(f"{key} is {value}" for key, value in values.items())
    question = [{"role": "user", "content": f"{listed}\n\nWrite this as JSON."}]
    if kind == "json":
        return question, ""
    values[rng.choice(list(values))] = "other"
    return question, json.dumps(values)


def make_requests(kind: str, model: Path, seed: int) -> list[Request]:
    """Return requests, whose lengths are those of the model's answers without drafts."""
    rng = random.Random(f"{kind} {seed}")
    is_mini = model.name == MINI
    if is_mini:
        requests = [_render(*make_messages(kind, rng), kind, model) for _ in range(MOST_REQUESTS)]
    else:
        vocabulary = int(str(json.loads((model / "config.json").read_text())["vocab_size"]))
        requests = [
            Request([rng.randrange(SPECIAL, vocabulary) for _ in range(128)], 48)
            for _ in range(MOST_REQUESTS)
        ]
    with LLM(str(model), speculation="off", max_model_len=CONTEXT) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [
                SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=not is_mini)
                for request in requests
            ],
            use_tqdm=False,
        )
    outputs = [list(answer.outputs[0].token_ids) for answer in answers]
    if kind == "edit" and not is_mini:
        requests = [
            request._replace(
                prediction=[token + (index % 10 == 9) for index, token in enumerate(output)]
            )
            for request, output in zip(requests, outputs, strict=True)
        ]
    return [
        request._replace(output=max(2, len(output)))
        for request, output in zip(requests, outputs, strict=True)
    ]


def _render(messages: list[dict[str, Any]], prediction: str, kind: str, model: Path) -> Request:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    prompt = tokenizer.apply_chat_template(
        messages,
        tools=TOOLS if kind == "agent" else None,
        add_generation_prompt=True,
        return_dict=False,
    )
    return Request(prompt, MOST_OUTPUT, 0.0, tokenizer.encode(prediction))


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
    work = {kind: make_requests(kind, model, 0) for kind in options.kinds}
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
