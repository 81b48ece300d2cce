"""Fluid fidelity: flows in place of single requests, for the cost of months and years.

In each interval, as many requests arrive as the hour and the burstiness of the clients give. Replicas share them
evenly, and each is served as the mean request of the workload. What exceeds the capacity waits. The production's
autoscaler decides how many replicas there are. Nothing fails. Only rates, step times and replica-hours are meaningful.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

from msgspec.structs import replace

from argosy.bench import MetricName, RunSummary, SampleStats
from argosy.policy import weighted_tokens
from argosy.policy.autoscaling import (
    ArrivedTokens,
    Autoscaler,
    AutoscalerSettings,
    CapacityEstimator,
    PoolObservation,
    ReplicaReport,
)
from argosy.twin.result import TwinResult
from argosy.twin.scenario import Engine, Scenario
from argosy.twin.simulation import START_NS, Simulation, derive_stream
from argosy.twin.step_cost import StepCost
from argosy.twin.workload import Workload, diurnal_rate, list_requests

INTERVAL_S = 15.0
SAMPLED_REQUESTS = 4000
"""Requests that are drawn to find the mean one."""
MIN_CHANGE = 0.01
ROUNDS = 8
"""Rounds in which the sequences of a replica are found, of which each halves the error or better."""


class MeanRequest(NamedTuple):
    """Mean request of a workload."""

    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    context_tokens: float
    """Mean context of its decode steps."""
    per_session: float
    """Requests of a session."""


class ReplicaFlow:
    """Service of one replica at any rate of requests."""

    def __init__(self, engine: Engine, cost: StepCost, request: MeanRequest) -> None:
        tokens = engine.kv_blocks * engine.block_size
        most = tokens // max(1, round(request.prompt_tokens + request.output_tokens))
        self.slots = max(1, min(engine.max_seqs, most))
        """Sequences that run at the same time."""
        context = request.context_tokens
        self._steps_s = [
            cost.step_seconds(rows, rows * context, ()) for rows in range(self.slots + 1)
        ]
        uncached = max(1, round(request.prompt_tokens - request.cached_tokens))
        chunk = [(uncached, round(request.cached_tokens))]
        self._prefill_s = cost.step_seconds(0, 0, chunk) - cost.step_seconds(0, 0, ())
        self._output_tokens = request.output_tokens
        self.most_requests_s = self.slots / (
            request.output_tokens * self._steps_s[-1] + self.slots * self._prefill_s
        )

    def find_sequences(self, requests_s: float) -> float:
        """Return how many sequences run in the mean at a rate of requests."""
        running = 0.0
        for _ in range(ROUNDS):
            before = running
            running = min(self.slots, requests_s * self.residence_s(running, requests_s))
            if running - before < MIN_CHANGE:
                break
        return running

    def residence_s(self, running: float, requests_s: float) -> float:
        """Return how long a request stays in the replica."""
        return self._prefill_s + self._output_tokens * self.token_s(running, requests_s)

    def token_s(self, running: float, requests_s: float) -> float:
        """Return the time between two tokens."""
        rows = min(max(1.0, running), self.slots)
        below = min(int(rows), self.slots - 1)
        step_s = self._steps_s[below] + (rows - below) * (
            self._steps_s[below + 1] - self._steps_s[below]
        )
        free = 1.0 - min(0.9, requests_s * self._prefill_s)
        return step_s / free

    def first_token_s(self, running: float, requests_s: float) -> float:
        """Return the time to the first token without a queue."""
        return self._prefill_s + 1.5 * self.token_s(running, requests_s)


class FluidPool:
    """Pool of a scenario without single requests.

    Args:
        scenario: The scenario.
        seed: Seed of the arrivals.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        if scenario.requests is not None or scenario.workload.trace is not None:
            raise ValueError(
                "fluid fidelity has no single requests: use macro for a trace or the ledger"
            )
        if scenario.faults or scenario.random_faults.per_minute:
            raise ValueError("fluid fidelity has no faults: use macro, or remove them")
        self._scenario = scenario
        self._request = measure_request(scenario.workload, scenario.engine, seed)
        self._flow = ReplicaFlow(scenario.engine, scenario.engine.build_cost(), self._request)
        self._stream = derive_stream(seed, "fluid")
        pool = scenario.pool
        self._autoscaler = None
        if pool.max_replicas is not None:
            settings = AutoscalerSettings(
                min_replicas=pool.min_replicas, max_replicas=pool.max_replicas
            )
            self._autoscaler = Autoscaler(settings)
        self._capacity = CapacityEstimator(None, None)
        self._desired = pool.replicas
        self._ready = pool.replicas
        self._starting: list[tuple[float, int]] = []
        """When replicas will be ready, and how many."""
        self._backlog = 0.0
        self.num_served = 0.0
        self.replica_s = self.busy_s = self.sequence_s = 0.0
        self.samples: dict[MetricName, list[tuple[float, float]]] = {}
        """Values of the latencies with the requests that had them."""

    def run(self) -> None:
        """Run all intervals."""
        workload, elapsed = self._scenario.workload, 0.0
        rate = workload.sessions_per_s * self._request.per_session
        dispersion = _dispersion(workload)
        while elapsed < self._scenario.duration_s:
            interval = min(INTERVAL_S, self._scenario.duration_s - elapsed)
            mean = rate * interval
            if workload.diurnal:
                mean *= diurnal_rate(workload.start_hour + elapsed / 3600.0)
            arrived = self._stream.gammavariate(mean / dispersion, dispersion)
            self._serve(arrived, interval, elapsed)
            elapsed += interval
            self._scale(arrived, interval, elapsed)
        self._serve_backlog()

    def _serve(self, arrived: float, interval: float, elapsed: float) -> None:
        while self._starting and self._starting[0][0] <= elapsed:
            self._ready += self._starting.pop(0)[1]
        flow, ready = self._flow, max(1, self._ready)
        most = flow.most_requests_s * ready * interval
        waiting = self._backlog + arrived
        served = min(waiting, most)
        self._backlog = waiting - served
        rate = served / interval / ready
        running = flow.find_sequences(rate)
        self.num_served += served
        self.replica_s += (self._ready + sum(count for _, count in self._starting)) * interval
        self.busy_s += (1.0 - math.exp(-running)) * ready * interval  # they come at random
        self.sequence_s += running * ready * interval
        token_s = flow.token_s(running, rate)
        wait_s = self._backlog / most * interval
        first_s = wait_s + flow.first_token_s(running, rate)
        self._note("ttft", 1e3 * first_s, served)
        self._note("tpot", 1e3 * token_s, served)
        self._note("e2e", 1e3 * (first_s + token_s * (self._request.output_tokens - 1)), served)

    def _note(self, metric: MetricName, value: float, count: float) -> None:
        self.samples.setdefault(metric, []).append((value, count))

    def _serve_backlog(self) -> None:
        """Serve what waits at the end."""
        ready = max(1, self._ready)
        seconds = self._backlog / (self._flow.most_requests_s * ready)
        self.num_served += self._backlog
        self.replica_s += seconds * ready
        self.busy_s += seconds * ready
        self.sequence_s += seconds * ready * self._flow.slots
        self._backlog = 0.0

    def _scale(self, arrived: float, interval: float, elapsed: float) -> None:
        if self._autoscaler is None:
            return
        request, flow, ready = self._request, self._flow, max(1, self._ready)
        weight = weighted_tokens(request.prompt_tokens, request.output_tokens)
        rate = min(arrived / interval / ready, flow.most_requests_s)
        running = flow.find_sequences(rate)
        uncached = weighted_tokens(
            request.prompt_tokens - request.cached_tokens, request.output_tokens
        )
        report = ReplicaReport(
            tokens_per_s=rate * uncached,
            running=running,
            max_running=flow.slots,
            inter_token_s=flow.token_s(running + 1, rate),
            ttft_s=0.0,
        )
        self._capacity.add([report])
        context = running * request.context_tokens
        engine = self._scenario.engine
        target = self._autoscaler.decide(
            PoolObservation(
                at=START_NS / 1e9 + elapsed,
                desired_replicas=self._desired,
                ready_replicas=self._ready,
                arrivals=(ArrivedTokens(arrived * weight, interval),),
                queued_requests=round(self._backlog),
                queued_tokens=self._backlog * weight,
                queue_age_s=self._backlog / (flow.most_requests_s * ready),
                running_requests=round(running * ready),
                kv_used_replicas=ready * min(1.0, context / (engine.kv_blocks * engine.block_size)),
                capacity_tokens_per_s=self._capacity.tokens_per_s,
                startup_s=self._scenario.pool.start_s,
                metrics_age_s=0.0,
            )
        ).target
        if target > self._desired:
            self._starting.append((elapsed + self._scenario.pool.start_s, target - self._desired))
        excess = self._desired - target
        while excess > 0 and self._starting:
            at, count = self._starting.pop()
            if count > excess:
                self._starting.append((at, count - excess))
            excess -= min(count, excess)
        self._ready -= max(0, excess)
        self._desired = target

    def summarize(self) -> RunSummary:
        """Return rates and latencies. Percentiles are those of the intervals' means."""
        request, served = self._request, self.num_served
        duration = max(self._scenario.duration_s, 1e-9)
        output = served * request.output_tokens
        inputs = served * request.prompt_tokens
        return RunSummary(
            duration_s=duration,
            completed=round(served),
            failed=0,
            cancelled=0,
            unmeasured=0,
            errors={},
            input_tokens=round(inputs),
            cached_tokens=round(served * request.cached_tokens),
            output_tokens=round(output),
            request_rate=served / duration,
            output_token_rate=output / duration,
            total_token_rate=(inputs + output) / duration,
            peak_output_token_rate=0.0,
            mean_concurrency=self.sequence_s / duration,
            peak_concurrency=0,
            latency={name: _weigh(self.samples.get(name, ())) for name in get_args(MetricName)},
        )


