"""Measure the memory of the KV cache by the scheduler's own block pool, without a model. Prints JSON lines.

The first lines compare models with sliding windows with a cache that keeps all blocks. The others show the part of the
blocks that sequences of short and long answers leave empty while they decode.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.architectures.architecture import arrange_layers
from argosy.engine.scheduling import KvCacheGroups, Scheduler, SchedulerLimits, StepResult
from argosy.protocol import SamplingParams

BLOCK_SIZE = 16
OUTPUT_TOKENS = 200
SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of a model."""

    windows: tuple[int | None, ...]
    """Sliding window of each layer."""
    kv_bytes_per_layer: int
    """Bytes of keys and values of one token in one layer, in bfloat16."""


SHAPES = {
    "gemma 3 4b": Shape(
        tuple(None if layer % 6 == 5 else 1024 for layer in range(34)), 2 * 4 * 256 * 2
    ),
    "gpt-oss 20b": Shape(
        tuple(128 if layer % 2 == 0 else None for layer in range(24)), 2 * 8 * 64 * 2
    ),
}
CONTEXTS = (4096, 32768)
ANSWERS = ((10, 60), (50, 200), (200, 1000))


def create_scheduler(kv_windows: tuple[int | None, ...], block_size: int) -> Scheduler:
    """Return a scheduler with much memory."""
    return Scheduler(
        SchedulerLimits(
            max_seqs=SEQUENCES,
            max_step_tokens=1024,
            block_size=block_size,
            num_blocks=200_000,
            max_prefill_fraction=0.25,
            watermark=0.01,
            prefix_cache=True,
            ridge_tokens=16,
            kv_windows=kv_windows,
        )
    )


def run_step(scheduler: Scheduler) -> None:
    """Compute one step."""
    plan = scheduler.schedule(0.0)
    scheduler.commit(StepResult([5 if samples else -1 for samples in plan.sample_counts]))


def measure_context(name: str, context: int) -> dict[str, object]:
    """Return the bytes per 1,000 tokens of a sequence of `context` tokens, before and after windows free blocks."""
    shape = SHAPES[name]
    layout = arrange_layers(shape.windows, 131_072)
    bytes_per_token = shape.kv_bytes_per_layer * len(shape.windows)
    block_bytes = layout.block_bytes(bytes_per_token, BLOCK_SIZE)
    scheduler = create_scheduler(layout.windows, BLOCK_SIZE)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS)
    prompt = [1] * (context - OUTPUT_TOKENS)
    scheduler.add(EngineRequest(id="a", prompt=prompt, params=params), now=0.0)
    (seq,) = scheduler.requests
    prefill_peak = used = 0
    while scheduler.has_work:
        run_step(scheduler)
        prefill_peak = max(prefill_peak, scheduler.kv_cache.pool.used_blocks)
        used = scheduler.kv_cache.count_held_blocks(seq) or used
    formula = KvCacheGroups(layout.windows, BLOCK_SIZE).count_blocks(context)
    return {
        "model": name,
        "context": context,
        "groups": len(layout.windows),
        "all_blocks_mb_per_1000": round(bytes_per_token * 1000 / 1e6, 2),
        "formula_mb_per_1000": round(formula * block_bytes / context / 1e3, 2),
        "measured_mb_per_1000": round(used * block_bytes / context / 1e3, 2),
        "peak_mb_per_1000": round(prefill_peak * block_bytes / context / 1e3, 2),
        "ratio": round(used * block_bytes / context / bytes_per_token, 3),
    }


def measure_waste(answer: tuple[int, int], block_size: int) -> float:
    """Return the empty part of the blocks of decoding sequences, with prompts as long as the answers."""
    rng = random.Random(1)
    scheduler = create_scheduler((None,), block_size)
    slots = tokens = added = 0
    for _ in range(3000):
        while len(scheduler.requests) < SEQUENCES:
            prompt, added = [rng.randrange(1 << 30) for _ in range(rng.randint(*answer))], added + 1
            params = SamplingParams(max_tokens=rng.randint(*answer))
            scheduler.add(EngineRequest(id=str(added), prompt=prompt, params=params), now=0.0)
        run_step(scheduler)
        for seq in scheduler.running:
            slots += seq.capacity
            tokens += seq.computed_len
    return 1 - tokens / slots


def main() -> None:
    """Print one JSON line for each model and context, and for each answer and block size."""
    for name in SHAPES:
        for context in CONTEXTS:
            print(json.dumps(measure_context(name, context)))
    for answer in ANSWERS:
        for block_size in (8, 16, 32):
            waste = round(measure_waste(answer, block_size), 4)
            print(json.dumps({"answer": answer, "block_size": block_size, "waste": waste}))


if __name__ == "__main__":
    main()
