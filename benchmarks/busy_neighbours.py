"""Decode speed with one, two and adaptive threads beside processes that use the CPUs. Prints JSON lines.

    python -m benchmarks.busy_neighbours [--shape llama-160m] [--sequences 16] [--seconds 8]

Each neighbour computes for a part of each period of 20 ms and sleeps for the rest. Each measurement is made in a
process of its own, which decodes greedily. Its first seconds do not count. `threads` 0 stands for adaptive threads.
`used` is their number at the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from argosy.models import BUNDLED_MODEL
from benchmarks.checkpoints import SHAPES, make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

NEIGHBOURS = ((), (0.25,), (0.5,), (0.75,), (1.0,), (1.0, 1.0))
"""Parts of the time for which the neighbours of each row compute."""
PERIOD_S = 0.02
WARM_UP_S = 6.0
"""Time before tokens count, in which adaptive threads settle."""


def occupy_cpu(fraction: float) -> None:
    """Use one CPU for `fraction` of the time, until the process ends."""
    while True:
        started_at = time.perf_counter()
        while time.perf_counter() - started_at < fraction * PERIOD_S:
            pass
        time.sleep((1 - fraction) * PERIOD_S)


@contextmanager
def busy_neighbours(fractions: tuple[float, ...]) -> Iterator[None]:
    """Run the neighbours."""
    processes = [
        multiprocessing.Process(target=occupy_cpu, args=(fraction,), daemon=True)
        for fraction in fractions
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def decode(model: str, threads: int | None, sequences: int, seconds: float) -> tuple[float, int]:
    """Return the tokens per second of a batch that never gets smaller, and the threads at the end."""
    from argosy.engine.engine_request import EngineRequest
    from argosy.engine.serving.engine_core.core import EngineCore
    from argosy.protocol import SamplingParams

    config = EngineConfig(
        model=model, threads=threads, max_seqs=sequences, num_blocks=sequences * 64
    )
    core = EngineCore(config, time.monotonic, lambda _activity, _fraction: None)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, seed=1)
    numbers = iter(range(1 << 30))

    def add_request() -> None:
        prompt = [rng.randint(5, 900) for _ in range(32)]
        core.add(EngineRequest(id=str(next(numbers)), prompt=prompt, params=params))

    for _ in range(sequences):
        add_request()
    started_at = counted_from = time.monotonic()
    tokens, used = 0, 0
    while (now := time.monotonic()) < started_at + WARM_UP_S + seconds:
        if now < started_at + WARM_UP_S:
            tokens, counted_from = 0, now
        step = core.step()
        used = step.stats.compute_threads
        for delta in step.deltas:
            tokens += len(delta.tokens)
            if delta.finish_reason is not None:
                add_request()
    return tokens / (time.monotonic() - counted_from), used


def main() -> None:
    """Print a JSON line for each set of neighbours and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 0])
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    model = (
        BUNDLED_MODEL if options.shape is None else make_checkpoint(options.shape, options.folder)
    )
    context = multiprocessing.get_context("spawn")
    for fractions in NEIGHBOURS:
        for threads in options.threads:
            with busy_neighbours(fractions), context.Pool(1) as pool:
                arguments = (str(model), threads or None, options.sequences, options.seconds)
                tokens_per_s, used = pool.apply(decode, arguments)
            row = {"neighbours": list(fractions), "threads": threads, "used": used}
            print(json.dumps(row | {"tokens_per_s": round(tokens_per_s)}), flush=True)


if __name__ == "__main__":
    main()
