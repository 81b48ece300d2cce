"""Detection of changes: false alarms on quiet traffic, planted changes, and what is shown of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from argosy.policy.detection import (
    CellKey,
    ChangeDetector,
    MonitorState,
    PastChange,
    SeasonalBaseline,
    StreamDeviation,
    TrafficCell,
    TrafficMonitor,
    beta_binomial_factor,
    rank_changes,
    rank_slices,
)
from argosy.policy.scaled_number import to_float

DAY_S, HOUR_S, STEP_S = 86_400, 3600, 300
MONDAY = 4 * DAY_S + 2900 * 7 * DAY_S
HISTORY_DAYS, QUIET_DAYS = 28, 30
ALARM = {STEP_S: 60 * 30 * 288.0, HOUR_S: 60 * 30 * 24.0}
"""Evidence that one of 60 streams exceeds once a month at most."""


def simulate_shares(
    rng: np.random.Generator, days: int, share: float = 0.1
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the true share of each step: a day's swing, weekends, days that differ, and correlated noise."""
    steps = np.arange(days * 288)
    hour = steps / 12 % 24
    day = steps // 288
    log_share = 0.3 * np.sin(2 * math.pi * hour / 24) - 0.29 * (day % 7 >= 5)
    log_share += rng.normal(0, 0.12, days)[day]
    noise = np.empty(len(steps))
    value = 0.0
    for index, step in enumerate(rng.normal(0, 0.15 * math.sqrt(1 - 0.9**2), len(steps))):
        value = 0.9 * value + step
        noise[index] = value
    return np.minimum(0.95, share * np.exp(log_share + noise))


