"""W1 to W3 on a random-weight model: Argosy's engine and every peer that is installed, alternately.

    python -m benchmarks.engine [--shape qwen2-0.5b] [--rounds 3] [--batching continuous|dynamic|static]

W1: 64 requests, input 32-512, output 16-128 tokens (uniform, seed 0), all at once: output tokens/s.
W2: one request, 256 in, 128 out: TTFT in ms and decode tokens/s.
W3: 32 requests that share 1,024 tokens and have 64 of their own, 32 out, all at once: seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoints import SHAPES, make

Work = list[tuple[list[int], int]]
"""(prompt, output tokens) of each request."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a workload took, in seconds; `first_s` is to the first token of the first request."""

    total_s: float
    first_s: float


class Argosy:
    """Our engine loop, in this process."""

    def __init__(self, model: Path, *, batching: str, prefix_cache: bool, dtype: str) -> None:
        from argosy.engine.config import EngineConfig
        from argosy.engine.serving.core.loop import EngineCore

        config = EngineConfig(
            model=str(model),
            batching=batching,  # type: ignore[arg-type]
            prefix_cache=prefix_cache,
            dtype=dtype,  # type: ignore[arg-type]
            num_blocks=4096,
        )
        self._core = EngineCore(config, time.perf_counter, lambda _what, _done: None)
        self._serial = 0

    def run(self, work: Work) -> Run:
        """Serve all of it; prompts must differ from those of earlier runs where hits would count."""
        from argosy.engine.serving.wire import EngineRequest
        from argosy.protocol import SamplingParams

        begin, first = time.perf_counter(), 0.0
        for prompt, output in work:
            self._serial += 1
            params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            self._core.add(EngineRequest(id=str(self._serial), prompt=prompt, params=params))
        while self._core.has_work:
            deltas = self._core.step().deltas
            if deltas and not first:
                first = time.perf_counter() - begin
        return Run(time.perf_counter() - begin, first)


class Transformers:
    """`generate` of Hugging Face transformers, in batches of 16 as they come."""

    BATCH = 16

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(self, work: Work) -> Run:
        """Each batch padded to its longest prompt, run to its longest output."""
        torch = self._torch
        begin, first = time.perf_counter(), 0.0
        for at in range(0, len(work), self.BATCH):
            batch = work[at : at + self.BATCH]
            longest = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[1] * (longest - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch])
            if not first:
                self._generate(ids, mask, 1)
                first = time.perf_counter() - begin
            self._generate(ids, mask, max(output for _, output in batch))
        return Run(time.perf_counter() - begin - first, first)

    def _generate(self, ids: object, mask: object, count: int) -> None:
        with self._torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=1,
            )


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Token ids that are no special ones."""
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def workload(name: str, seed: int, vocabulary: int) -> Work:
    """The requests of W1, W2 or W3; lengths are those of seed 0, contents those of `seed`."""
    lengths, rng = random.Random(0), random.Random(f"{name} {seed}")
    if name == "W1":
        sizes = [(lengths.randint(32, 512), lengths.randint(16, 128)) for _ in range(64)]
        return [(random_tokens(rng, size, vocabulary), output) for size, output in sizes]
    if name == "W2":
        return [(random_tokens(rng, 256, vocabulary), 128)]
    shared = random_tokens(rng, 1024, vocabulary)
    return [(shared + random_tokens(rng, 64, vocabulary), 32) for _ in range(32)]


def figures(name: str, work: Work, run: Run) -> dict[str, float]:
    """What the workload is judged by."""
    output = sum(count for _, count in work)
    if name == "W1":
        return {"out_tok_s": round(output / run.total_s, 1)}
    if name == "W2":
        decode = (output - 1) / (run.total_s - run.first_s)
        return {"ttft_ms": round(run.first_s * 1000, 1), "decode_tok_s": round(decode, 1)}
    return {"total_s": round(run.total_s, 2)}


def main() -> None:
    """Print one JSON line for each engine, workload and figure: the median over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2-0.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batching", default="continuous")
    parser.add_argument("--peers", default="transformers", help="comma-separated, or nothing")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    options = parser.parse_args()
    model = make(options.shape, options.folder)
    vocabulary = int(str(SHAPES[options.shape]["vocab_size"]))
    ours = {"batching": options.batching, "dtype": "bfloat16"}
    engines: dict[str, Callable[[Work], Run]] = {
        "argosy": Argosy(model, prefix_cache=True, **ours).run,
        "argosy, no prefix cache": Argosy(model, prefix_cache=False, **ours).run,
    }
    if "transformers" in options.peers:
        engines["transformers"] = Transformers(model).run
    rows: dict[tuple[str, str, str], list[float]] = {}
    for number in range(options.rounds):
        for name in ("W1", "W2", "W3"):
            work = workload(name, number, vocabulary)
            for engine, run in engines.items():
                for what, value in figures(name, work, run(work)).items():
                    rows.setdefault((engine, name, what), []).append(value)
    for (engine, name, what), values in rows.items():
        row = {"engine": engine, "workload": name, what: round(statistics.median(values), 2)}
        print(json.dumps(row | {"shape": options.shape, "rounds": values}), flush=True)


if __name__ == "__main__":
    main()
