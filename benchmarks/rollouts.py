"""Simulate rollouts through the gate: false rollbacks of identical versions, and detection of worse ones.

    python -m benchmarks.rollouts [--rollouts 1000] [--unknown 200] [--regressions 200] [--seed 1]

Prints JSON lines. Each rollout has its own 2,000 users. Their activity follows Zipf's law, they differ in errors,
refusals and output length, and they send their requests in sessions. Routing is sticky, with the best of 60 salts.
Errors and latencies of both versions rise together in bursts. The candidate's prefix cache is cold and its replicas are
less loaded. Five steps of 8,000 requests each follow one another whether or not the gate would promote. The batches are
built with NumPy as `OutcomeAggregator` builds them; a test compares both.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.policy.rollout.baseline import (
    MIN_SAMPLES,
    PRIOR_REQUESTS,
    Baseline,
    QuantileSketch,
    find_thresholds,
)
from argosy.policy.rollout.comparison import EventCell, OutcomeBatch
from argosy.policy.rollout.gate import GateResult, RolloutGate
from argosy.policy.rollout.gate_record import GateSettings
from argosy.policy.rollout.metrics import EVENTS, EVENTS_OF, Metric

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
USERS = 2_000
STEP_REQUESTS = 8_000
HISTORY_REQUESTS = 40_000
REQUESTS_PER_S = 50.0
NUM_SALTS = 60
SESSION_REQUESTS = 5.0
"""Mean number of requests that a user sends in a row."""
CACHE_FILL_REQUESTS = 1_000.0
STABLE_LOAD, CANDIDATE_LOAD = 8.0, 5.0
"""Mean requests in flight on a replica."""


@dataclass(frozen=True)
class Change:
    """Difference of the candidate, as factors."""

    errors: float = 1.0
    refusals: float = 1.0
    ttft: float = 1.0
    tpot: float = 1.0
    output: float = 1.0


CHANGES = {
    "errors 0.5 -> 2 %": Change(errors=4.0),
    "refusals 1 -> 3 %": Change(refusals=3.0),
    "TTFT x1.3": Change(ttft=1.3),
    "time per token x1.2": Change(tpot=1.2),
    "output -15 %": Change(output=0.85),
}


@dataclass(frozen=True)
class Population:
    """Users with their habits."""

    activity: Floats
    """Part of the sessions of each user."""
    errors: Floats
    refusals: Floats
    output: Floats
    """Factor of the output length."""


@dataclass(frozen=True)
class Requests:
    """Requests with what was measured of them."""

    user: Ints
    is_candidate: Flags
    failed: Flags
    refused: Flags
    ttft: Floats
    tpot: Floats
    output: Ints
    uncached: Ints
    in_flight: Ints

    def event_values(self) -> dict[Metric, Floats]:
        """Return the measurement of each metric that has one."""
        output = self.output.astype(np.float64)
        return {
            Metric.TTFT: self.ttft,
            Metric.TPOT: self.tpot,
            Metric.SHORT_OUTPUT: output,
            Metric.LONG_OUTPUT: output,
        }

    def is_measured(self, metric: Metric) -> Flags:
        """Return which requests count for a metric. Failed and refused ones have no output."""
        answered = ~(self.failed | self.refused)
        if metric is Metric.TPOT:
            return answered & (self.output >= 2)
        return answered


@dataclass(frozen=True)
class Result:
    """End of one simulated rollout."""

    reason: str
    """Why the gate rejected the candidate; empty if it did not."""
    step: int
    candidate_requests: int
    """Requests of the candidate until the rejection."""
    promoted_after: tuple[int | None, ...]
    """Requests of the candidate until each step could have been promoted."""


def create_population(random: np.random.Generator) -> Population:
    """Return 2,000 users."""
    activity = 1.0 / np.arange(1, USERS + 1) ** 1.1
    return Population(
        activity=activity / activity.sum(),
        errors=0.005 * random.lognormal(-(1.5**2) / 2, 1.5, USERS),
        refusals=0.01 * random.lognormal(-0.5, 1.0, USERS),
        output=random.lognormal(-(0.43**2) / 2, 0.43, USERS),
    )


def draw_requests(
    random: np.random.Generator,
    population: Population,
    count: int,
    candidates: Flags | float,
    num_warm: int,
    change: Change,
) -> Requests:
    """Draw requests in the order in which they arrive.

    Args:
        random: Source of randomness.
        population: Users.
        count: Number of requests.
        candidates: Which users get the candidate; or the part of the sessions, if these are assigned.
        num_warm: Requests that have already filled the candidate's cache.
        change: What is different in the candidate.
    """
    lengths = random.geometric(1.0 / SESSION_REQUESTS, count)
    sessions = random.choice(USERS, count, p=population.activity)
    user = np.repeat(sessions, lengths)[:count]
    if isinstance(candidates, float):
        is_candidate = np.repeat(random.random(count) < candidates, lengths)[:count]
    else:
        is_candidate = candidates[user]
    burst = random.random(count // 200 + 1) < 0.05
    in_burst = burst[np.arange(count) // 200]
    filled = np.exp(-(num_warm + np.cumsum(is_candidate)) / CACHE_FILL_REQUESTS)
    hit_rate = 0.5 * np.where(is_candidate, 1.0 - filled, 1.0)
    prompt = random.lognormal(6.5, 1.0, count)
    hits = random.random(count) < 2.0 * hit_rate
    uncached = np.maximum(1, prompt * np.where(hits, 0.2, 1.0)).astype(np.int64)
    load = np.where(is_candidate, CANDIDATE_LOAD, STABLE_LOAD) * np.where(in_burst, 2.0, 1.0)
    in_flight = random.poisson(load)
    ttft = (0.02 + uncached / 8_000) * (1.0 + 0.1 * in_flight) * random.lognormal(0, 0.5, count)
    tpot = 0.02 * (1.0 + 0.03 * in_flight) * random.lognormal(0, 0.35, count)
    output = 200 * population.output[user] * random.lognormal(-0.28, 0.745, count)
    errors = population.errors[user] * np.where(in_burst, 10.0, 1.0)
    refusals = population.refusals[user]
    failed = random.random(count) < errors * np.where(is_candidate, change.errors, 1.0)
    refused = random.random(count) < refusals * np.where(is_candidate, change.refusals, 1.0)
    return Requests(
        user=user,
        is_candidate=is_candidate,
        failed=failed,
        refused=refused & ~failed,
        ttft=ttft * np.where(is_candidate, change.ttft, 1.0),
        tpot=tpot * np.where(is_candidate, change.tpot, 1.0),
        output=(output * np.where(is_candidate, change.output, 1.0)).astype(np.int64) + 1,
        uncached=uncached,
        in_flight=in_flight,
    )


def bit_lengths(values: Ints) -> Ints:
    """Return `int.bit_length` of each value."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def strata_of(metric: Metric, requests: Requests) -> Ints:
    """Return a number for the stratum of each request. See `stratum_of`."""
    load = bit_lengths(requests.in_flight)
    match metric:
        case Metric.TTFT:
            return bit_lengths(requests.uncached) * 64 + load
        case Metric.TPOT:
            return load
        case _:
            return np.zeros(len(load), np.int64)


