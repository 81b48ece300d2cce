"""Measure the overhead of a decode step besides the model, with 1 to 256 sequences, in microseconds. Prints JSON lines.

    python -m benchmarks.steps [--shape qwen2-0.5b] [--threads 1] [--sequences 1 16 64 256] [--inflight 0] [--profile]
                              [--model-impl argosy transformers]

The model is the bundled one, or one of a shape with random weights. The phases are:

plan: the scheduler.
launch: the batch.
sample: from logits to tokens, kernels included.
commit: the scheduler applies results, and deltas are made.
rest: everything else, such as statistics and freeing the logits.

overhead is launch + commit + rest. compute is the model's time meanwhile. Values are lower quartiles over the steps,
because other processes can only add time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from benchmarks.checkpoints import SHAPES, make_checkpoint

STEPS = 100
FIRST = 10
"""Steps that are not measured, in which caches are filled."""


def steps(
    config: EngineConfig, sequences: int, temperature: float, profile: cProfile.Profile | None
) -> Iterator[dict[str, float]]:
    """Decode `sequences` at once, and yield the microseconds of each step by phase."""
    from argosy.engine.serving.engine_core.core import EngineCore

    core = EngineCore(config, time.perf_counter, lambda _what, _done: None)
    params = SamplingParams(max_tokens=STEPS + 20, temperature=temperature, seed=1, ignore_eos=True)
    for number in range(sequences):
        prompt = [number % 97 + 5] * (8 + number % 8)
        core.add(EngineRequest(id=f"request-{number}", prompt=prompt, params=params))
    before: dict[str, float] = {}
    for step in range(STEPS):
        if profile is not None and step >= FIRST:
            profile.enable()
        begin = time.perf_counter()
        stats = core.step().stats
        elapsed_s = time.perf_counter() - begin
        if profile is not None:
            profile.disable()
        phase_s = {phase: s - before.get(phase, 0.0) for phase, s in stats.phase_s_total.items()}
        before = stats.phase_s_total
        phase_s["rest"] = elapsed_s - sum(phase_s.values())
        phase_s["overhead"] = phase_s["launch"] + phase_s["commit"] + phase_s["rest"]
        if step >= FIRST:
            yield {name: seconds * 1e6 for name, seconds in phase_s.items()}


def main() -> None:
    """Print a JSON line for each number of sequences. With --profile also print the slowest functions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--inflight", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model-impl", nargs="+", default=["auto"])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    model = (
        BUNDLED_MODEL if options.shape is None else make_checkpoint(options.shape, options.folder)
    )
    for sequences, model_impl in product(options.sequences, options.model_impl):
        config = EngineConfig(
            model=str(model),
            threads=options.threads,
            warmup=False,
            max_seqs=sequences,
            num_blocks=sequences * 10,
            max_step_tokens=8192,
            max_steps_in_flight=options.inflight,
            model_impl=model_impl,
        )
        profile = cProfile.Profile() if options.profile else None
        measured = list(steps(config, sequences, options.temperature, profile))
        row: dict[str, int | str] = {"sequences": sequences, "model_impl": model_impl}
        for name in measured[0]:
            quartile = statistics.quantiles((step[name] for step in measured), n=4)[0]
            row[f"{name}_us"] = round(quartile)
        print(json.dumps(row), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