def run_fluid(scenario: Scenario, seed: int) -> TwinResult:
    """Run a scenario with fluid fidelity.

    Raises:
        ValueError: It has faults or single requests, which flows do not have.
    """
    pool = FluidPool(scenario, seed)
    pool.run()
    summary = pool.summarize()
    simulation = Simulation(seed)
    simulation.trace(f"{summary.completed} {round(pool.replica_s)} {round(pool.busy_s)}")
    return TwinResult(
        seed=seed,
        configuration=scenario.digest,
        trace_hash=simulation.trace_hash,
        events=math.ceil(scenario.duration_s / INTERVAL_S),
        simulated_s=scenario.duration_s,
        summary=summary,
        utilisation=pool.busy_s / max(pool.replica_s, 1e-9),
        replica_hours=pool.replica_s / 3600.0,
        cached_fraction=(summary.cached_tokens or 0) / max(1, summary.input_tokens),
        effects={},
        actions={},
        rollout="",
    )


def measure_request(workload: Workload, engine: Engine, seed: int) -> MeanRequest:
    """Return the mean of requests that are drawn from a workload and fit into the engine."""
    seconds = SAMPLED_REQUESTS * (1.0 - workload.more_turns) / workload.sessions_per_s
    drawn = list_requests(replace(workload, diurnal=False), max(seconds, 1.0), seed)
    contexts: dict[int, int] = {}
    prompts = cached = outputs = contexts_sum = count = sessions = 0
    for request in drawn:
        history = 0 if request.after is None else contexts.get(request.after, engine.max_model_len)
        prompt = history + sum(span.tokens for span in request.prompt)
        sessions += request.after is None
        if prompt + request.output_tokens > engine.max_model_len:
            continue
        contexts[request.number] = prompt + request.output_tokens
        shared = history or sum(span.tokens for span in request.prompt[:-1])
        count += 1
        prompts += prompt
        cached += shared // engine.block_size * engine.block_size if engine.prefix_cache else 0
        outputs += request.output_tokens
        contexts_sum += request.output_tokens * (prompt + request.output_tokens // 2)
    if not count:
        raise ValueError(f"no request fits into max_model_len {engine.max_model_len}")
    return MeanRequest(
        prompts / count,
        cached / count,
        outputs / count,
        contexts_sum / outputs,
        count / max(1, sessions),
    )


def _dispersion(workload: Workload) -> float:
    """Return the variance of the arrivals of an interval divided by their mean."""
    bursty = workload.bursty_fraction
    sessions = (1.0 - bursty + 10.0 * bursty) / workload.burstiness
    return max(0.05, sessions)


def _weigh(samples: Sequence[tuple[float, float]]) -> SampleStats:
    """Return the statistics of values by their weights."""
    total = sum(weight for _, weight in samples)
    if total <= 0.0:
        return SampleStats()
    ordered = sorted(samples)
    mean = sum(value * weight for value, weight in ordered) / total
    variance = sum(weight * (value - mean) ** 2 for value, weight in ordered) / total
    sums = list(itertools.accumulate(weight for _, weight in ordered))
    p50, p90, p95, p99, p999 = (
        ordered[min(bisect.bisect_left(sums, percentile / 100.0 * total), len(ordered) - 1)][0]
        for percentile in (50.0, 90.0, 95.0, 99.0, 99.9)
    )
    return SampleStats(
        count=round(total),
        mean=mean,
        std=math.sqrt(variance),
        min=ordered[0][0],
        max=ordered[-1][0],
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
    )