def stratum_name(metric: Metric, stratum: int) -> str:
    """Return the name of a stratum in a baseline."""
    match metric:
        case Metric.TTFT:
            return f"{stratum // 64}/{stratum % 64}"
        case Metric.TPOT:
            return str(stratum)
        case _:
            return ""


def build_baseline(requests: Requests) -> Baseline:
    """Return the thresholds that `BaselineRecorder` freezes."""
    thresholds: dict[str, tuple[float, ...]] = {}
    for metric, values in requests.event_values().items():
        measured = requests.is_measured(metric)
        strata = strata_of(metric, requests)
        groups = {"": measured}
        if strata.any():
            groups |= {
                stratum_name(metric, int(each)): measured & (strata == each)
                for each in np.unique(strata)
            }
        for name, group in groups.items():
            if np.count_nonzero(group) >= MIN_SAMPLES:
                sketch = build_sketch(values[group])
                thresholds[f"{metric}/{name}"] = find_thresholds(metric, sketch)
    return Baseline(thresholds=thresholds)


def build_sketch(values: Floats) -> QuantileSketch:
    """Return a sketch of positive values."""
    mantissas, exponents = np.frexp(values)
    buckets = exponents.astype(np.int64) * 16 + ((mantissas - 0.5) * 32).astype(np.int64)
    names, counts = np.unique(buckets, return_counts=True)
    return QuantileSketch(dict(zip(names.tolist(), counts.tolist(), strict=True)), len(values))


