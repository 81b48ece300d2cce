"""Traffic replays: no routing policy beats least cost, which wins clearly in the scenarios that favour it."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from argosy.policy import (
    BLOCK_TOKENS,
    ROUTING_POLICIES,
    EstimatedPrefixIndex,
    ReplicaLoad,
    RoutingCandidate,
    RoutingPolicy,
    compute_prefix_keys,
    estimate_cost,
)

REPORT_INTERVAL_S = 0.5
REQUESTS = 1500
CACHE_BLOCKS = 400
DECODE_S = 0.02


@dataclass(frozen=True)
class Request:
    at: float
    prompt: bytes
    """Prompt text. Each byte stands for one token."""
    output: int


@dataclass
class Scenario:
    """Prefill rates of the replicas, and the requests."""

    rates: list[float]
    requests: list[Request]
    background_rates: dict[int, float] = field(default_factory=dict)
    """Tokens per second that a replica computes for clients outside the fleet, by its index."""


class SimulatedReplica:
    """A replica that computes prompts one after the other. Cached tokens cost nothing."""

    def __init__(self, number: int, rate: float, background_rate: float, gateways: int) -> None:
        self.loads = [
            ReplicaLoad(str(number), prefill_tokens_per_s=rate, inter_token_s=DECODE_S)
            for _ in range(gateways)
        ]
        """Load as each gateway knows it."""
        self.index = EstimatedPrefixIndex(CACHE_BLOCKS)
        self._cache = EstimatedPrefixIndex(CACHE_BLOCKS)
        self._rate = rate
        self._background_rate = background_rate
        self._free_at = 0.0
        self._seen = 0.0

    def admit(self, request: Request, keys: list[bytes]) -> float:
        """Enqueue a request and return the seconds until its first token."""
        uncached = len(request.prompt) - len(self._cache.match_prefix(keys)) * BLOCK_TOKENS
        self._cache.on_prompt_sent(keys)
        self._work(request.at)
        self._free_at += uncached / self._rate
        return self._free_at - request.at

    def report_load(self, now: float) -> None:
        """Report the load to all gateways."""
        self._work(now)
        for load in self.loads:
            load.queued_tokens = int((self._free_at - now) * self._rate)
            load.sent_tokens = 0
            load.reported_at = now

    def _work(self, now: float) -> None:
        extra = (now - self._seen) * self._background_rate / self._rate
        self._free_at = max(self._free_at + extra, now)
        self._seen = now


def select_longest_prefix(
    candidates: Sequence[RoutingCandidate], _affinity_key: str, draw: float, _now: float
) -> RoutingCandidate:
    """Select the longest cached prefix and ignore queues. Ties are broken at random."""
    least = min(candidate.uncached_tokens for candidate in candidates)
    best = [candidate for candidate in candidates if candidate.uncached_tokens == least]
    return best[int(draw * len(best))]


def replay(
    scenario: Scenario, new_policy: Callable[[], RoutingPolicy], seed: int, gateways: int = 1
) -> float:
    """Return the mean time to first token in seconds. Gateways receive the requests in turn."""
    draws = random.Random(seed)
    replicas = {
        str(n): SimulatedReplica(n, rate, scenario.background_rates.get(n, 0.0), gateways)
        for n, rate in enumerate(scenario.rates)
    }
    policies = [new_policy() for _ in range(gateways)]
    completions: list[tuple[float, str, int]] = []
    times, next_report = [], 0.0
    for number, request in enumerate(scenario.requests):
        gateway = number % gateways
        while next_report <= request.at:
            for replica in replicas.values():
                replica.report_load(next_report)
            next_report += REPORT_INTERVAL_S
        while completions and completions[0][0] <= request.at:
            _, name, owner = heapq.heappop(completions)
            replicas[name].loads[owner].in_flight -= 1
        keys = compute_prefix_keys(b"", request.prompt, BLOCK_TOKENS)
        candidates = []
        for replica in replicas.values():
            load = replica.loads[gateway]
            uncached = len(request.prompt) - len(replica.index.match_prefix(keys)) * BLOCK_TOKENS
            costs = estimate_cost(load, uncached, request.output, request.at)
            candidates.append(RoutingCandidate(load, uncached, costs))
        key = keys[0].hex() if keys else ""
        decision = policies[gateway](candidates, key, draws.random(), request.at)
        load = decision.load
        chosen = replicas[load.name]
        chosen.index.on_prompt_sent(keys)
        seconds = chosen.admit(request, keys)
        load.in_flight += 1
        load.sent_tokens += decision.uncached_tokens
        load.ttft.add(seconds, request.at)
        ended_at = request.at + seconds + request.output * DECODE_S
        heapq.heappush(completions, (ended_at, load.name, gateway))
        times.append(seconds)
    return statistics.fmean(times)


def poisson_arrivals(
    draws: random.Random, per_s: float, prompts: Sequence[int], shared_fraction: float
) -> list[Request]:
    """Return Poisson arrivals. The fraction `shared_fraction` shares eight long prefixes, half of it the same one."""
    prefixes = [draws.randbytes(2048) for _ in range(8)]
    times = itertools.accumulate(draws.expovariate(per_s) for _ in range(REQUESTS))
    requests = []
    for at in times:
        own = draws.randbytes(draws.choice(prompts))
        if draws.random() < shared_fraction:
            number = 0 if draws.random() < 0.5 else draws.randrange(8)
            own = prefixes[number] + own
        requests.append(Request(at, own, draws.randrange(10, 200)))
    return requests


def hot_prefix(draws: random.Random) -> Scenario:
    return Scenario(
        [4000.0] * 4, poisson_arrivals(draws, 14.0, (64, 256, 512), shared_fraction=0.9)
    )


def runaway(draws: random.Random) -> Scenario:
    return Scenario(
        [4000.0] * 4,
        poisson_arrivals(draws, 6.0, (128, 1024, 2048), shared_fraction=0.0),
        {0: 3900.0},
    )


def mixed_speeds(draws: random.Random) -> Scenario:
    return Scenario(
        [8000.0, 4000.0, 2000.0, 1000.0],
        poisson_arrivals(draws, 8.0, (128, 1024, 2048), shared_fraction=0.2),
    )


def plain(draws: random.Random) -> Scenario:
    return Scenario(
        [4000.0] * 4, poisson_arrivals(draws, 10.0, (128, 1024, 2048), shared_fraction=0.0)
    )


OTHER_POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "prefix-only": lambda: select_longest_prefix,
    **{name: new_policy for name, new_policy in ROUTING_POLICIES.items() if name != "least-cost"},
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
@pytest.mark.parametrize(
    ("new_scenario", "min_ratios"),
    [
        (hot_prefix, {"round-robin": 1.3, "power-of-two": 1.5, "latency": 1.3, "prefix-only": 1.1}),
        (runaway, {"round-robin": 10, "power-of-two": 2, "latency": 1.2, "hash": 2}),
        (mixed_speeds, {"round-robin": 10, "power-of-two": 2, "latency": 1.2, "hash": 2}),
        (plain, {"round-robin": 1.1, "power-of-two": 1.3, "latency": 1.1, "prefix-only": 1.5}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_least_cost_is_not_beaten_and_wins_by_the_expected_ratio(
    new_scenario: object, min_ratios: dict[str, float], seed: int
) -> None:
    assert callable(new_scenario)
    scenario = new_scenario(random.Random(seed))
    least_cost = replay(scenario, ROUTING_POLICIES["least-cost"], seed)
    other_times = {
        name: replay(scenario, new_policy, seed) for name, new_policy in OTHER_POLICIES.items()
    }
    for name, seconds in other_times.items():
        assert least_cost <= 1.05 * seconds, (name, least_cost, seconds)
    for name, factor in min_ratios.items():
        assert other_times[name] >= factor * least_cost, (name, least_cost, other_times[name])


@pytest.mark.parametrize(
    "new_scenario",
    [runaway, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (hot_prefix, plain))],
)
def test_least_cost_is_not_beaten_with_several_gateways(
    new_scenario: Callable[[random.Random], Scenario],
) -> None:
    scenario = new_scenario(random.Random(0))
    least_cost = replay(scenario, ROUTING_POLICIES["least-cost"], 0, gateways=4)
    for name, new_policy in OTHER_POLICIES.items():
        seconds = replay(scenario, new_policy, 0, gateways=4)
        assert least_cost <= 1.05 * seconds, (name, least_cost, seconds)
    assert least_cost <= 1.6 * replay(scenario, ROUTING_POLICIES["least-cost"], 0)
