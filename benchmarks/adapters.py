"""Measure what adapters (LoRA) cost in decode steps and prefills, and how long they load. Prints JSON lines.

    python -m benchmarks.adapters [--shape qwen2-0.5b] [--threads 1] [--ranks 16] [--sequences 1 32] [--adapters 1 8 32]

Rounds of all cases alternate, so that the load of the machine is the same for all. A ratio compares with the same step
without adapters. Times are lower quartiles, because other processes can only add time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import structlog
from tests.engine.adapter_files import write_adapter

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import AdapterSource, EngineRequest
from argosy.engine.serving.adapter_files import read_adapter_source
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from argosy.protocol import SamplingParams
from benchmarks.checkpoints import SHAPES, make_checkpoint

DECODE_STEPS = 12
PROMPT_TOKENS = 512
UNUSED_SLOT = 1 << 20
Case = tuple[int, int]
"""Number of sequences, and of the adapters that they have in turn. 0 is none."""


class AdapterBench:
    """Engine in which all adapters are loaded."""

    def __init__(self, model: Path, threads: int, folders: list[Path]) -> None:
        from argosy.engine.serving.engine_core.core import EngineCore

        config = EngineConfig(
            model=str(model),
            threads=threads,
            warmup=False,
            max_seqs=64,
            num_blocks=64 * 4,
            max_step_tokens=4096,
            prefix_cache=False,
            enable_lora=True,
        )
        self._core = EngineCore(config, time.perf_counter, lambda _what, _done: None)
        self._sources = [read_adapter_source(folder) for folder in folders]
        self._ids = count()
        for number in range(len(folders)):
            self.run([self._sources[number]], 1, 1)

    def run_case(self, case: Case, prompt_tokens: int, steps: int) -> list[float]:
        """Compute new sequences, and return the seconds of each step. The first one computes the prompts."""
        sequences, adapters = case
        sources = [
            self._sources[number % adapters] if adapters else None for number in range(sequences)
        ]
        return self.run(sources, prompt_tokens, steps)

    def run(
        self, sources: Sequence[AdapterSource | None], prompt_tokens: int, steps: int
    ) -> list[float]:
        """Compute a new sequence with each adapter, and return the seconds of each step."""
        params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
        for number, source in enumerate(sources):
            prompt = [number + token % 997 + 5 for token in range(prompt_tokens)]
            self._core.add(
                EngineRequest(id=str(next(self._ids)), prompt=prompt, params=params, adapter=source)
            )
        seconds = []
        while self._core.has_work:
            started_at = time.perf_counter()
            self._core.step()
            seconds.append(time.perf_counter() - started_at)
        return seconds

    def load(self, folder: Path) -> tuple[float, int]:
        """Load an adapter once more, and return seconds and bytes."""
        started_at = time.perf_counter()
        num_bytes = self._core.executor.add_adapter(UNUSED_SLOT, folder)
        seconds = time.perf_counter() - started_at
        self._core.executor.remove_adapter(UNUSED_SLOT)
        return seconds, num_bytes


def measure(bench: AdapterBench, cases: list[Case], rounds: int) -> None:
    """Print a line for each case."""
    prefill: dict[Case, list[float]] = defaultdict(list)
    decode: dict[Case, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for case in cases:
            decode[case] += bench.run_case(case, 8, DECODE_STEPS)[1:]
            if case[0] == 1:
                prefill[case].append(bench.run_case(case, PROMPT_TOKENS, 1)[0])
    for case in cases:
        row: dict[str, float] = {"sequences": case[0], "adapters": case[1]}
        for name, times in (("decode", decode), ("prefill", prefill)):
            if case in times:
                row[f"{name}_ms"] = round(1e3 * quartile(times[case]), 2)
                row[f"{name}_ratio"] = round(quartile(times[case[0], 0]) / quartile(times[case]), 3)
        print(json.dumps(row), flush=True)


def quartile(values: list[float]) -> float:
    """Return the lower quartile."""
    return statistics.quantiles(values, n=4)[0]


def main() -> None:
    """Print a JSON line for loading, and one for each case of each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2-0.5b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    model = make_checkpoint(options.shape, options.folder)
    for rank in options.ranks:
        folders = [
            write_adapter(options.folder / f"adapter-{rank}-{seed}", model, rank=rank, seed=seed)
            for seed in range(max(options.adapters))
        ]
        bench = AdapterBench(model, options.threads, folders)
        loads = [bench.load(folder) for folder in folders[:8]]
        load_ms = round(1e3 * min(seconds for seconds, _ in loads), 1)
        print(json.dumps({"rank": rank, "load_ms": load_ms, "bytes": loads[0][1]}), flush=True)
        cases = [
            (sequences, adapters)
            for sequences in options.sequences
            for adapters in (0, *options.adapters)
            if adapters <= sequences
        ]
        measure(bench, cases, options.rounds)


if __name__ == "__main__":
    main()