def score_events(
    requests: Requests, baseline: Baseline
) -> Iterator[tuple[int, Flags, Flags, Ints]]:
    """Yield each event with its opportunities, its occurrences, and their strata. See `score`."""
    everyone = np.ones(len(requests.user), np.bool_)
    nowhere = np.zeros(len(requests.user), np.int64)
    yield EVENTS_OF[Metric.ERRORS][0], everyone, requests.failed, nowhere
    yield EVENTS_OF[Metric.REFUSALS][0], everyone, requests.refused, nowhere
    for metric, values in requests.event_values().items():
        strata = strata_of(metric, requests)
        names, positions = np.unique(strata, return_inverse=True)
        for position, event in enumerate(EVENTS_OF[metric]):
            found = [
                baseline.threshold(metric, stratum_name(metric, int(each)), position)
                for each in names
            ]
            limits = np.array([np.nan if each is None else each for each in found])[positions]
            is_short = metric is Metric.SHORT_OUTPUT
            occurred = values < limits if is_short else values > limits
            measured = requests.is_measured(metric) & ~np.isnan(limits)
            yield event, measured, occurred & measured, strata


def user_rates(requests: Requests, baseline: Baseline) -> Floats:
    """Return the rate of each event (row) and user (column) that `UserHistory` freezes."""
    rates = np.ones((len(EVENTS), USERS))
    total = np.bincount(requests.user, minlength=USERS)
    for event, _, occurred, _ in score_events(requests, baseline):
        if EVENTS[event].by_user:
            counts = np.bincount(requests.user[occurred], minlength=USERS)
            mean = max(counts.sum(), 0.5) / len(requests.user)
            rates[event] = (counts + PRIOR_REQUESTS * mean) / (total + PRIOR_REQUESTS)
    return rates


