"""What a premium request's first token waits for in a busy engine, and what lower tiers pay for it; JSON lines.

    python -m benchmarks.tiers [--seconds 20] [--pairs 5] [--sequences 28] [--lower 20] [--premium 20]

The bundled model in this process, on one thread and on a clock that counts this process's computing alone, so that
others on the machine do not matter. Standard requests keep so many sequences running; premium ones come at
random, five a second. Rows: premium alone; then pairs with lower tiers standing back for first tokens, and not. The
last row has the medians of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field, replace

from argosy.engine.engine_config import COMPUTE_ENVIRONMENT, EngineConfig
from argosy.engine.scheduling import Scheduler
from argosy.engine.serving.core_messages import EngineRequest
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams

OUTPUT = (16, 64)
"""Tokens of the answers."""
KINDS = {"standing back": None, "together": 1 << 60}
"""And the ridge that makes it so: as the device has it, or so many tokens that no step is worth another."""
RATE = 5.0
"""Premium requests a second."""


@dataclass(slots=True)
class Run:
    """What one run was like."""

    waits: list[float] = field(default_factory=list)
    """Seconds to the first tokens of premium requests."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between the tokens of standard ones."""
    tokens: int = 0
    seconds: float = 0.0

    def row(self, kind: str) -> dict[str, object]:
        """For the record."""
        row: dict[str, object] = {"kind": kind, "tokens_per_s": round(self.tokens / self.seconds)}
        for name, values in (("premium_ttft", self.waits), ("standard_itl", self.gaps)):
            if len(values) > 1:
                row[f"{name}_p50_ms"] = round(1e3 * statistics.median(values), 2)
                row[f"{name}_p95_ms"] = round(1e3 * p95(values), 2)
        return row


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def run(ridge_tokens: int | None, standard: int, options: argparse.Namespace) -> Run:
    """Serve for so long; `ridge_tokens` as the scheduler has it, None: the device's."""
    from argosy.engine.serving.engine_core.core import EngineCore

    config = EngineConfig(
        model=str(BUNDLED_MODEL), threads=1, max_seqs=32, num_blocks=4096, prefix_cache=False
    )
    core = EngineCore(config, time.process_time, lambda _what, _done: None)
    if ridge_tokens is not None:
        core.scheduler = Scheduler(replace(core.scheduler.limits, ridge_tokens=ridge_tokens))
    rng, found, number, idle = random.Random(0), Run(), 0, 0.0
    last: dict[str, float] = {}

    def ask(tier: int, length: int, at: float) -> None:
        nonlocal number
        number += 1
        name = f"{tier}/{number}"
        params = SamplingParams(max_tokens=rng.randint(*OUTPUT), ignore_eos=True)
        prompt = [rng.randrange(10, 3000) for _ in range(length)]
        core.add(EngineRequest(id=name, prompt=prompt, params=params, tier=tier))
        last[name] = at

    for _ in range(standard):
        ask(1, options.lower, 0.0)
    begin = time.process_time()
    now, due = 0.0, rng.expovariate(RATE)
    while now < options.seconds:
        while due <= now:
            ask(0, options.premium, due)
            due += rng.expovariate(RATE)
        if not core.has_work:
            idle += due - now
        else:
            for delta in core.step().deltas:
                at = time.process_time() - begin + idle
                found.tokens += len(delta.tokens)
                if delta.id.startswith("1"):
                    found.gaps.append(at - last[delta.id])
                    last[delta.id] = at
                elif delta.id in last:
                    found.waits.append(at - last.pop(delta.id))
                if delta.finish_reason and delta.id.startswith("1"):
                    ask(1, options.lower, at)
        now = time.process_time() - begin + idle
    found.seconds = now
    return found


def main() -> None:
    """Print a row for each run, and what they say together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of computing, each run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=28, help="standard ones that run")
    parser.add_argument("--lower", type=int, default=20, help="tokens of their prompts")
    parser.add_argument("--premium", type=int, default=20, help="tokens of premium prompts")
    options = parser.parse_args()
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # before torch loads
    alone = run(None, 0, options)
    print(json.dumps(alone.row("alone")), flush=True)
    throughput, waits, to_alone = [], [], []
    for pair in range(options.pairs):
        found = {}
        for kind in KINDS if pair % 2 else reversed(KINDS):
            found[kind] = run(KINDS[kind], options.sequences, options)
            print(json.dumps(found[kind].row(kind)), flush=True)
        with_, without = (found[kind] for kind in KINDS)
        throughput.append(with_.tokens / with_.seconds / (without.tokens / without.seconds))
        waits.append(p95(with_.waits) / p95(without.waits))
        to_alone.append(p95(with_.waits) / p95(alone.waits))
    medians = {
        "throughput_ratio": throughput,
        "premium_ttft_p95_ratio": waits,
        "premium_ttft_p95_ratio_to_alone": to_alone,
    }
    row = {name: round(statistics.median(values), 3) for name, values in medians.items()}
    print(json.dumps({"kind": "ratios", "pairs": options.pairs} | row))


if __name__ == "__main__":
    main()
