"""Measure the wait of premium requests for their first token in a busy engine, and its cost for lower tiers.

    python -m benchmarks.tiers [--seconds 20] [--pairs 5] [--sequences 28] [--lower 20] [--premium 20]

The bundled model runs in this process on one thread. The clock counts only this process's processor time, so that
other load does not matter. Standard requests keep a fixed number of sequences running. Premium requests arrive at
random, five per second. Prints JSON lines: premium alone, then pairs in which lower tiers yield to first tokens and do
not. The last row has the medians of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field, replace

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.scheduling import Scheduler
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams

OUTPUT = (16, 64)
"""Smallest and largest number of output tokens."""
KINDS = {"standing back": None, "together": 1 << 60}
"""Ridge in tokens by kind of run: None is the device's. With a very large ridge no lower tier yields."""
RATE = 5.0
"""Premium requests per second."""


@dataclass(slots=True)
class Run:
    """Measurements of a run."""

    waits: list[float] = field(default_factory=list)
    """Times to first token of premium requests, in seconds."""
    gaps: list[float] = field(default_factory=list)
    """Gaps between tokens of standard requests, in seconds."""
    tokens: int = 0
    seconds: float = 0.0

    def row(self, kind: str) -> dict[str, object]:
        """Return the row of the run."""
        row: dict[str, object] = {"kind": kind, "tokens_per_s": round(self.tokens / self.seconds)}
        for name, values in (("premium_ttft", self.waits), ("standard_itl", self.gaps)):
            if len(values) > 1:
                row[f"{name}_p50_ms"] = round(1e3 * statistics.median(values), 2)
                row[f"{name}_p95_ms"] = round(1e3 * p95(values), 2)
        return row


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def run(ridge_tokens: int | None, standard: int, options: argparse.Namespace) -> Run:
    """Serve for `options.seconds`. `ridge_tokens` is a scheduler limit, or None for the device's."""
    from argosy.engine.serving.engine_core.core import EngineCore

    config = EngineConfig(
        model=str(BUNDLED_MODEL), threads=1, max_seqs=32, num_blocks=4096, prefix_cache=False
    )
    core = EngineCore(config, time.process_time, lambda _what, _done: None)
    if ridge_tokens is not None:
        core.scheduler = Scheduler(replace(core.scheduler.limits, ridge_tokens=ridge_tokens))
    rng, result, number, idle = random.Random(0), Run(), 0, 0.0
    last: dict[str, float] = {}

    def add_request(tier: int, length: int, at_s: float) -> None:
        nonlocal number
        number += 1
        name = f"{tier}/{number}"
        params = SamplingParams(max_tokens=rng.randint(*OUTPUT), ignore_eos=True)
        prompt = [rng.randrange(10, 3000) for _ in range(length)]
        core.add(EngineRequest(id=name, prompt=prompt, params=params, tier=tier))
        last[name] = at_s

    for _ in range(standard):
        add_request(1, options.lower, 0.0)
    begin = time.process_time()
    now, due_s = 0.0, rng.expovariate(RATE)
    while now < options.seconds:
        while due_s <= now:
            add_request(0, options.premium, due_s)
            due_s += rng.expovariate(RATE)
        if not core.has_work:
            idle += due_s - now
        else:
            for delta in core.step().deltas:
                at_s = time.process_time() - begin + idle
                result.tokens += len(delta.tokens)
                if delta.id.startswith("1"):
                    result.gaps.append(at_s - last[delta.id])
                    last[delta.id] = at_s
                elif delta.id in last:
                    result.waits.append(at_s - last.pop(delta.id))
                if delta.finish_reason and delta.id.startswith("1"):
                    add_request(1, options.lower, at_s)
        now = time.process_time() - begin + idle
    result.seconds = now
    return result


def main() -> None:
    """Print a row for each run, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="processor time of each run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=28, help="running standard requests")
    parser.add_argument("--lower", type=int, default=20, help="tokens of standard prompts")
    parser.add_argument("--premium", type=int, default=20, help="tokens of premium prompts")
    options = parser.parse_args()
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # must be set before torch is loaded
    alone = run(None, 0, options)
    print(json.dumps(alone.row("alone")), flush=True)
    throughput, waits, to_alone = [], [], []
    for pair in range(options.pairs):
        results = {}
        for kind in KINDS if pair % 2 else reversed(KINDS):
            results[kind] = run(KINDS[kind], options.sequences, options)
            print(json.dumps(results[kind].row(kind)), flush=True)
        yielding, together = (results[kind] for kind in KINDS)
        throughput.append(yielding.tokens / yielding.seconds / (together.tokens / together.seconds))
        waits.append(p95(yielding.waits) / p95(together.waits))
        to_alone.append(p95(yielding.waits) / p95(alone.waits))
    medians = {
        "throughput_ratio": throughput,
        "premium_ttft_p95_ratio": waits,
        "premium_ttft_p95_ratio_to_alone": to_alone,
    }
    row = {name: round(statistics.median(values), 3) for name, values in medians.items()}
    print(json.dumps({"kind": "ratios", "pairs": options.pairs} | row))


if __name__ == "__main__":
    main()
