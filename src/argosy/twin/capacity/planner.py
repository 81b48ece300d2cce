"""Planner: from a load and its objectives to replicas, accelerators and money, ranked over hardware.

Each candidate (accelerator, precision, tensor parallelism) is checked for memory and for the latency of one request
alone. Then requests with bursts and unequal lengths are simulated on one replica, and the highest rate is searched at
which the percentiles meet the objectives. Replicas, headroom and cost follow from that rate.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from argosy.twin.capacity.question import HOURS_OF_A_MONTH, CapacityQuestion, LatencyObjective
from argosy.twin.hardware import (
    CapacityError,
    Hardware,
    MemoryFit,
    ModelShape,
    OfferedRequest,
    Precision,
    ReplicaSpec,
    RequestTimes,
    RooflineCost,
    ServingLimits,
    build_replica,
    fit_memory,
    load_shape,
    simulate_replica,
)
from argosy.twin.step_cost import StepCost

MIN_REQUESTS, MAX_REQUESTS = 400, 2000
"""Requests of a simulation."""
SEARCH_STEPS = 7
"""Simulations in search of a rate, which is then found within some 3 %."""
ERROR_STEPS = 4
MIN_RATE_SHARE = 0.02
PILE_UP, PILE_UP_REQUESTS = 1.25, 10
"""Requests pile up if more are in flight at the end than this many times those in the middle, and this many."""
MAX_SIMULATED = 10
"""Candidates whose rates are searched: those with the lowest bound of their cost."""
MODEL_ERROR = {False: 0.10, True: 0.25}
"""Error of predicted step times for dense models and for mixtures of experts (docs/reference/twin-accuracy.md)."""
IDLE_POWER = 0.3
"""Share of the design power that an idle accelerator takes."""
HOST_WATTS = 250.0
"""Power of the host for each accelerator: processors, memory, network and fans."""
MAX_BATCH = 512
Bound = Literal["ttft", "tpot", "e2e", "throughput"]
NEARLY = 1.0001


class PlannedPool(msgspec.Struct, frozen=True, kw_only=True):
    """A way to serve the load, with its cost."""

    accelerator: str
    weights: Precision
    kv: str
    tensor_parallel: int
    engine: str
    replica_requests_s: float
    """Highest rate of a replica within the objectives."""
    ttft_p50_ms: float
    """At that rate, as the values below."""
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    in_flight: float
    """Requests in flight in a replica at that rate."""
    load_replicas: int
    """Replicas that the peak needs."""
    replicas: int
    """Replicas with spares, and with what the loss of a zone takes."""
    replicas_low: int
    replicas_high: int
    """Replicas if steps are faster or slower by the error of the model."""
    accelerators: int
    peak_utilization: float
    """Share of the capacity that the peak uses, without objectives."""
    dollars_per_hour: float
    dollars_per_month: float
    dollars_per_million_output_tokens: float
    """Cost of the month divided by its output tokens."""
    kilowatts: float
    """Power at the mean load."""
    kv_tokens: int
    bound: Bound
    """Limit of the rate of a replica."""


class RejectedPool(msgspec.Struct, frozen=True, kw_only=True):
    """A way that cannot serve the load, and the bound that it breaks."""

    accelerator: str
    weights: Precision
    tensor_parallel: int
    reason: str


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a question. The first pool is the cheapest."""

    question: CapacityQuestion
    model: str
    parameters: int
    peak_requests_s: float
    pools: tuple[PlannedPool, ...]
    rejected: tuple[RejectedPool, ...]
    skipped: int
    """Candidates that cost more than those above even at full throughput, and were not simulated."""


