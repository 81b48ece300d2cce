"""Reproduce claims of the field with the production's own decisions, and write their page.

    python -m benchmarks.twin_claims               write docs/reference/twin-claims.md and its plots
    python -m benchmarks.twin_claims NAME...       print the text of some of them

Nothing is measured: the same version gives the same page. Each claim has a seed, and a hash of all its figures and of
the traces of its runs. Alternatives that are not in the product are named baselines: the policies of Knative and
Kubernetes, and drafts of a fixed number. The engine has static batching for comparison only.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import random
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from argosy.bench import PlotSeries, RequestRow, render_plot
from argosy.engine.scheduling import SchedulerLimits, StaticBatching
from argosy.policy import RoutingPolicyName
from argosy.twin import (
    Engine,
    Fault,
    Lengths,
    PoolSettings,
    Scenario,
    SimulatedRequest,
    Span,
    Tenant,
    TwinRun,
    Workload,
    make_plan,
)
from argosy.twin.hardware import ReplicaHardware
from benchmarks.autoscaling import SCALERS, Row, compare, standalone_svg
from benchmarks.engine_simulation import Offered, Served, SimulatedDrafts, serve

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "twin-claims.md"
PLOTS = ROOT / "docs" / "images" / "claims"
SEED = 1
HARDWARE = ReplicaHardware(model="llama-3.1-8b", accelerator="h100_sxm")
COST = HARDWARE.build_cost()
LIMITS = SchedulerLimits(
    max_seqs=64,
    max_step_tokens=2048,
    block_size=16,
    num_blocks=24_000,
    max_prefill_fraction=0.5,
    watermark=0.01,
    prefix_cache=True,
    ridge_tokens=256,
    max_model_len=32_768,
)
KV_BYTES_PER_TOKEN = 131_072
"""KV cache of Llama 3.1 8B in bf16."""
LINK_BYTES_PER_S = 50e9
"""Network between two machines of H100."""


class Plot(NamedTuple):
    """A figure of a claim."""

    title: str
    x_label: str
    y_label: str
    series: list[PlotSeries]


class Finding(NamedTuple):
    """Result of the runs of a claim."""

    text: str
    plots: list[Plot]
    traces: str = ""
    """Hashes of the traces of runs of the twin."""


class Claim(NamedTuple):
    """A claim of the field."""

    title: str
    statement: str
    run: Callable[[], Finding]


def draw_requests(
    rate: float, count: int, prompt: float, output: float, *, sigma: float = 0.8, seed: int = SEED
) -> list[Offered]:
    """Return requests of a Poisson process with lognormal lengths of these medians. An infinite rate sends all at 0."""
    draw = random.Random(seed)
    requests, at_s = [], 0.0
    for _ in range(count):
        at_s += draw.expovariate(1.0) / rate
        lengths = (
            max(1, min(4000, round(median * draw.lognormvariate(0.0, sigma))))
            for median in (prompt, output)
        )
        requests.append(Offered(at_s, *lengths))
    return requests


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile; 0 of no values."""
    return float(np.percentile(values, percent)) if values else 0.0


def ratio(first: float, second: float) -> str:
    """Return how many times as large the first value is."""
    return f"{first / second:.1f} times"


# --- one engine ------------------------------------------------------------------------------------


