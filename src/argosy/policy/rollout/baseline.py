"""Baseline of a comparison: quantiles of the stable version and rates of its users, frozen before the candidate runs.

An event of a request is defined by the quantiles. Where routing is sticky, the unit of the comparison is the user. The
rates show that the same users on one side are no regression. A heavy user with many errors, on whichever side, would
otherwise be taken for a worse version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from argosy.policy.rollout.metrics import EVENTS, EVENTS_OF, Metric, OutcomeStatus, RequestOutcome

_STEPS = 16
"""Buckets for each power of two."""


class QuantileSketch(msgspec.Struct):
    """Mergeable histogram. Its quantiles are bounds of buckets: deterministic, and independent of the order."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    total: int = 0

    def add(self, value: float) -> None:
        """Count a finite value of 0 or more."""
        mantissa, exponent = math.frexp(value)
        bucket = (
            exponent * _STEPS + int((mantissa - 0.5) * 2 * _STEPS) if value > 0.0 else -(1 << 20)
        )
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += 1

    def quantile(self, fraction: float) -> float:
        """Return the smallest bucket bound with at least this fraction of the values below it.

        Raises:
            ValueError: No value was counted.
        """
        if not self.total:
            raise ValueError("a quantile needs at least one value; call add first")
        below = 0
        bucket = 0
        for bucket in sorted(self.counts):
            below += self.counts[bucket]
            if below >= fraction * self.total:
                break
        exponent, step = divmod(bucket + 1, _STEPS)
        return math.ldexp(0.5 + step / (2 * _STEPS), exponent) if exponent > -1000 else 0.0


MIN_SAMPLES = 200
"""Measurements of a stratum with quantiles of its own. Others use those of the metric."""
MIN_SCORING_AGE_S = 60.0
MIN_SLOWDOWN = 1.1
"""Smallest slowdown that makes a request slow, relative to the median. Where times hardly vary, half of the requests of
a version that is 1 % slower would exceed the median."""
MIN_OBJECTIVE_SHARE = 0.05
"""Smallest part of the declared objective that makes a request slow. A replica with few requests needs some more
milliseconds for each, whatever its version, since processor and caches have cooled."""
_SCORING_AGE_FACTOR = 2.0
"""Scoring age in largest thresholds of the time to the first token."""
_LATENCIES = (Metric.TTFT, Metric.TPOT)
_ANY = ""
"""Stratum of all requests."""


def stratum_of(metric: Metric, outcome: RequestOutcome) -> str:
    """Return the group of requests with which a request is compared.

    A time to the first token is compared at equal uncached tokens, because the prefix cache of a new replica is cold.
    Times are compared at equal load, because a candidate with a small share is idle. Buckets are powers of two.
    """
    load = outcome.in_flight.bit_length()
    match metric:
        case Metric.TTFT:
            return f"{outcome.uncached_tokens.bit_length()}/{load}"
        case Metric.TPOT:
            return str(load)
        case _:
            return _ANY


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen thresholds of the stable version."""

    thresholds: Mapping[str, tuple[float, ...]] = {}
    """Threshold of each event, by `METRIC/STRATUM`, in the order of `EVENTS` of that metric."""
    scoring_age_s: float = MIN_SCORING_AGE_S
    """Age at which a running request is scored."""
    miss_rate: float = 0.0
    """Part of the stable version's requests that missed the objective."""

    def threshold(self, metric: Metric, stratum: str, position: int) -> float | None:
        """Return a threshold; None if the stable version has too few measurements of the metric."""
        found = self.thresholds.get(f"{metric}/{stratum}") or self.thresholds.get(f"{metric}/")
        return found[position] if found else None


