"""Measure the scheduler's time per decode step with 1 to 256 sequences, in microseconds. Prints JSON lines.

Models are one without sliding windows, and those with one and six KV cache groups of windows beside one without.
"""

from __future__ import annotations

import json
import statistics
import time
from itertools import product

from argosy.engine.engine_request import EngineRequest
from argosy.engine.scheduling import Scheduler, SchedulerLimits, StepResult
from argosy.protocol.sampling import SamplingParams

STEPS = 400
SIZES = (1, 16, 64, 256)
KV_WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None,),
    "gpt-oss": (None, 128),
    "gemma 3": (None, *[128] * 6),  # shorter than its 1,024, so that sequences leave it
}


def step_times_us(sequences: int, kv_windows: tuple[int | None, ...]) -> list[float]:
    """Return the time of `schedule` plus `commit` for each of `STEPS` decode steps, in microseconds."""
    scheduler = Scheduler(
        SchedulerLimits(
            max_seqs=sequences,
            max_step_tokens=8192,
            block_size=16,
            num_blocks=100_000,
            max_prefill_fraction=0.25,
            watermark=0.01,
            prefix_cache=True,
            ridge_tokens=16,
            kv_windows=kv_windows,
        )
    )
    params = SamplingParams(max_tokens=STEPS + 100)
    for number in range(sequences):
        prompt = [number % 97 + 1] * (20 + number % 16)
        request = EngineRequest(id=str(number), prompt=prompt, params=params)
        scheduler.add(request, now=0.0, stop_token_ids=frozenset([2]))
    times = []
    for step in range(STEPS):
        begin = time.perf_counter()
        plan = scheduler.schedule(float(step))
        middle = time.perf_counter()
        result = StepResult([5 if sampled else -1 for sampled in plan.sample_counts])
        resume = time.perf_counter()
        scheduler.commit(result)
        end = time.perf_counter()
        if len(plan.rows) == sequences and max(plan.counts) == 1:
            times.append((end - resume + middle - begin) * 1e6)
    return times


def main() -> None:
    """Print one JSON line for each model and batch size."""
    for model, sequences in product(KV_WINDOWS, SIZES):
        times = step_times_us(sequences, KV_WINDOWS[model])
        row = {
            "model": model,
            "sequences": sequences,
            "median_us": round(statistics.median(times), 1),
            "p90_us": round(statistics.quantiles(times, n=10)[-1], 1),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