def run_continuous_batching() -> Finding:
    """Compare batching policies by rate of requests, and for a queue that is full from the start."""
    rates = (2, 5, 8, 12, 16, 20, 25)
    policies = {"continuous": None, "static (baseline)": StaticBatching()}
    curves: dict[str, list[tuple[float, float]]] = {}
    throughput = {}
    for name, batching in policies.items():
        curves[name] = []
        for rate in rates:
            requests = draw_requests(rate, 300, 200, 150)
            times = serve(requests, LIMITS, COST, batching=batching).times
            per_token = [
                1e3 * (each[-1] - request.at_s) / len(each)
                for each, request in zip(times, requests, strict=True)
            ]
            curves[name].append((rate, statistics.median(per_token)))
        full = serve(draw_requests(float("inf"), 400, 200, 150), LIMITS, COST, batching=batching)
        tokens = sum(map(len, full.times))
        throughput[name] = tokens / max(each[-1] for each in full.times)
    ours, static = throughput.values()
    text = (
        f"With a full queue, continuous batching generates {ours:,.0f} tokens/s and static batching "
        f"{static:,.0f}: {ratio(ours, static)} as many. A static batch waits for its longest answer."
    )
    series = [PlotSeries(name, points) for name, points in curves.items()]
    return Finding(
        text, [Plot("Median time per output token", "requests/s", "ms per token", series)]
    )


def run_prefix_caching() -> Finding:
    """Compare TTFT and memory by the length of a shared prompt, with and without the prefix cache."""
    lengths = (0, 500, 1000, 2000, 4000, 8000)
    ttft: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    for name, prefix_cache in (("prefix cache", True), ("without", False)):
        limits = replace_limits(prefix_cache=prefix_cache)
        ttft[name], memory[name] = [], []
        for length in lengths:
            requests = [
                request._replace(prompt_tokens=request.prompt_tokens + length)
                for request in draw_requests(3.0, 150, 150, 120)
            ]
            served = serve(requests, limits, COST, prefix_tokens=length)
            ttft[name].append((length, percentile(served.ttft_ms(requests), 50)))
            memory[name].append((length, served.peak_tokens * KV_BYTES_PER_TOKEN / 1e9))
    with_cache, without = (points[-1][1] for points in ttft.values())
    small, large = (points[-1][1] for points in memory.values())
    text = (
        f"With a shared prompt of {lengths[-1]:,} tokens, median TTFT is {with_cache:.0f} ms with the cache and "
        f"{without:.0f} ms without ({ratio(without, with_cache)}). Requests that run hold {small:.1f} GB of KV cache "
        f"instead of {large:.1f} GB, because they share the blocks of the prompt."
    )
    return Finding(
        text,
        [
            Plot("Median TTFT", "shared tokens", "ms", as_series(ttft)),
            Plot("Peak KV cache of running requests", "shared tokens", "GB", as_series(memory)),
        ],
    )


def run_chunked_prefill() -> Finding:
    """Let long prompts arrive while others decode, with different bounds of a step."""
    budgets = (256, 512, 1024, 2048, 4096, 8192, 16_384)
    chats = draw_requests(4.0, 240, 100, 200, sigma=0.3)
    long_prompts = [Offered(1.0 + 3.0 * number, 15_000, 20) for number in range(18)]
    requests = sorted([*chats, *long_prompts])
    pauses: list[tuple[float, float]] = []
    tail: list[tuple[float, float]] = []
    first: list[tuple[float, float]] = []
    for budget in budgets:
        limits = replace_limits(max_step_tokens=budget, max_prefill_fraction=1.0)
        served = serve(requests, limits, COST)
        is_long = [request.prompt_tokens == 15_000 for request in requests]
        chat = Served([t for t, skip in zip(served.times, is_long, strict=True) if not skip], 0)
        ttft = served.ttft_ms(requests)
        pauses.append((budget, percentile(chat.longest_gaps_ms(), 90)))
        tail.append((budget, percentile(chat.gaps_ms(), 99)))
        first.append(
            (budget, statistics.median(t for t, keep in zip(ttft, is_long, strict=True) if keep))
        )
    text = (
        f"If prompts of 15,000 tokens are computed in one step, one of ten other streams has a pause of "
        f"{pauses[-1][1]:.0f} ms or more. With chunks of {pauses[1][0]} tokens it is {pauses[1][1]:.0f} ms "
        f"({ratio(pauses[-1][1], pauses[1][1])} shorter). The price is paid elsewhere: the 99th percentile of all "
        f"times between two tokens is {tail[1][1]:.0f} ms instead of {tail[-1][1]:.0f} ms, as more steps have a part "
        f"of a prompt. Median TTFT of the long prompts is {first[1][1]:,.0f} ms instead of {first[-1][1]:,.0f} ms."
    )
    return Finding(
        text,
        [
            Plot(
                "Times between tokens of other streams",
                "tokens of a step",
                "ms",
                [PlotSeries("longest, p90", pauses), PlotSeries("all, p99", tail)],
            ),
            Plot("Median TTFT of long prompts", "tokens of a step", "ms", [PlotSeries("", first)]),
        ],
    )