class BaselineRecorder:
    """Collects measurements of the stable version until they are frozen."""

    def __init__(self) -> None:
        self._sketches: dict[str, QuantileSketch] = {}
        self._requests = self._misses = 0

    def record(self, outcome: RequestOutcome) -> None:
        """Add a request of the stable version."""
        if not outcome.is_valid:
            return
        self._requests += 1
        self._misses += outcome.misses_objective
        for metric, value in _measurements(outcome):
            for stratum in {stratum_of(metric, outcome), _ANY}:
                sketch = self._sketches.setdefault(f"{metric}/{stratum}", QuantileSketch())
                sketch.add(value)

    def freeze(
        self, max_ttft_s: float | None = None, max_time_per_token_s: float | None = None
    ) -> Baseline:
        """Return the thresholds of all strata with enough measurements.

        Args:
            max_ttft_s: Declared objective; None for none.
            max_time_per_token_s: The same for the time per output token.
        """
        objectives = {Metric.TTFT: max_ttft_s, Metric.TPOT: max_time_per_token_s}
        thresholds: dict[str, tuple[float, ...]] = {}
        for name, sketch in sorted(self._sketches.items()):
            if sketch.total >= MIN_SAMPLES:
                metric = Metric(name.partition("/")[0])
                least = MIN_OBJECTIVE_SHARE * (objectives.get(metric) or 0.0)
                thresholds[name] = find_thresholds(metric, sketch, least)
        slowest = [
            values[-1] for name, values in thresholds.items() if name.startswith(Metric.TTFT)
        ]
        return Baseline(
            thresholds=thresholds,
            scoring_age_s=max(
                [MIN_SCORING_AGE_S, *(_SCORING_AGE_FACTOR * each for each in slowest)]
            ),
            miss_rate=self._misses / self._requests if self._requests else 0.0,
        )


def find_thresholds(
    metric: Metric, sketch: QuantileSketch, least: float = 0.0
) -> tuple[float, ...]:
    """Return the thresholds of the events of a metric, each at least `least`, from the measurements of a stratum."""
    if metric in _LATENCIES:
        least = max(least, MIN_SLOWDOWN * sketch.quantile(0.5))
    quantiles = [EVENTS[event].quantile for event in EVENTS_OF[metric]]
    return tuple(max(sketch.quantile(each), least) for each in quantiles if each is not None)


def _measurements(outcome: RequestOutcome) -> Iterator[tuple[Metric, float]]:
    if outcome.ttft_s is not None:
        yield Metric.TTFT, outcome.ttft_s
    if outcome.time_per_token_s is not None:
        yield Metric.TPOT, outcome.time_per_token_s
    if outcome.status is OutcomeStatus.COMPLETED:
        yield Metric.SHORT_OUTPUT, float(outcome.output_tokens)
        yield Metric.LONG_OUTPUT, float(outcome.output_tokens)


class ScoredEvent(NamedTuple):
    """Opportunity for an event."""

    event: int
    """Position in `EVENTS`."""
    stratum: str
    has_occurred: bool


def score(outcome: RequestOutcome, baseline: Baseline) -> Iterator[ScoredEvent]:
    """Score a valid request. What cannot be decided for it, such as the length of a failed answer, is left out."""
    status = outcome.status
    if status is not OutcomeStatus.CANCELLED:
        for metric, bad in (
            (Metric.ERRORS, OutcomeStatus.FAILED),
            (Metric.REFUSALS, OutcomeStatus.REFUSED),
        ):
            yield ScoredEvent(EVENTS_OF[metric][0], "", status is bad)
    for metric in (Metric.TTFT, Metric.TPOT):
        stratum = stratum_of(metric, outcome)
        for position, event in enumerate(EVENTS_OF[metric]):
            threshold = baseline.threshold(metric, stratum, position)
            if threshold is not None:
                exceeds = _exceeds(metric, outcome, threshold)
                if exceeds is not None:
                    yield ScoredEvent(event, stratum, exceeds)
    if status in {OutcomeStatus.COMPLETED, OutcomeStatus.RUNNING}:
        is_running = status is OutcomeStatus.RUNNING
        for metric in (Metric.SHORT_OUTPUT, Metric.LONG_OUTPUT):
            for position, event in enumerate(EVENTS_OF[metric]):
                threshold = baseline.threshold(metric, "", position)
                if threshold is None:
                    continue
                if metric is Metric.LONG_OUTPUT:
                    yield ScoredEvent(event, "", outcome.output_tokens > threshold)
                else:
                    has_occurred = outcome.output_tokens < threshold and not is_running
                    yield ScoredEvent(event, "", has_occurred)