class _ScaledCost:
    """A price of steps that is slower or faster by a factor."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    def step_seconds(
        self,
        decode_rows: int,
        context_tokens: float,
        prefill_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        return self._factor * self._cost.step_seconds(decode_rows, context_tokens, prefill_chunks)


class _Candidate(msgspec.Struct, frozen=True):
    spec: ReplicaSpec
    memory: MemoryFit
    cost: RooflineCost
    most_requests_s: float
    """Rate of a full batch, whatever its latency."""
    most_in_flight: int
    """Requests in flight for which there is memory."""
    alone_s: float
    """Duration of a request that is alone."""
    lowest_price: float
    """Dollars per hour for one request per second at that rate."""


def plan_capacity(hardware: Hardware, question: CapacityQuestion) -> CapacityPlan:
    """Return the ways to serve a load, the cheapest first. Deterministic for a seed.

    Raises:
        CapacityError: The question is impossible, or no hardware can serve it. The message names the bound.
    """
    question.check()
    model = load_shape(question.model)
    candidates, rejected = _list_candidates(hardware, question, model)
    candidates.sort(key=lambda each: each.lowest_price)
    simulated, skipped = candidates[:MAX_SIMULATED], candidates[MAX_SIMULATED:]
    pools = []
    for candidate in simulated:
        try:
            pools.append(_plan_pool(question, candidate))
        except CapacityError as error:
            rejected.append(_reject(candidate.spec, str(error)))
    if not pools:
        raise CapacityError(_explain_nothing(question, model, rejected))
    pools.sort(key=lambda each: each.dollars_per_hour)
    best = pools[0]
    return CapacityPlan(
        question=question,
        model=model.name,
        parameters=model.parameters(),
        peak_requests_s=question.peak_requests_s
        or question.concurrent_requests / best.in_flight * best.replica_requests_s,
        pools=tuple(pools),
        rejected=tuple(rejected),
        skipped=len(skipped),
    )


def _list_candidates(
    hardware: Hardware, question: CapacityQuestion, model: ModelShape
) -> tuple[list[_Candidate], list[RejectedPool]]:
    candidates, rejected = [], []
    for name in question.accelerators:
        known, accelerator = hardware.find_accelerator(name)
        for weights in question.weights:
            if weights == "fp8" and "fp8" not in accelerator.tflops:
                continue
            sizes = question.tensor_parallel or (1, 2, 4, 8)
            for tensor_parallel in sizes:
                try:
                    spec = build_replica(
                        hardware,
                        model,
                        known,
                        engine=question.engine,
                        weights=weights,
                        tensor_parallel=tensor_parallel,
                    )
                    candidates.append(_bound(question, spec))
                except CapacityError as error:
                    rejected.append(
                        RejectedPool(
                            accelerator=known,
                            weights=weights,
                            tensor_parallel=tensor_parallel,
                            reason=str(error),
                        )
                    )
    return candidates, rejected


def _bound(question: CapacityQuestion, spec: ReplicaSpec) -> _Candidate:
    """Return a candidate with the rate that it cannot exceed. Raises CapacityError if it cannot serve a request."""
    length = question.prompt_tokens + question.output_tokens
    memory = fit_memory(spec, context_tokens=length)
    if not memory.fits:
        needed = memory.weight_bytes + memory.activation_bytes + memory.reserve_bytes
        raise CapacityError(
            f"memory: weights, activations and reserve need {needed / 2**30:,.1f} GiB of the"
            f" {memory.memory_bytes / 2**30:,.1f} GiB of each accelerator"
        )
    if memory.kv_tokens < length:
        raise CapacityError(
            f"memory: the KV cache holds {memory.kv_tokens:,} tokens, and a request has {length:,}"
        )
    cost = RooflineCost(spec)
    alone = _measure_alone(question, spec, cost)
    for objective in question.objectives:
        if alone[objective.metric] > objective.limit_ms:
            raise CapacityError(
                f"{objective.metric}: one request alone takes {alone[objective.metric]:,.1f} ms, above the"
                f" {objective.limit_ms:,g} ms of {objective}"
            )
    batch = max(1, min(MAX_BATCH, memory.kv_tokens // length))
    step = cost.step_seconds(batch, batch * (question.prompt_tokens + question.output_tokens / 2))
    prefill = _prefill_seconds(question, spec, cost)
    most = 1 / (prefill + question.output_tokens * step / batch)
    price = spec.accelerators * _hourly_price(question, spec)
    return _Candidate(spec, memory, cost, most, batch, alone["e2e"] / 1e3, price / most)


def _prefill_seconds(question: CapacityQuestion, spec: ReplicaSpec, cost: StepCost) -> float:
    """Return the time of the prompts of a request in full steps, without the host time of a step."""
    cached = int(question.prompt_tokens * question.prefix_hits)
    tokens = max(1, question.prompt_tokens - cached)
    chunk = min(spec.engine.max_batch_tokens, max(tokens, 1))
    whole = cost.step_seconds(0, 0, [(chunk, cached)])
    return (whole - spec.engine.step_ms / 1e3) * tokens / chunk * 0.7


def _measure_alone(
    question: CapacityQuestion, spec: ReplicaSpec, cost: StepCost
) -> dict[str, float]:
    """Return the latencies in ms of a request that is alone on a replica."""
    cached = int(question.prompt_tokens * question.prefix_hits)
    request = OfferedRequest(0.0, question.prompt_tokens, question.output_tokens, cached)
    limits = ServingLimits(kv_tokens=1 << 40, engine=spec.engine)
    times = simulate_replica(cost, limits, [request])[0]
    return {name: _latency_ms(times, name) for name in ("ttft", "tpot", "e2e")}


def _latency_ms(times: RequestTimes, metric: str) -> float:
    if metric == "ttft":
        return 1e3 * times.ttft_s
    return 1e3 * (times.tpot_s if metric == "tpot" else times.last_token_s - times.sent_s)


def _hourly_price(question: CapacityQuestion, spec: ReplicaSpec) -> float:
    """Return the price of an accelerator for an hour, with the share of spot capacity."""
    prices = spec.accelerator.dollars_per_hour
    on_demand = prices["on_demand"]
    spot = prices.get("spot", on_demand)
    return on_demand * (1 - question.spot_share) + spot * question.spot_share


def _plan_pool(question: CapacityQuestion, candidate: _Candidate) -> PlannedPool:
    spec = candidate.spec
    found = _search_rate(question, candidate)
    if found is None:
        raise CapacityError(
            "the objectives are missed even at 2 % of the throughput: "
            + ", ".join(map(str, question.objectives))
        )
    rate, times, bound = found
    span = max(each.last_token_s for each in times) - min(each.sent_s for each in times)
    in_flight = sum(each.last_token_s - each.sent_s for each in times) / span

    def replicas_at(requests_s: float) -> int:
        if question.concurrent_requests:
            need = question.concurrent_requests / (in_flight * requests_s / rate)
        else:
            need = question.peak_requests_s / requests_s
        return max(1, math.ceil(need / NEARLY))

    load = replicas_at(rate)
    total = _with_headroom(question, load)
    if (
        question.max_accelerators is not None
        and total * spec.accelerators > question.max_accelerators
    ):
        most = question.max_accelerators // spec.accelerators * rate
        raise CapacityError(
            f"accelerators: {total * spec.accelerators:,} are needed and {question.max_accelerators:,} can be had,"
            f" which serve at most {most:,.1f} requests/s"
        )
    faster, slower = _search_error_bars(question, candidate, rate)
    price = total * spec.accelerators * _hourly_price(question, spec)
    peak = load * rate if question.concurrent_requests else question.peak_requests_s
    tokens = peak * question.mean_share * question.output_tokens * HOURS_OF_A_MONTH * 3600
    accelerators = total * spec.accelerators
    watts = spec.accelerator.watts
    busy = min(1.0, peak * question.mean_share / (total * candidate.most_requests_s))
    ttft = [_latency_ms(each, "ttft") for each in times]
    tpot = [_latency_ms(each, "tpot") for each in times]
    return PlannedPool(
        accelerator=spec.accelerator_name,
        weights=spec.weights,
        kv=spec.kv,
        tensor_parallel=spec.tensor_parallel,
        engine=spec.engine_name,
        replica_requests_s=rate,
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        tpot_p50_ms=_percentile(tpot, 50),
        tpot_p99_ms=_percentile(tpot, 99),
        in_flight=in_flight,
        load_replicas=load,
        replicas=total,
        replicas_low=_with_headroom(question, replicas_at(faster)),
        replicas_high=_with_headroom(question, replicas_at(slower)),
        accelerators=accelerators,
        peak_utilization=min(1.0, peak / (total * candidate.most_requests_s)),
        dollars_per_hour=price,
        dollars_per_month=price * HOURS_OF_A_MONTH,
        dollars_per_million_output_tokens=price * HOURS_OF_A_MONTH / tokens * 1e6,
        kilowatts=accelerators
        * (watts * (IDLE_POWER + (1 - IDLE_POWER) * busy) + HOST_WATTS)
        / 1e3,
        kv_tokens=candidate.memory.kv_tokens,
        bound=bound,
    )


def _with_headroom(question: CapacityQuestion, replicas: int) -> int:
    """Return the replicas with spares, of which enough remain if a zone is lost."""
    if question.zones == 1:
        return replicas + question.spares
    each = math.ceil(replicas / (question.zones - 1))
    return max(replicas + question.spares, each * question.zones)


def _search_rate(
    question: CapacityQuestion, candidate: _Candidate
) -> tuple[float, list[RequestTimes], Bound] | None:
    """Return the highest rate within the objectives, the times at it, and what limits it; None if there is none."""
    low, high = 0.0, math.inf
    best: list[RequestTimes] | None = None
    bound: Bound = "throughput"
    rate = 0.5 * candidate.most_requests_s
    for _ in range(SEARCH_STEPS):
        times = simulate_replica(
            candidate.cost, _limits(candidate), _draw(question, candidate, rate)
        )
        missed = _find_missed(question.objectives, times)
        if missed is None:
            low, best = rate, times
        else:
            high, bound = rate, missed
        rate = low * 1.6 if math.isinf(high) else (low + high) / 2
    if best is None:
        rate = MIN_RATE_SHARE * candidate.most_requests_s
        best = simulate_replica(
            candidate.cost, _limits(candidate), _draw(question, candidate, rate)
        )
        return None if _find_missed(question.objectives, best) else (rate, best, bound)
    return low, best, bound


def _search_error_bars(
    question: CapacityQuestion, candidate: _Candidate, rate: float
) -> tuple[float, float]:
    """Return the highest rates if all steps are faster, and slower, by the error of the model."""
    found = []
    for factor in (
        1 - MODEL_ERROR[candidate.spec.model.is_moe],
        1 + MODEL_ERROR[candidate.spec.model.is_moe],
    ):
        cost = _ScaledCost(candidate.cost, factor)
        # Without limits of latency the rate is exactly in proportion. A limit makes it change by more.
        good, bad = (rate, rate * 1.8) if factor < 1 else (0.0, rate)
        trial = rate / factor
        for _ in range(ERROR_STEPS if question.objectives else 0):
            times = simulate_replica(cost, _limits(candidate), _draw(question, candidate, trial))
            if _find_missed(question.objectives, times) is None:
                good = trial
            else:
                bad = trial
            trial = (good + bad) / 2
        found.append(trial)
    return found[0], found[1]


def _limits(candidate: _Candidate) -> ServingLimits:
    return ServingLimits(
        kv_tokens=candidate.memory.kv_tokens,
        engine=candidate.spec.engine,
        max_sequences=MAX_BATCH,
    )


def _draw(question: CapacityQuestion, candidate: _Candidate, rate: float) -> list[OfferedRequest]:
    """Return requests whose times between each other are gamma distributed, and their lengths lognormal.

    Most of them come when as many are in flight as will ever be.
    """
    generator = random.Random(question.seed)  # noqa: S311 - a load, not a secret
    in_flight = min(candidate.most_in_flight, int(rate * candidate.alone_s * 4))
    shape = 1 / question.burstiness**2
    now, requests = 0.0, []
    for _ in range(min(MAX_REQUESTS, max(MIN_REQUESTS, 4 * in_flight))):
        now += generator.gammavariate(shape, 1 / (shape * rate))
        prompt = _draw_length(generator, question.prompt_tokens, question.spread)
        output = _draw_length(generator, question.output_tokens, question.spread)
        requests.append(OfferedRequest(now, prompt, output, int(prompt * question.prefix_hits)))
    return requests


def _draw_length(generator: random.Random, mean: int, spread: float) -> int:
    """Return a lognormal length with this mean, at most four times it."""
    factor = generator.lognormvariate(-(spread**2) / 2, spread)
    return max(1, round(mean * min(factor, 4.0)))


def _find_missed(
    objectives: Sequence[LatencyObjective], times: Sequence[RequestTimes]
) -> Bound | None:
    """Return the objective that the times miss, or `throughput` if requests pile up in the replica."""
    for objective in objectives:
        values = [_latency_ms(each, objective.metric) for each in times]
        if _percentile(values, objective.percentile) > objective.limit_ms:
            return objective.metric
    sent = sorted(each.sent_s for each in times)
    ended = sorted(each.last_token_s for each in times)
    middle, last = sent[len(sent) // 2], sent[-1]
    before = len(sent) // 2 + 1 - bisect.bisect(ended, middle)
    after = len(sent) - bisect.bisect(ended, last)
    return "throughput" if after > PILE_UP * before + PILE_UP_REQUESTS else None


def _percentile(values: Sequence[float], percentile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * percentile / 100) - 1)]


def _reject(spec: ReplicaSpec, reason: str) -> RejectedPool:
    return RejectedPool(
        accelerator=spec.accelerator_name,
        weights=spec.weights,
        tensor_parallel=spec.tensor_parallel,
        reason=reason,
    )


def _explain_nothing(
    question: CapacityQuestion, model: ModelShape, rejected: Sequence[RejectedPool]
) -> str:
    """Return why no candidate serves the load: the reason of the largest one, and how many failed alike."""
    if not rejected:
        return (
            f"none of {', '.join(question.accelerators)} has the precision {', '.join(question.weights)};"
            " give others with --accelerator or --weights"
        )
    memory = [each for each in rejected if each.reason.startswith("memory")]
    others = [each for each in rejected if not each.reason.startswith("memory")]
    nearest = (others or memory)[-1]
    return (
        f"no candidate serves {model.name} ({model.parameters() / 1e9:,.1f} B parameters):"
        f" {len(memory)} of {len(rejected)} lack memory. The bound of the nearest,"
        f" {nearest.tensor_parallel} x {nearest.accelerator} with {nearest.weights} weights, is {nearest.reason}"
    )