def run_speculation() -> Finding:
    """Decode batches of several sizes with drafts, and compare with decoding without them."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    makers: dict[str, Callable[[], SimulatedDrafts]] = {
        "policy, 80 %": lambda: SimulatedDrafts(0.8, 256, SEED),
        "policy, 40 %": lambda: SimulatedDrafts(0.4, 256, SEED),
        "always 8, 80 %": lambda: SimulatedDrafts(0.8, 256, SEED, fixed=8),
        "always 8, 40 %": lambda: SimulatedDrafts(0.4, 256, SEED, fixed=8),
    }
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for size in sizes:
        requests = [Offered(0.0, 200, 400)] * size
        plain = max(each[-1] for each in serve(requests, LIMITS, COST).times)
        for name, make in makers.items():
            times = serve(requests, LIMITS, COST, drafts=make()).times
            curves[name].append((size, plain / max(each[-1] for each in times)))
    policy, *_ = curves.values()
    gains = [[gain for _, gain in points] for points in curves.values()]
    worst, worst_fixed = min(gains[0] + gains[1]), min(gains[2] + gains[3])
    text = (
        f"With 80 % of the drafts accepted, speculation is {policy[0][1]:.1f} times as fast for one request and "
        f"{policy[-1][1]:.2f} times for a batch of 64. A step verifies up to 64 tokens in the product, so a full batch "
        f"has no drafts. The worst case of the policy is {worst:.2f}; that of a fixed number (a baseline) is "
        f"{worst_fixed:.2f}. Drafts cost nothing to find here, as by prompt lookup."
    )
    return Finding(
        text,
        [Plot("Speed relative to no drafts", "requests in the batch", "times", as_series(curves))],
    )


class _Received:
    """Price of the steps of a replica that receives the KV cache of prompts, and computes none."""

    def step_seconds(
        self,
        decode_rows: int,
        context_tokens: float,
        prefill_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        del prefill_chunks
        return COST.step_seconds(decode_rows, context_tokens) if decode_rows else 1e-6


def run_disaggregation() -> Finding:
    """Compare four replicas that do both with two for prompts and two for decodes."""
    rates = (3, 6, 9, 12)
    tails: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("divided", "chunks of 512", "chunks of 8,192")
    }
    firsts: dict[str, list[tuple[float, float]]] = {name: [] for name in tails}
    for rate in rates:
        requests = draw_requests(rate, 200, 3000, 150, sigma=0.5)
        for name, budget in (("chunks of 512", 512), ("chunks of 8,192", 8192)):
            limits = replace_limits(max_step_tokens=budget, max_prefill_fraction=1.0)
            parts = [requests[part::4] for part in range(4)]
            served = [serve(part, limits, COST) for part in parts]
            gaps = [gap for each in served for gap in each.gaps_ms()]
            ttft = [t for each, part in zip(served, parts, strict=True) for t in each.ttft_ms(part)]
            tails[name].append((rate, percentile(gaps, 99)))
            firsts[name].append((rate, percentile(ttft, 50)))
        gaps, ttft = _serve_divided(requests)
        tails["divided"].append((rate, percentile(gaps, 99)))
        firsts["divided"].append((rate, percentile(ttft, 50)))
    last = {name: points[-1][1] for name, points in tails.items()}
    first = {name: points[-1][1] for name, points in firsts.items()}
    text = (
        f"At {rates[-1]} requests/s the 99th percentile between two tokens is {last['divided']:.0f} ms with divided "
        f"replicas, {last['chunks of 512']:.0f} ms with small chunks and {last['chunks of 8,192']:.0f} ms with large "
        f"ones. Median TTFT is {first['divided']:,.0f}, {first['chunks of 512']:,.0f} and "
        f"{first['chunks of 8,192']:,.0f} ms. Requests are dealt out in turn, and the cache moves with 50 GB/s. The "
        "product itself does not divide prefill and decode; here its scheduler runs on both sides."
    )
    return Finding(
        text,
        [
            Plot("Time between tokens, p99", "requests/s", "ms", as_series(tails)),
            Plot("Median TTFT", "requests/s", "ms", as_series(firsts)),
        ],
    )


def _serve_divided(requests: Sequence[Offered]) -> tuple[list[float], list[float]]:
    """Return the times between tokens and to the first token in ms, of two replicas for prompts and two for decodes."""
    prefill = replace_limits(max_step_tokens=8192, max_prefill_fraction=1.0)
    decode = replace_limits(max_step_tokens=1_000_000, max_prefill_fraction=1.0)
    moved: list[tuple[Offered, float]] = []
    ttft: list[float] = []
    for part in (requests[0::2], requests[1::2]):
        prompts = [request._replace(output_tokens=1) for request in part]
        served = serve(prompts, prefill, COST)
        ttft += served.ttft_ms(prompts)
        for request, (first_s,) in zip(part, served.times, strict=True):
            arrives_s = first_s + request.prompt_tokens * KV_BYTES_PER_TOKEN / LINK_BYTES_PER_S
            rest = Offered(arrives_s, request.prompt_tokens + 1, request.output_tokens - 1)
            if rest.output_tokens:
                moved.append((rest, first_s))
    moved.sort()
    gaps: list[float] = []
    for half in (moved[0::2], moved[1::2]):
        served = serve([rest for rest, _ in half], decode, _Received())
        gaps += served.gaps_ms()
        gaps += [
            1e3 * (times[0] - first_s)
            for times, (_, first_s) in zip(served.times, half, strict=True)
        ]
    return gaps, ttft


# --- fleets ----------------------------------------------------------------------------------------


def run_affinity() -> Finding:
    """Compare the routing of sessions by the prefix caches with that in turn."""
    rates = (0.5, 1.5, 3.0)
    names: dict[str, RoutingPolicyName] = {"least cost": "least-cost", "round robin": "round-robin"}
    ttft: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    hits: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    traces = ""
    for name, policy in names.items():
        for rate in rates:
            scenario = Scenario(
                duration_s=40.0,
                pool=PoolSettings(replicas=4, routing_policy=policy, probe_interval_s=2.0),
                engine=Engine(
                    max_seqs=32, max_step_tokens=2048, kv_blocks=24_000, hardware=HARDWARE
                ),
                workload=Workload(
                    sessions_per_s=rate,
                    prompt=Lengths(median=2500, sigma=0.5),
                    output=Lengths(median=150, sigma=0.6),
                    more_turns=0.75,
                    think=Lengths(median=2, sigma=0.5, maximum=20),
                    system_prompts=12,
                    leave_fraction=0.0,
                ),
            )
            rows, traces = run_fleet(scenario, traces)
            ttft[name].append((rate, percentile([ttft_ms(row) for row in rows], 50)))
            cached = sum(row.cached_tokens or 0 for row in rows)
            hits[name].append((rate, 100.0 * cached / sum(row.input_tokens or 0 for row in rows)))
    ours, turns = (points[-1][1] for points in ttft.values())
    cached_ours, cached_turns = (points[-1][1] for points in hits.values())
    text = (
        f"With {rates[-1]:g} new conversations/s, median TTFT is {ours:.0f} ms with the cost of a request by cache and "
        f"load, and {turns:.0f} ms in turn. {cached_ours:.0f} % of the prompt tokens are cached instead of "
        f"{cached_turns:.0f} %."
    )
    return Finding(
        text,
        [
            Plot("Median TTFT", "conversations/s", "ms", as_series(ttft)),
            Plot("Cached prompt tokens", "conversations/s", "%", as_series(hits)),
        ],
        traces,
    )


def run_autoscaling() -> Finding:
    """Compare the autoscaler with those of Knative and Kubernetes on eight shapes of load."""
    rows = list(compare(2 * 3600, (120,), SEED))

    def mean(name: str) -> tuple[float, float]:
        own = [row for row in rows if row.scaler == name]
        hours = sum(row.replica_hours for row in own) / sum(row.ideal_hours for row in own)
        return hours, 100.0 * statistics.fmean(row.attainment for row in own)

    def dots(name: str) -> list[tuple[float, float]]:
        return [_point(row) for row in rows if row.scaler == name]

    figures = "; ".join(
        f"{name} {attained:.1f} % for {hours:.2f}"
        for name, (hours, attained) in ((name, mean(name)) for name in SCALERS)
    )
    text = (
        "Replicas start in 2 min, and serve eight shapes of load. The means of the work done within 2 s, and of the "
        f"hours of replicas relative to those of the work: {figures}. The policies of Knative (KPA, without and with a "
        "delay of 300 s) and Kubernetes (HPA) are baselines from their documentation. The pool is a fluid of work; "
        "decisions are those of the production autoscaler."
    )
    series = [PlotSeries(name, dots(name), dots=True) for name in SCALERS]
    return Finding(
        text, [Plot("Attainment and cost", "replica hours / ideal", "attained in %", series)]
    )


def _point(row: Row) -> tuple[float, float]:
    return row.replica_hours / row.ideal_hours, 100.0 * row.attainment


def run_noisy_neighbour() -> Finding:
    """Let one tenant send more and more, with tenants that the gateway knows apart, and without."""
    rates = (1, 20, 40, 60)
    curves: dict[str, list[tuple[float, float]]] = {"fair shares": [], "one queue (baseline)": []}
    traces = ""
    for rate in rates:
        quiet = build_requests("quiet", 1.0, 30.0, seed=SEED)
        noisy = build_requests("noisy", float(rate), 30.0, seed=SEED + 1, first=len(quiet))
        for name, points in curves.items():
            requests = [*quiet, *noisy]
            if name != "fair shares":
                requests = [replace(request, tenant="all") for request in requests]
            scenario = Scenario(
                duration_s=31.0,
                pool=PoolSettings(replicas=1, queue_timeout_s=300.0, probe_interval_s=2.0),
                engine=Engine(
                    max_seqs=32, max_step_tokens=2048, kv_blocks=24_000, hardware=HARDWARE
                ),
                workload=Workload(tenants=tuple(Tenant(name=n) for n in ("quiet", "noisy", "all"))),
                requests=tuple(requests),
            )
            rows, traces = run_fleet(scenario, traces)
            own = [ttft_ms(row) for row in rows if row.index < len(quiet) and row.chunks_s]
            points.append((rate, percentile(own, 99)))
    fair, single = (points[-1][1] for points in curves.values())
    text = (
        f"A neighbour sends {rates[-1]} requests/s to a replica that serves about half of them. The 99th percentile of "
        f"the TTFT of a tenant with 1 request/s is {fair:,.0f} ms with fair shares. It is {single:,.0f} ms "
        f"({ratio(single, fair)}) if all requests are of one tenant."
    )
    return Finding(
        text,
        [
            Plot(
                "TTFT of the quiet tenant, p99",
                "requests/s of the noisy one",
                "ms",
                as_series(curves),
            )
        ],
        traces,
    )


def run_region_failure() -> Finding:
    """Lose one of three regions, with and without spare capacity in the others."""
    curves: dict[str, list[tuple[float, float]]] = {}
    traces, lost = "", []
    for name, rate in (("with spare capacity", 25.0), ("without", 60.0)):
        requests = build_requests("app", rate, 100.0, seed=SEED)
        scenario = Scenario(
            duration_s=101.0,
            pool=PoolSettings(
                replicas=3,
                zones=3,
                regions=3,
                start_s=10.0,
                queue_timeout_s=120.0,
                probe_interval_s=2.0,
            ),
            engine=Engine(max_seqs=32, max_step_tokens=2048, kv_blocks=24_000, hardware=HARDWARE),
            workload=Workload(tenants=(Tenant(name="app"),)),
            requests=tuple(requests),
            faults=(Fault(kind="region", at_s=20.0, duration_s=30.0),),
        )
        rows, traces = run_fleet(scenario, traces)
        lost.append(sum(row.outcome != "ok" for row in rows))
        bins: dict[int, list[float]] = {}
        for row in rows:
            if row.chunks_s:
                bins.setdefault(int(row.scheduled_s // 5), []).append(ttft_ms(row))
        curves[name] = [(5.0 * at + 2.5, percentile(bins[at], 90)) for at in sorted(bins)]
    worst = [max(value for _, value in points) for points in curves.values()]
    text = (
        "At 20 s one of three regions is lost for 30 s, and its replica with it. Where the others can carry "
        f"the load, the 90th percentile of TTFT in 5 s peaks at {worst[0]:,.0f} ms. Where it cannot, the queue grows "
        f"to {worst[1]:,.0f} ms and drains only after the restart. Streams continue elsewhere: {lost[0]} and {lost[1]} "
        "requests fail. All regions are behind one gateway."
    )
    return Finding(text, [Plot("TTFT, p90 of 5 s", "seconds", "ms", as_series(curves))], traces)


def build_requests(
    tenant: str, rate: float, seconds: float, *, seed: int, first: int = 0
) -> list[SimulatedRequest]:
    """Return the requests of a tenant: a Poisson process of chats."""
    draw, at_s = random.Random(seed), 0.0
    requests: list[SimulatedRequest] = []
    while True:
        at_s += draw.expovariate(rate)
        if at_s >= seconds:
            return requests
        number = first + len(requests)
        requests.append(
            SimulatedRequest(
                number=number,
                at_s=round(at_s, 6),
                tenant=tenant,
                prompt=(Span(draw.getrandbits(62), round(300 * draw.lognormvariate(0.0, 0.5))),),
                output_tokens=max(1, round(100 * draw.lognormvariate(0.0, 0.5))),
            )
        )


def run_fleet(scenario: Scenario, traces: str) -> tuple[list[RequestRow], str]:
    """Run a scenario, and return the measurements of its requests, and `traces` with the hash of the run."""
    run = TwinRun(scenario, SEED, make_plan(scenario, SEED))
    failure = run.run()
    assert not failure, failure  # noqa: S101 - an invariant broke
    return run.gateway.rows, traces + run.simulation.trace_hash


def ttft_ms(row: RequestRow) -> float:
    """Return the time to the first token of a request that has one, otherwise that until it failed."""
    return 1e3 * ((row.chunks_s[0] if row.chunks_s else row.end_s) - row.scheduled_s)


def replace_limits(**changes: object) -> SchedulerLimits:
    """Return the limits of the engine with some changed."""
    return dataclasses.replace(LIMITS, **changes)  # type: ignore[arg-type]


def as_series(curves: dict[str, list[tuple[float, float]]]) -> list[PlotSeries]:
    """Return a series for each curve."""
    return [PlotSeries(name, points) for name, points in curves.items()]


# --- page ------------------------------------------------------------------------------------------

CLAIMS: dict[str, Claim] = {
    "continuous-batching": Claim(
        "Continuous against static batching",
        "A batch whose members join and leave at any step serves several times as many tokens.",
        run_continuous_batching,
    ),
    "prefix-caching": Claim(
        "Prefix caching",
        "A shared prompt is computed once and stored once.",
        run_prefix_caching,
    ),
    "chunked-prefill": Claim(
        "Chunked prefill",
        "Long prompts stall the streams of others, unless they are computed in chunks.",
        run_chunked_prefill,
    ),
    "speculation": Claim(
        "Speculation against batch size",
        "Drafts use compute that small batches leave idle, so their gain shrinks with the batch.",
        run_speculation,
    ),
    "affinity": Claim(
        "Affinity against round robin",
        "Turns of a conversation find their history where the earlier ones were served.",
        run_affinity,
    ),
    "autoscaling": Claim(
        "Autoscaling like KPA and HPA against ours",
        "A scaler that knows how long replicas take to start serves more for the same money.",
        run_autoscaling,
    ),
    "noisy-neighbour": Claim(
        "Noisy neighbour",
        "Without fair shares, the tenant that sends most sets the latency of all.",
        run_noisy_neighbour,
    ),
    "region-failure": Claim(
        "Region failure",
        "The loss of a region costs little if the others have room for its load, and a growing queue if not.",
        run_region_failure,
    ),
    "disaggregation": Claim(
        "Disaggregation",
        "Replicas for prompts and others for decodes keep prompts from delaying tokens.",
        run_disaggregation,
    ),
}
INTRO = """# Claims of the field, reproduced

