"""What batching, chunked prefill and the prefix cache do to throughput and latency, on one shape; JSON lines.

    python -m benchmarks.batching [--shape llama-160m] [--scale 1.0]

batching: 120 requests, input 32-256, output 16-128, Poisson arrivals; static, dynamic and continuous.
prefill: 8 running decodes while prompts of 1,024-2,048 tokens arrive; chunks of several sizes, and whole.
prefix: the same work with the cache on and off, alternately, no prompt ever hit: the ratio of throughputs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.engine.engine_config import COMPUTE_ENVIRONMENT, EngineConfig
from benchmarks.checkpoints import SHAPES, make

if TYPE_CHECKING:
    from argosy.engine.serving.engine_core.core import EngineCore

IDLE_S = 0.0005
CHUNKS = ((256, 0.5), (512, 0.5), (1024, 0.25), (1024, 0.5), (1024, 1.0))
"""(max_step_tokens, prefill_share)."""
WHOLE = (8192, 1.0)
"""A budget that no prompt here exceeds: every prompt is one chunk."""
RESAMPLES = 2000
POOL_BLOCKS = 320
"""Blocks of the engines with and without prefix cache: few, so that no memory is new in a run that counts."""
WARM_PAIRS = 3
"""Pairs of runs in which every block is used once."""


@dataclass(frozen=True, slots=True)
class Request:
    """When it comes (seconds from the start), its prompt and how many tokens it wants."""

    at_s: float
    prompt: list[int]
    output: int


@dataclass(slots=True)
class Trace:
    """What a run of requests was like."""

    total_s: float = 0.0
    stamps: list[list[float]] = field(default_factory=list)
    """For each request the times of its tokens, seconds from its arrival."""
    running: list[int] = field(default_factory=list)
    """Sequences that ran, for each step that computed something."""
    planned_s: float = 0.0
    """Seconds since the engine began in which steps were planned and their results taken in."""

    def gaps_ms(self, some: slice = slice(None)) -> list[float]:
        """The times between tokens of some requests."""
        gaps = [1e3 * (b - a) for stamps in self.stamps[some] for a, b in pairwise(stamps)]
        return gaps or [0.0]

    def first_ms(self, some: slice = slice(None)) -> list[float]:
        """The times to the first token of some requests."""
        return [1e3 * stamps[0] for stamps in self.stamps[some]]


def core_of(model: Path, **settings: object) -> EngineCore:
    """An engine of its own, in this process."""
    import msgspec

    from argosy.engine.serving.engine_core.core import EngineCore

    given = {"model": str(model), "num_blocks": 4096, "dtype": "bfloat16"} | settings
    config = msgspec.convert(given, EngineConfig)
    return EngineCore(config, time.perf_counter, lambda _what, _done: None)


def serve(core: EngineCore, work: list[Request]) -> Trace:
    """Serve requests as they come due, by the real clock; `work` is in the order of arrival."""
    from argosy.engine.serving.core_messages import EngineRequest
    from argosy.protocol import SamplingParams

    begin, due = time.perf_counter(), 0
    trace = Trace(stamps=[[] for _ in work])
    while due < len(work) or core.has_work:
        now = time.perf_counter() - begin
        while due < len(work) and work[due].at_s <= now:
            one = work[due]
            params = SamplingParams(max_tokens=one.output, temperature=0.0, ignore_eos=True)
            core.add(EngineRequest(id=str(due), prompt=one.prompt, params=params))
            due += 1
        if not core.has_work:
            time.sleep(max(0.0, work[due].at_s - now))
            continue
        outputs = core.step()
        now = time.perf_counter() - begin
        for delta in outputs.deltas:
            number = int(delta.id)
            trace.stamps[number] += [now - work[number].at_s] * len(delta.tokens)
        if outputs.stats.step_tokens:
            trace.running.append(outputs.stats.running)
            spent = outputs.stats.phase_s_total
            trace.planned_s = spent["plan"] + spent["commit"]
        else:
            time.sleep(IDLE_S)
    trace.total_s = time.perf_counter() - begin
    return trace


def tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Token ids that are no special ones."""
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def percentiles(name: str, values: list[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return {
        f"{name}_p50_ms": round(statistics.median(ordered), 2),
        f"{name}_p99_ms": round(ordered[at], 2),
    }


def compare_batching(model: Path, vocabulary: int, scale: float, rate: float) -> None:
    """One workload under each kind of batching."""
    rng, now, work = random.Random(0), 0.0, []
    for _ in range(max(4, int(120 * scale))):
        now += rng.expovariate(rate)
        prompt = tokens(rng, rng.randint(32, 256), vocabulary)
        work.append(Request(now, prompt, rng.randint(16, 128)))
    output = sum(one.output for one in work)
    for batching in ("static", "dynamic", "continuous"):
        trace = serve(core_of(model, batching=batching, max_seqs=16, prefix_cache=False), work)
        line: dict[str, object] = {"part": "batching", "batching": batching, "rate": rate}
        line |= {"requests": len(work), "out_tok_s": round(output / trace.total_s, 1)}
        line |= percentiles("ttft", trace.first_ms()) | percentiles("itl", trace.gaps_ms())
        line |= {"mean_running": round(statistics.mean(trace.running), 2)}
        print(json.dumps(line), flush=True)


def compare_prefill(model: Path, vocabulary: int, scale: float) -> None:
    """Running decodes beside arriving long prompts, in chunks and whole."""
    rng, now, decodes = random.Random(1), 0.5, 8
    length = max(40, int(400 * scale))
    work = [Request(0.0, tokens(rng, 32, vocabulary), length) for _ in range(decodes)]
    for _ in range(max(2, int(8 * scale))):
        work.append(Request(now, tokens(rng, rng.randint(1024, 2048), vocabulary), 8))
        now += rng.expovariate(2.0)
    for budget, share in (*CHUNKS, WHOLE):
        core = core_of(model, max_step_tokens=budget, max_prefill_fraction=share, prefix_cache=False)
        trace = serve(core, work)
        line: dict[str, object] = {"part": "prefill", "chunked": (budget, share) != WHOLE}
        line |= {"max_step_tokens": budget, "prefill_share": share}
        line |= percentiles("decode_itl", trace.gaps_ms(slice(decodes)))
        line |= percentiles("prompt_ttft", trace.first_ms(slice(decodes, None)))
        print(json.dumps(line | {"total_s": round(trace.total_s, 2)}), flush=True)


def unrepeated(rng: random.Random, vocabulary: int) -> list[Request]:
    """Twelve requests of the same sizes each time, all at once, with prompts of their own."""
    lengths = random.Random(3)
    sizes = [(lengths.randint(64, 256), lengths.randint(8, 32)) for _ in range(12)]
    return [Request(0.0, tokens(rng, size, vocabulary), output) for size, output in sizes]


def compare_prefix(model: Path, vocabulary: int, scale: float) -> None:
    """Pairs of runs with the prefix cache on and off, in turns, on prompts that never repeat.

    Computing is the same in both, and moves with whatever else the machine does; what the cache adds is planning.
    """
    rng, ratios, shares = random.Random(2), [], []
    for first in (True, False):  # what is built first may lie better in memory
        cores = {
            on: core_of(model, prefix_cache=on, num_blocks=POOL_BLOCKS) for on in (first, not first)
        }
        before, took = {True: 0.0, False: 0.0}, dict[bool, Trace]()
        for pair in range(-WARM_PAIRS, max(2, int(12 * scale))):
            before |= {on: trace.planned_s for on, trace in took.items()}
            for on in (True, False) if pair % 2 else (False, True):
                took[on] = serve(cores[on], unrepeated(rng, vocabulary))
            if pair >= 0:
                ratios.append(took[False].total_s / took[True].total_s)
                planned_s = {on: took[on].planned_s - before[on] for on in took}
                added_s = planned_s[True] - planned_s[False]
                shares.append(added_s / took[False].total_s)
    line: dict[str, object] = {"part": "prefix", "pairs": len(ratios)}
    for name, values in (("throughput_on_to_off", ratios), ("planning_added_share", shares)):
        medians = sorted(
            statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
        )
        bounds = [round(medians[int(RESAMPLES * part)], 5) for part in (0.025, 0.975)]
        line |= {name: round(statistics.median(values), 5), f"{name}_interval_95": bounds}
    print(json.dumps(line), flush=True)


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-160m")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full workload")
    parser.add_argument("--rate", type=float, default=20.0, help="arrivals per second")
    parser.add_argument("--parts", nargs="+", default=("batching", "prefill", "prefix"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    options = parser.parse_args()
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # before torch loads
    model = make(options.shape, options.folder)
    vocabulary = int(str(SHAPES[options.shape]["vocab_size"]))
    if "batching" in options.parts:
        compare_batching(model, vocabulary, options.scale, options.rate)
    if "prefill" in options.parts:
        compare_prefill(model, vocabulary, options.scale)
    if "prefix" in options.parts:
        compare_prefix(model, vocabulary, options.scale)


if __name__ == "__main__":
    main()
