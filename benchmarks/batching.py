"""Effect of batching, chunked prefill and the prefix cache on throughput and latency, on one shape. Prints JSON lines.

    python -m benchmarks.batching [--shape llama-160m] [--scale 1.0]

batching: 120 requests with Poisson arrivals, input 32-256, output 16-128; static, dynamic and continuous batching.
prefill: 8 running decodes while prompts of 1,024-2,048 tokens arrive; chunks of several sizes, and whole prompts.
prefix: the same work with the cache on and off in turns, without any cache hit; the ratio of the throughputs.
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

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from benchmarks.checkpoints import SHAPES, make_checkpoint

if TYPE_CHECKING:
    from argosy.engine.serving.engine_core.core import EngineCore

IDLE_S = 0.0005
CHUNKS = ((256, 0.5), (512, 0.5), (1024, 0.25), (1024, 0.5), (1024, 1.0))
"""Pairs of max_step_tokens and max_prefill_fraction."""
WHOLE = (8192, 1.0)
"""Step budget that no prompt exceeds, so that every prompt is one chunk."""
RESAMPLES = 2000
POOL_BLOCKS = 320
"""Blocks of the engines with and without prefix cache. They are few, so that measured runs touch no new memory."""
WARM_PAIRS = 3
"""Warm-up pairs of runs, in which every block is used once."""


@dataclass(frozen=True, slots=True)
class Request:
    """Arrival time after the start, prompt and output length of a request."""

    at_s: float
    prompt: list[int]
    output: int


@dataclass(slots=True)
class Trace:
    """Measurements of a run."""

    total_s: float = 0.0
    stamps: list[list[float]] = field(default_factory=list)
    """Times of the tokens of each request, in seconds after its arrival."""
    running: list[int] = field(default_factory=list)
    """Number of running sequences in each step that computed tokens."""
    planned_s: float = 0.0
    """Total time of the engine for planning and committing steps, in seconds."""

    def gaps_ms(self, selection: slice = slice(None)) -> list[float]:
        """Return the gaps between tokens of the selected requests in milliseconds."""
        gaps = [1e3 * (b - a) for stamps in self.stamps[selection] for a, b in pairwise(stamps)]
        return gaps or [0.0]

    def first_ms(self, selection: slice = slice(None)) -> list[float]:
        """Return the times to first token of the selected requests in milliseconds."""
        return [1e3 * stamps[0] for stamps in self.stamps[selection]]


def create_core(model: Path, **settings: object) -> EngineCore:
    """Return a new engine core in this process."""
    import msgspec

    from argosy.engine.serving.engine_core.core import EngineCore

    settings_with_defaults = {
        "model": str(model),
        "num_blocks": 4096,
        "dtype": "bfloat16",
    } | settings
    config = msgspec.convert(settings_with_defaults, EngineConfig)
    return EngineCore(config, time.perf_counter, lambda _what, _done: None)


def serve(core: EngineCore, work: list[Request]) -> Trace:
    """Serve the requests in real time. `work` is sorted by arrival."""
    from argosy.engine.engine_request import EngineRequest
    from argosy.protocol import SamplingParams

    begin, next_index = time.perf_counter(), 0
    trace = Trace(stamps=[[] for _ in work])
    while next_index < len(work) or core.has_work:
        now = time.perf_counter() - begin
        while next_index < len(work) and work[next_index].at_s <= now:
            request = work[next_index]
            params = SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True)
            core.add(EngineRequest(id=str(next_index), prompt=request.prompt, params=params))
            next_index += 1
        if not core.has_work:
            time.sleep(max(0.0, work[next_index].at_s - now))
            continue
        outputs = core.step()
        now = time.perf_counter() - begin
        for delta in outputs.deltas:
            index = int(delta.id)
            trace.stamps[index] += [now - work[index].at_s] * len(delta.tokens)
        if outputs.stats.step_tokens:
            trace.running.append(outputs.stats.running)
            phase_s = outputs.stats.phase_s_total
            trace.planned_s = phase_s["plan"] + phase_s["commit"]
        else:
            time.sleep(IDLE_S)
    trace.total_s = time.perf_counter() - begin
    return trace


def tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Return random token ids without special tokens."""
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def percentiles(name: str, values: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(values)
    p99_index = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return {
        f"{name}_p50_ms": round(statistics.median(ordered), 2),
        f"{name}_p99_ms": round(ordered[p99_index], 2),
    }


def compare_batching(model: Path, vocabulary: int, scale: float, rate: float) -> None:
    """Compare the kinds of batching on one workload."""
    rng, now, work = random.Random(0), 0.0, []
    for _ in range(max(4, int(120 * scale))):
        now += rng.expovariate(rate)
        prompt = tokens(rng, rng.randint(32, 256), vocabulary)
        work.append(Request(now, prompt, rng.randint(16, 128)))
    output = sum(request.output for request in work)
    for batching in ("static", "dynamic", "continuous"):
        trace = serve(create_core(model, batching=batching, max_seqs=16, prefix_cache=False), work)
        line: dict[str, object] = {"part": "batching", "batching": batching, "rate": rate}
        line |= {"requests": len(work), "out_tok_s": round(output / trace.total_s, 1)}
        line |= percentiles("ttft", trace.first_ms()) | percentiles("itl", trace.gaps_ms())
        line |= {"mean_running": round(statistics.mean(trace.running), 2)}
        print(json.dumps(line), flush=True)


def compare_prefill(model: Path, vocabulary: int, scale: float) -> None:
    """Measure running decodes while long prompts arrive, in chunks and whole."""
    rng, now, decodes = random.Random(1), 0.5, 8
    length = max(40, int(400 * scale))
    work = [Request(0.0, tokens(rng, 32, vocabulary), length) for _ in range(decodes)]
    for _ in range(max(2, int(8 * scale))):
        work.append(Request(now, tokens(rng, rng.randint(1024, 2048), vocabulary), 8))
        now += rng.expovariate(2.0)
    for budget, share in (*CHUNKS, WHOLE):
        core = create_core(
            model, max_step_tokens=budget, max_prefill_fraction=share, prefix_cache=False
        )
        trace = serve(core, work)
        line: dict[str, object] = {"part": "prefill", "chunked": (budget, share) != WHOLE}
        line |= {"max_step_tokens": budget, "prefill_share": share}
        line |= percentiles("decode_itl", trace.gaps_ms(slice(decodes)))
        line |= percentiles("prompt_ttft", trace.first_ms(slice(decodes, None)))
        print(json.dumps(line | {"total_s": round(trace.total_s, 2)}), flush=True)


def unique_requests(rng: random.Random, vocabulary: int) -> list[Request]:
    """Return twelve simultaneous requests. Their sizes are always the same, their prompts never repeat."""
    lengths = random.Random(3)
    sizes = [(lengths.randint(64, 256), lengths.randint(8, 32)) for _ in range(12)]
    return [Request(0.0, tokens(rng, size, vocabulary), output) for size, output in sizes]


def compare_prefix(model: Path, vocabulary: int, scale: float) -> None:
    """Compare pairs of runs with the prefix cache on and off, on prompts that never repeat.

    Both compute the same, and the computing time varies with the load of the machine. So the cache's cost is measured
    as the additional planning time.
    """
    rng, ratios, shares = random.Random(2), [], []
    for first in (True, False):  # the core that is created first may have better memory placement
        cores = {
            enabled: create_core(model, prefix_cache=enabled, num_blocks=POOL_BLOCKS)
            for enabled in (first, not first)
        }
        planned_before_s, traces = {True: 0.0, False: 0.0}, dict[bool, Trace]()
        for pair in range(-WARM_PAIRS, max(2, int(12 * scale))):
            planned_before_s |= {enabled: trace.planned_s for enabled, trace in traces.items()}
            for enabled in (True, False) if pair % 2 else (False, True):
                traces[enabled] = serve(cores[enabled], unique_requests(rng, vocabulary))
            if pair >= 0:
                ratios.append(traces[False].total_s / traces[True].total_s)
                planned_s = {
                    enabled: traces[enabled].planned_s - planned_before_s[enabled]
                    for enabled in traces
                }
                added_s = planned_s[True] - planned_s[False]
                shares.append(added_s / traces[False].total_s)
    line: dict[str, object] = {"part": "prefix", "pairs": len(ratios)}
    for name, values in (("throughput_on_to_off", ratios), ("planning_added_share", shares)):
        medians = sorted(
            statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
        )
        bounds = [round(medians[int(RESAMPLES * quantile)], 5) for quantile in (0.025, 0.975)]
        line |= {name: round(statistics.median(values), 5), f"{name}_interval_95": bounds}
    print(json.dumps(line), flush=True)


def main() -> None:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-160m")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the full workload")
    parser.add_argument("--rate", type=float, default=20.0, help="arrivals per second")
    parser.add_argument("--parts", nargs="+", default=("batching", "prefill", "prefix"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    options = parser.parse_args()
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # must be set before torch is loaded
    model = make_checkpoint(options.shape, options.folder)
    vocabulary = int(str(SHAPES[options.shape]["vocab_size"]))
    if "batching" in options.parts:
        compare_batching(model, vocabulary, options.scale, options.rate)
    if "prefill" in options.parts:
        compare_prefill(model, vocabulary, options.scale)
    if "prefix" in options.parts:
        compare_prefix(model, vocabulary, options.scale)


if __name__ == "__main__":
    main()