def _exceeds(metric: Metric, outcome: RequestOutcome, threshold: float) -> bool | None:
    """Return whether a time exceeds a threshold; None if it is not known and can still be below it."""
    if metric is Metric.TPOT:
        time_per_token_s = outcome.time_per_token_s
        return None if time_per_token_s is None else time_per_token_s > threshold
    if outcome.ttft_s is not None:
        return outcome.ttft_s > threshold
    return True if outcome.age_s > threshold else None


PRIOR_REQUESTS = 50.0
"""Weight of the mean rate of all users, in requests of one user."""
MAX_USERS = 10_000


class UserRates(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen rates of events by user.

    They are not updated during a rollout, which could hide a regression. Store them with it: a gateway that restarts
    without them would count the requests of all users alike.
    """

    means: tuple[float, ...] = (1.0,) * len(EVENTS)
    """Mean rate of each event. Only ratios of rates matter."""
    users: Mapping[str, tuple[float, ...]] = {}
    """Rates of known users. Others have the mean rates."""

    def expected(self, key: tuple[str, str], event: int) -> float:
        """Return the expected number of events of one request. It is 1 for events in which users do not differ."""
        if not EVENTS[event].by_user:
            return 1.0
        return self.users.get(user_name(key), self.means)[event]


class UserHistory:
    """Counts events of the stable version by user, for a bounded number of users."""

    def __init__(self, baseline: Baseline, max_users: int = MAX_USERS) -> None:
        """Create a history of events that are defined by a baseline."""
        self._baseline = baseline
        self._max_users = max_users
        self._users: dict[str, list[float]] = {}
        """Requests, then events, of each user."""

    def record(self, outcome: RequestOutcome) -> None:
        """Add a request of the stable version."""
        if not outcome.is_valid:
            return
        name = user_name(outcome.key)
        counts = self._users.get(name)
        if counts is None:
            if len(self._users) >= self._max_users:
                self._forget_light_users()
            counts = self._users.setdefault(name, [0.0] * (1 + len(EVENTS)))
        counts[0] += 1.0
        for event, _, has_occurred in score(outcome, self._baseline):
            counts[1 + event] += has_occurred

    def freeze(self) -> UserRates:
        """Return the rates, drawn towards the mean the less is known of a user."""
        requests = sum(counts[0] for counts in self._users.values())
        if not requests:
            return UserRates()
        means = tuple(
            max(sum(counts[1 + event] for counts in self._users.values()), 0.5) / requests
            for event in range(len(EVENTS))
        )
        return UserRates(
            means=means,
            users={
                name: tuple(
                    (counts[1 + event] + PRIOR_REQUESTS * mean) / (counts[0] + PRIOR_REQUESTS)
                    for event, mean in enumerate(means)
                )
                for name, counts in self._users.items()
            },
        )

    def _forget_light_users(self) -> None:
        while len(self._users) >= self._max_users:
            halved = {name: [each / 2 for each in self._users[name]] for name in self._users}
            self._users = {name: counts for name, counts in halved.items() if counts[0] >= 1.0}


def user_name(key: tuple[str, str]) -> str:
    """Return a sticky key as one string."""
    return f"{len(key[0])}:{key[0]}{key[1]}"


def freeze_history(
    outcomes: Sequence[RequestOutcome],
    max_ttft_s: float | None = None,
    max_time_per_token_s: float | None = None,
) -> tuple[Baseline, UserRates]:
    """Return the thresholds and the rates of users from recent requests of the stable version.

    Args:
        outcomes: The requests.
        max_ttft_s: Declared objective, by which the requests were judged; None for none.
        max_time_per_token_s: The same for the time per output token.
    """
    recorder = BaselineRecorder()
    for outcome in outcomes:
        recorder.record(outcome)
    baseline = recorder.freeze(max_ttft_s, max_time_per_token_s)
    users = UserHistory(baseline)
    for outcome in outcomes:
        users.record(outcome)
    return baseline, users.freeze()