def build_batches(
    requests: Requests, baseline: Baseline, rates: Floats, batch_requests: int, first: OutcomeBatch
) -> list[OutcomeBatch]:
    """Return batches of consecutive requests, numbered from that of `first`. See `OutcomeAggregator`."""
    count = len(requests.user)
    number = np.arange(count) // batch_requests
    num_batches = int(number[-1]) + 1
    cells: list[list[EventCell]] = [[] for _ in range(num_batches)]
    candidate = requests.is_candidate
    for event, measured, occurred, strata in score_events(requests, baseline):
        group = (number * 4_096 + strata)[measured]
        names, positions = np.unique(group, return_inverse=True)
        expected = rates[event][requests.user][measured]
        is_candidate, is_event = candidate[measured], occurred[measured]
        candidate_expected, stable_expected, candidate_events, stable_events = (
            np.bincount(positions[mask], each, len(names)).tolist()
            for mask, each in (
                (is_candidate, expected[is_candidate]),
                (~is_candidate, expected[~is_candidate]),
                (is_candidate & is_event, None),
                (~is_candidate & is_event, None),
            )
        )
        for index, name in enumerate(names.tolist()):
            cell = EventCell(
                event=event,
                candidate_expected=candidate_expected[index],
                stable_expected=stable_expected[index],
                candidate_events=candidate_events[index],
                stable_events=stable_events[index],
            )
            cells[name // 4_096].append(cell)
    candidates = np.bincount(number, candidate, num_batches).astype(np.int64).tolist()
    totals = np.bincount(number, minlength=num_batches).tolist()
    return [
        OutcomeBatch(
            rollout=first.rollout,
            step=first.step,
            gateway=first.gateway,
            sequence=first.sequence + index,
            ended_at=first.ended_at + (index + 1) * batch_requests / REQUESTS_PER_S,
            cells=tuple(cells[index]),
            candidate_requests=candidates[index],
            stable_requests=totals[index] - candidates[index],
        )
        for index in range(num_batches)
    ]


def choose_points(points: Floats, weights: Floats) -> Floats:
    """Return the row of points that divides the traffic most evenly. See `choose_salt`."""
    totals = weights.sum(axis=0)
    worst = np.zeros(len(points))
    for share in SHARES:
        realised = (points < share) @ weights / totals
        worst = np.maximum(worst, np.abs(realised / share - 1.0).max(axis=1))
    best: Floats = points[int(worst.argmin())]
    return best


def simulate(
    seed: int,
    change: Change,
    settings: GateSettings,
    *,
    knows_users: bool = True,
    by_session: bool = False,
) -> Result:
    """Run one rollout.

    Args:
        seed: Seed of all its randomness.
        change: What is different in the candidate.
        settings: Settings of the gate.
        knows_users: Whether a history of users exists. Without one, all have the same rates and the salt is arbitrary.
        by_session: Whether sessions are assigned instead of users.
    """
    random = np.random.default_rng(seed)
    population = create_population(random)
    no_user = np.zeros(USERS, np.bool_)
    history = draw_requests(random, population, HISTORY_REQUESTS, no_user, 0, Change())
    baseline = build_baseline(history)
    rates = user_rates(history, baseline)
    requests_by_user = np.bincount(history.user, minlength=USERS)
    by_user = [event for event, kind in enumerate(EVENTS) if kind.by_user]
    weights = np.stack([requests_by_user, *(requests_by_user * rates[each] for each in by_user)], 1)
    points = choose_points(random.random((NUM_SALTS, USERS)), weights)
    if not knows_users:
        rates, points = np.ones_like(rates), random.random(USERS)
    gate = RolloutGate.start("r", settings, len(SHARES))
    now = 0.0
    total = sequence = 0
    promoted_after: list[int | None] = []
    for step, share in enumerate(SHARES):
        gate.open_step(step, share, now)
        candidates = share if by_session else points < share
        requests = draw_requests(random, population, STEP_REQUESTS, candidates, total, change)
        size = max(100, round(5 / share))
        first = OutcomeBatch(
            rollout="r", step=step, gateway="g", sequence=sequence + 1, ended_at=now
        )
        promoted_after.append(None)
        in_step = 0
        for batch in build_batches(requests, baseline, rates, size, first):
            gate.add(batch)
            sequence, now = batch.sequence, batch.ended_at
            total += batch.candidate_requests
            in_step += batch.candidate_requests
            if gate.record.rejection:
                return Result(gate.record.rejection, step, total, tuple(promoted_after))
            if promoted_after[-1] is None and gate.verdict(now).result is GateResult.PROMOTE:
                promoted_after[-1] = in_step
    return Result("", len(SHARES), total, tuple(promoted_after))


def summarise(label: str, results: list[Result]) -> Mapping[str, object]:
    """Return one row."""
    rejected = [each for each in results if each.reason]
    needed = [each.candidate_requests for each in rejected]
    steps = Counter(each.step for each in rejected)
    promoted: list[object] = []
    for step, share in enumerate(SHARES):
        reached = [each.promoted_after[step] for each in results if len(each.promoted_after) > step]
        after = [each for each in reached if each is not None]
        promoted.append(
            {
                "share": share,
                "reached": len(reached),
                "promoted": len(after),
                "candidate_requests_p50": int(np.median(after)) if after else None,
            }
        )
    return {
        "workload": label,
        "rollouts": len(results),
        "rolled_back": len(rejected),
        "rolled_back_share": round(len(rejected) / len(results), 4),
        "rolled_back_at_step": [steps[step] for step in range(len(SHARES))],
        "candidate_requests_p50": int(np.median(needed)) if needed else None,
        "candidate_requests_p90": int(np.quantile(needed, 0.9)) if needed else None,
        "metrics": dict(Counter(each.reason.split()[0] for each in rejected)),
        "steps": promoted,
    }


def main() -> None:
    """Print rows for identical versions, then one for each regression."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=1_000, help="of identical versions")
    parser.add_argument("--unknown", type=int, default=200, help="the same without a history")
    parser.add_argument("--regressions", type=int, default=200, help="of each worse version")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    settings = GateSettings()
    unknown = "identical versions, users unknown"
    for label, change, count, knows_users, by_session in (
        ("identical versions", Change(), options.rollouts, True, False),
        (f"{unknown}, sessions assigned", Change(), options.unknown, False, True),
        (f"{unknown}, users assigned", Change(), options.unknown, False, False),
        *((label, change, options.regressions, True, False) for label, change in CHANGES.items()),
    ):
        results = [
            simulate(
                options.seed + 7_919 * i,
                change,
                settings,
                knows_users=knows_users,
                by_session=by_session,
            )
            for i in range(count)
        ]
        if results:
            print(json.dumps(summarise(label, results)), flush=True)


if __name__ == "__main__":
    main()