Each claim runs on the decisions of the product, under the virtual clock of the [twin](../how-to/twin.md): scheduler,
batching and draft policy, routing, fair queue, limits, reconciliation, autoscaler. Steps have the prices of Llama 3.1
8B in bf16 on an H100 by the [hardware model](../explanation/hardware-model.md). What is not in the product is called a
baseline. The page is generated by `python -m benchmarks.twin_claims`; the same version gives the same hashes.

Predictions carry the [errors of that model](twin-accuracy.md). Ratios between two lines of a plot depend on it less
than their values.
"""


def render_claim(name: str, claim: Claim) -> tuple[str, dict[str, str]]:
    """Return the section of a claim, and its plots by file name."""
    finding = claim.run()
    figures = {
        f"{name}-{number}.svg": standalone_svg(render_plot(*plot)) + "\n"
        for number, plot in enumerate(finding.plots, 1)
    }
    points = msgspec.json.encode([list(plot) for plot in finding.plots])
    digest = hashlib.blake2b(points + finding.traces.encode(), digest_size=8).hexdigest()
    images = "\n".join(
        f"![{plot.title}: {plot.y_label} by {plot.x_label}](../images/claims/{file})"
        for plot, file in zip(finding.plots, figures, strict=True)
    )
    paragraph = f"*{claim.statement}*\n\n{textwrap.fill(finding.text, 118)}"
    text = (
        f"## {claim.title}\n\n{paragraph}\n\n{images}\n\n"
        f"`python -m benchmarks.twin_claims {name}`, seed {SEED}, hash `{digest}`\n"
    )
    return text, figures


def write_page(folder: Path, page: Path) -> None:
    """Run all claims, and write the page and its plots."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = [INTRO]
    for section, figures in _render_all(CLAIMS):
        sections.append(section)
        for file, figure in figures.items():
            (folder / file).write_text(figure)
    page.write_text("\n".join(sections))


def _render_all(names: Sequence[str] | dict[str, Claim]) -> Iterator[tuple[str, dict[str, str]]]:
    return (render_claim(name, CLAIMS[name]) for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line described above and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*CLAIMS, []], help="claims to print")
    options = parser.parse_args(arguments)
    if not options.names:
        write_page(PLOTS, PAGE)
    for section, _ in _render_all(options.names):
        print(section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