def find_alarms(
    rate: float, seed: int, days: int = QUIET_DAYS, factor: float = 1.0, change_day: int = 0
) -> list[tuple[str, float]]:
    """Run both detectors on a stream, and return its alarms with the hours since the change."""
    rng = np.random.default_rng(seed)
    shares = simulate_shares(rng, HISTORY_DAYS + days)
    change = (HISTORY_DAYS + change_day) * 288
    shares[change:] = np.minimum(0.95, shares[change:] * factor)
    totals = rng.poisson(rate * STEP_S, len(shares))
    events = rng.binomial(totals, shares)
    baseline = SeasonalBaseline()
    fast, slow = ChangeDetector(2.0), ChangeDetector(1.5)
    alarms = []
    for hour in range(len(shares) // 12):
        at = MONDAY + hour * HOUR_S
        steps = range(hour * 12, hour * 12 + 12)
        if hour >= HISTORY_DAYS * 24:
            counts = [(fast, step, STEP_S, events[step], totals[step]) for step in steps]
            counts.append((slow, steps[-1], HOUR_S, events[steps].sum(), totals[steps].sum()))
            for detector, step, step_s, event, total in counts:
                expected = baseline.expected(at)
                detector.update(step, int(event), int(total), expected, baseline.concentration)
                if detector.evidence >= ALARM[step_s]:
                    alarms.append((f"{step_s}", (step + 1 - change) / 12))
                    detector.reset()
        baseline.learn(at, int(events[steps].sum()), int(totals[steps].sum()))
    return alarms


def test_likelihood_ratio_is_a_ratio_of_beta_binomial_probabilities() -> None:
    def probability(mean: float, events: int, total: int) -> float:
        a, b = 60 * mean, 60 * (1 - mean)
        return math.exp(
            math.lgamma(a + events)
            + math.lgamma(b + total - events)
            - math.lgamma(a + b + total)
            - math.lgamma(a)
            - math.lgamma(b)
            + math.lgamma(a + b)
        )

    for events in (0, 3, 40):
        ratio = to_float(beta_binomial_factor(0.2, 0.4, 60.0, events, 40 - events))
        expected = probability(0.4, events, 40) / probability(0.2, events, 40)
        assert ratio == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_raises_no_alarm_on_quiet_days(rate: float) -> None:
    assert not find_alarms(rate, seed=1, days=10)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rate", [0.1, 1.0, 10.0])
def test_raises_at_most_one_alarm_in_30_quiet_days_of_60_streams(rate: float) -> None:
    alarms = [each for seed in range(60) for each in find_alarms(rate, 1000 + seed)]
    assert len(alarms) <= 1, alarms


@pytest.mark.parametrize(
    ("rate", "factor", "within_h"), [(0.1, 4.0, 3.0), (1.0, 4.0, 1.0), (1.0, 2.0, 24.0)]
)
def test_finds_a_rise_soon(rate: float, factor: float, within_h: float) -> None:
    delays = []
    for seed in range(3):
        alarms = find_alarms(rate, 50 + seed, days=3, factor=factor, change_day=1)
        assert alarms
        assert all(hours > 0 for _, hours in alarms)
        delays.append(alarms[0][1])
    assert sorted(delays)[1] <= within_h, delays


def test_weekly_batch_job_is_expected_from_its_third_week() -> None:
    rng = np.random.default_rng(7)
    baseline, detector = SeasonalBaseline(), ChangeDetector(2.0)
    alarms = []
    for hour in range(6 * 168):
        at = MONDAY + hour * HOUR_S
        is_job = hour % 168 in {50, 51, 52}
        total = int(rng.poisson(600))
        events = int(rng.binomial(total, 0.45 if is_job else 0.1))
        if hour >= 168:
            detector.update(at, events, total, baseline.expected(at), baseline.concentration)
            if detector.evidence > ALARM[HOUR_S]:
                alarms.append(hour // 168)
                detector.reset()
        baseline.learn(at, events, total)
    assert not [week for week in alarms if week >= 2], alarms


# --- the monitor ---------------------------------------------------------------------------------

Plant = Mapping[str, float]


class Traffic:
    """Requests of one model with two replicas and three tenants, in steps of 5 minutes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.monitor = TrafficMonitor()
        self.at = MONDAY

    def run(self, hours: float, change: Mapping[str, float] | None = None, where: str = "") -> None:
        """Add hours of traffic. `change` has factors of what the requests at `where` are like."""
        for _ in range(round(hours * 12)):
            self.monitor.add(self.at, list(self._step(change or {}, where)))
            self.at += STEP_S
            self.monitor.advance(self.at)
        self.monitor.advance(self.at + 2 * STEP_S)

    def _step(
        self, change: Mapping[str, float], where: str
    ) -> Iterator[tuple[CellKey, TrafficCell]]:
        rng = self.rng
        day = 1.0 + 0.3 * math.sin(2 * math.pi * (self.at % DAY_S) / DAY_S)
        for replica in ("r-0", "r-1"):
            for tenant in ("acme", "beta", "gamma"):
                factors = change if where in {"", replica, tenant} else {}
                total = int(rng.poisson(20 * day))
                failed = int(rng.binomial(total, min(0.9, 0.01 * factors.get("errors", 1.0))))
                refused = int(rng.binomial(total, min(0.9, 0.02 * factors.get("refusals", 1.0))))
                answered = max(0, total - failed - refused)
                cell = TrafficCell(
                    requests=total,
                    failed=failed,
                    refused=refused,
                    answered=answered,
                    cut_off=int(rng.binomial(answered, 0.03 * factors.get("cut_off", 1.0))),
                    cache_misses=int(rng.binomial(answered, 0.15 * factors.get("misses", 1.0))),
                    histograms={
                        name: self._histogram(answered, mean * factors.get(name, 1.0))
                        for name, mean in (
                            ("ttft", 0.3),
                            ("tpot", 0.02),
                            ("output", 200.0),
                            ("prompt", 900.0),
                            ("cost", 500.0),
                        )
                    },
                )
                yield CellKey(model="m", version="v1", replica=replica), cell
                yield CellKey(model="m", tenant=tenant), cell

    def _histogram(self, count: int, median: float) -> dict[int, int]:
        values = np.floor(8 * np.log2(self.rng.lognormal(math.log(median), 0.8, count)) + 120)
        buckets, counts = np.unique(values.astype(int), return_counts=True)
        return dict(zip(buckets.tolist(), counts.tolist(), strict=True))

    def deviations(self) -> dict[tuple[str, str], StreamDeviation]:
        """Return what deviates, by event and tenant or replica."""
        return {
            (each.event, key.tenant or key.replica): each for key, each in self.monitor.deviations()
        }


@pytest.fixture(scope="module")
def week() -> Traffic:
    """Traffic of eight quiet days."""
    traffic = Traffic(seed=3)
    traffic.run(8 * 24)
    assert not traffic.deviations()
    return traffic


PLANTED = [
    ("slow_ttft", "", {"ttft": 2.5}, 2.0),
    ("errors", "", {"errors": 4.0}, 2.0),
    ("short_output", "", {"output": 0.4}, 2.0),
    ("high_cost", "acme", {"cost": 4.0}, 2.0),
    ("slow_ttft", "r-1", {"ttft": 2.0}, 1.0),
    ("errors", "r-1", {"errors": 8.0}, 2.0),
]
OTHER_PLANTED = [
    ("refusals", "", {"refusals": 4.0}, 2.0),
    ("long_output", "", {"output": 2.5}, 2.0),
    ("long_prompt", "", {"prompt": 2.5}, 2.0),
    ("short_prompt", "", {"prompt": 0.4}, 2.0),
    ("slow_tokens", "", {"tpot": 2.5}, 2.0),
    ("cut_off", "", {"cut_off": 5.0}, 2.0),
    ("cache_misses", "", {"misses": 5.0}, 2.0),
]


@pytest.mark.parametrize(
    ("event", "where", "change", "within_h"),
    [*PLANTED, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in OTHER_PLANTED)],
)
def test_planted_change_is_found_with_onset_and_slice(
    week: Traffic, event: str, where: str, change: Plant, within_h: float
) -> None:
    traffic = Traffic(seed=11)
    traffic.monitor = _copy(week.monitor)
    traffic.at = week.at
    traffic.run(6)
    assert not traffic.deviations()
    planted_at = traffic.at
    traffic.run(within_h, change, where)
    deviations = traffic.deviations()
    assert (event, where) in deviations, deviations
    found = deviations[event, where]
    assert abs(found.onset - planted_at) <= 1800
    assert found.share > found.expected
    if where:
        slices = traffic.monitor.slices("m", event, found.onset)
        assert slices[0].value == where
        assert slices[0].excess_share > 0.6
    traffic.run(8)
    assert not traffic.deviations()


def test_slow_drift_is_shown(week: Traffic) -> None:
    monitor = _copy(week.monitor)
    traffic = Traffic(seed=5)
    traffic.monitor, traffic.at = monitor, week.at
    for day in range(2):
        traffic.run(24, {"output": 1.1 + 0.05 * day})
    assert not [each for each in traffic.deviations().values() if each.kind == "fast"]
    first = monitor.statuses()[0]
    assert first.event == "long_output"
    assert first.low > first.expected
    assert all(
        one.low / one.expected >= other.low / other.expected
        for one, other in pairwise(monitor.statuses())
    )


def _copy(monitor: TrafficMonitor) -> TrafficMonitor:
    """Return what the next controller continues with."""
    encoded = msgspec.json.encode(monitor.state)
    return TrafficMonitor(msgspec.json.decode(encoded, type=MonitorState))


# --- attribution ---------------------------------------------------------------------------------


def test_slice_with_the_excess_is_first() -> None:
    before = {("replica", f"r-{index}"): (100, 1000) for index in range(4)}
    after = dict.fromkeys(before, (50, 500)) | {("replica", "r-3"): (200, 500)}
    first = rank_slices(
        before | {("version", "v"): (400, 4000)}, after | {("version", "v"): (350, 2000)}
    )[0]
    assert (first.dimension, first.value) == ("replica", "r-3")
    assert first.share_elsewhere == pytest.approx(0.1)
    assert first.excess_share == pytest.approx(1.0)


def test_true_change_is_among_the_first_three_beside_decoys() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(100):
        onset = 1e9
        decoys = [
            PastChange(
                at=onset - float(rng.uniform(0, 7200)),
                kind=str(rng.choice(["replica_phase", "key.create", "scaling_decision"])),
                text="decoy",
                scope={"pool": str(rng.choice(["llama", "other", "third"]))},
            )
            for _ in range(30)
        ]
        true = PastChange(
            at=onset - float(rng.uniform(0, 900)),
            kind="rollout_promoted",
            text="true",
            scope={"pool": "llama"},
        )
        ranked = rank_changes([*decoys, true], onset, {"pool": "llama", "model": "llama"})
        hits += any(each.change is true for each in ranked[:3])
    assert hits >= 90


def test_changes_after_the_onset_and_of_others_hardly_count() -> None:
    def change(at: float, replica: str) -> PastChange:
        return PastChange(at=at, kind="replica_start", text="", scope={"replica": replica})

    changes = [change(900.0, "a"), change(900.0, "b"), change(1700.0, "b"), change(-9000.0, "b")]
    ranked = rank_changes(changes, 1000.0, {"replica": "b"})
    assert [each.change for each in ranked] == [changes[1], changes[0]]
    assert ranked[0].score > 10 * ranked[1].score
