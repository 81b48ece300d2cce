"""Detection of changes: false alarms on quiet traffic, planted changes, and what is shown of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

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
    project_embedding,
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
FACTORS = (
    *("errors", "refusals", "cut_off", "misses", "calls"),
    *("ttft", "tpot", "output", "prompt", "cost", "requests"),
)
"""Factors that vary between days and steps."""
VALUES = frozenset({"ttft", "tpot", "output", "prompt", "cost"})
"""Factors of values. The share above the 90th percentile varies more than twice as much as they do."""


def embed(shift: float) -> list[list[int]]:
    """Return the buckets of 300 embeddings, whose mean is shifted by a part of its length."""
    rng = np.random.default_rng(1)
    centre, direction = rng.normal(0.0, 1.0, (2, 64))
    return [
        project_embedding(vector)
        for vector in rng.normal(centre + shift * direction, 1.0, (300, 64))
    ]


EMBEDDINGS = embed(0.0), embed(2.0)


class Traffic:
    """Requests of one model with two replicas and three tenants, in steps of 5 minutes.

    With `noise` days differ, and steps as well. With it, the shares of what requests are like are never quite the same.
    """

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.monitor = TrafficMonitor()
        self.at = MONDAY
        self.noise = noise
        self._drift = dict.fromkeys(FACTORS, 0.0)
        self._day = dict.fromkeys(FACTORS, 0.0)

    def run(
        self,
        hours: float,
        change: Mapping[str, float] | None = None,
        where: str = "",
        version: str = "v1",
        *,
        is_coarse: bool = False,
    ) -> None:
        """Add hours of traffic. `change` has factors of what the requests at `where` are like.

        Args:
            hours: How many.
            change: The factors.
            where: A replica or a tenant. Empty for all.
            version: Version of the replica `r-1`. The other one has `v1`.
            is_coarse: Whether all but the tokens of an hour are in its first step, which takes less time.
        """
        cells: list[tuple[CellKey, TrafficCell]] = []
        for _ in range(round(hours * 12)):
            if is_coarse and cells and self.at % HOUR_S:
                cells = [(key, TrafficCell(tokens=cell.tokens)) for key, cell in cells]
            else:
                cells = list(self._step(change or {}, where, version, 12 if is_coarse else 1))
            self.monitor.add(self.at, cells)
            self.at += STEP_S
            self.monitor.advance(self.at)
        self.monitor.advance(self.at + 2 * STEP_S)

    def _vary(self) -> Mapping[str, float]:
        """Return the factors of this step without a change."""
        if not self.noise:
            return {}
        if self.at % DAY_S < STEP_S:
            self._day = {name: self.rng.normal(0, 0.8 * self.noise) for name in FACTORS}
        for name, step in zip(FACTORS, self.rng.normal(0, self.noise, len(FACTORS)), strict=True):
            self._drift[name] = 0.9 * self._drift[name] + math.sqrt(1 - 0.9**2) * step
        return {
            name: math.exp(
                (self._drift[name] + self._day[name]) * (0.45 if name in VALUES else 1.0)
            )
            for name in FACTORS
        }

    def _step(
        self, change: Mapping[str, float], where: str, version: str, num_steps: int
    ) -> Iterator[tuple[CellKey, TrafficCell]]:
        rng = self.rng
        day = num_steps * (1.0 + 0.3 * math.sin(2 * math.pi * (self.at % DAY_S) / DAY_S))
        usual = self._vary()
        for replica in ("r-0", "r-1"):
            for tenant in ("acme", "beta", "gamma"):
                is_changed = where in {"", replica, tenant}
                factors = {
                    name: usual.get(name, 1.0) * (change.get(name, 1.0) if is_changed else 1.0)
                    for name in {*usual, *change}
                }
                total = int(rng.poisson(20 * day * factors.get("requests", 1.0)))
                checked = int(rng.poisson(2 * day))
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
                    checked_calls=checked,
                    malformed_calls=int(rng.binomial(checked, 0.03 * factors.get("calls", 1.0))),
                    tokens=1100 * total // num_steps,
                    queued_ms=int(1000 * total * factors.get("wait_s", 0.0)),
                    histograms=self._signals(checked, tenant, change if is_changed else {})
                    | {
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
                own = version if replica == "r-1" else "v1"
                yield CellKey(model="m", version=own, replica=replica), cell
                yield CellKey(model="m", tenant=tenant), cell

    def _histogram(self, count: int, median: float) -> dict[int, int]:
        values = np.floor(8 * np.log2(self.rng.lognormal(math.log(median), 0.8, count)) + 120)
        buckets, counts = np.unique(values.astype(int), return_counts=True)
        return dict(zip(buckets.tolist(), counts.tolist(), strict=True))

    def _signals(
        self, count: int, tenant: str, change: Mapping[str, float]
    ) -> dict[str, dict[int, int]]:
        """Return what is recognised of sampled requests: one in 20 is in another language, or has another template."""
        rng = self.rng
        language, template = (
            int(change.get("language", 2)),
            int(change.get("template", ord(tenant[0]))),
        )
        found: dict[str, list[int]] = {"language": [], "template": [], "embedding": []}
        for _ in range(count):
            found["language"].append(language if rng.random() > 0.05 else int(rng.integers(3, 9)))
            found["template"].append(template if rng.random() > 0.05 else int(rng.integers(1000)))
            embeddings = EMBEDDINGS["embedding" in change]
            found["embedding"] += embeddings[int(rng.integers(len(embeddings)))]
        return {name: dict(Counter(buckets)) for name, buckets in found.items()}

    def deviations(self) -> dict[tuple[str, str], StreamDeviation]:
        """Return what deviates, by event and tenant or replica."""
        return {
            (each.event, key.tenant or key.replica): each for key, each in self.monitor.deviations()
        }


@pytest.fixture(scope="module")
def week() -> Traffic:
    """Traffic of eight quiet days."""
    traffic = Traffic(seed=3)
    traffic.run(8 * 24, is_coarse=True)
    assert not traffic.deviations()
    return traffic


PLANTED = [
    ("slow_ttft", "", {"ttft": 2.5}, 2.0),
    ("errors", "", {"errors": 4.0}, 3.0),
    ("short_output", "", {"output": 0.4}, 2.0),
    ("high_cost", "acme", {"cost": 4.0}, 2.0),
    ("slow_ttft", "r-1", {"ttft": 2.0}, 1.0),
    ("errors", "r-1", {"errors": 8.0}, 2.0),
    ("new_language", "acme", {"language": 20.0}, 1.0),
    ("new_template", "beta", {"template": 77.0}, 1.0),
    ("malformed_calls", "", {"calls": 8.0}, 4.0),
    ("new_embedding", "", {"embedding": 1.0}, 2.0),
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
    traffic = _continue(week, seed=11)
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


@pytest.mark.exhaustive
def test_language_that_stays_becomes_usual(week: Traffic) -> None:
    traffic = _continue(week, seed=12)
    traffic.run(5 * 24, {"language": 20.0}, "acme", is_coarse=True)
    assert ("new_language", "acme") in traffic.deviations()
    traffic.run(2 * 24, {"language": 20.0}, "acme", is_coarse=True)
    assert not traffic.deviations()
    traffic.run(4, {"language": 9.0}, "acme")
    assert ("new_language", "acme") in traffic.deviations()


def test_changes_of_an_accepted_version_are_expected_and_later_ones_found(week: Traffic) -> None:
    accepted = {"output": 2.5, "refusals": 3.0}
    traffic = _continue(week, seed=13)
    traffic.run(2, accepted, "r-1", version="v2")
    assert not traffic.monitor.accept_version("m", "v3" * 32, traffic.at)
    assert traffic.monitor.accept_version("m", "v2" * 32, traffic.at)
    traffic.monitor = _copy(traffic.monitor)
    assert traffic.monitor.accept_version("m", "v2" * 32, traffic.at)
    (known,) = traffic.monitor.accepted
    assert known.ratios["long_output"] > 1.5
    assert "errors" not in known.ratios
    traffic.run(8, accepted)
    assert not traffic.deviations()
    traffic.run(3, accepted | {"refusals": 12.0, "errors": 4.0})
    assert {("refusals", ""), ("errors", "")} <= traffic.deviations().keys()

    other = _continue(week, seed=13)
    other.run(6, accepted)
    assert {("refusals", ""), ("long_output", "")} <= other.deviations().keys()


@pytest.mark.parametrize(
    ("hours_before", "change", "is_found"),
    [
        (3, {"requests": 10.0}, True),
        (3, {"requests": 3.0}, False),
        (0, {"requests": 10.0}, False),
        (0, {"requests": 10.0, "wait_s": 2.0}, True),
    ],
)
def test_tenant_with_ten_times_its_tokens_is_found_in_its_first_day(
    hours_before: float, change: Plant, is_found: bool
) -> None:
    traffic = Traffic(seed=14)
    traffic.run(hours_before)
    traffic.run(0.5, change, "acme")
    traffic.run(0.2, change, "acme")
    found = {key: each for key, each in traffic.deviations().items() if key[0] == "volume"}
    assert list(found) == ([("volume", "acme")] if is_found else [])
    for each in found.values():
        assert each.share > 0.7
        assert each.tokens_per_s > 5 * each.usual_tokens_per_s
        traffic.run(1)
        assert not traffic.deviations()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_weekly_job_of_a_tenant_is_no_surge_from_its_third_week(week: Traffic) -> None:
    traffic = _continue(week, seed=15)
    found = []
    for number in range(3):
        traffic.run(12, is_coarse=True)
        traffic.run(1, {"requests": 12.0}, "beta")
        found.append(("volume", "beta") in traffic.deviations())
        traffic.run(7 * 24 - 13, is_coarse=True)
        assert number == 0 or not traffic.deviations()
    assert found == [True, False, False]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_slow_drift_is_shown_and_raises_nothing(week: Traffic) -> None:
    traffic = _continue(week, seed=5)
    shown = []
    for day in range(30):
        traffic.run(24, {"output": 1.0 + 0.01 * day}, is_coarse=True)
        assert not traffic.deviations()
        first = traffic.monitor.statuses()[0]
        shown.append(first.event == "long_output" and first.low > first.expected)
    assert sum(shown) >= 10, shown


def _continue(week: Traffic, seed: int) -> Traffic:
    traffic = Traffic(seed)
    traffic.monitor, traffic.at = _copy(week.monitor), week.at
    return traffic


def _copy(monitor: TrafficMonitor) -> TrafficMonitor:
    """Return what the next controller continues with."""
    encoded = msgspec.json.encode(monitor.state)
    return TrafficMonitor(msgspec.json.decode(encoded, type=MonitorState))


HELD_OUT: list[tuple[str, str, Plant]] = [
    ("slow_ttft", "", {"ttft": 2.5}),
    ("slow_ttft", "r-1", {"ttft": 2.0}),
    ("errors", "", {"errors": 4.0}),
    ("refusals", "", {"refusals": 4.0}),
    ("short_output", "", {"output": 0.5}),
    ("long_output", "", {"output": 2.0}),
    ("long_prompt", "", {"prompt": 2.0}),
    ("new_language", "acme", {"language": 20.0}),
    ("new_template", "beta", {"template": 77.0}),
    ("high_cost", "acme", {"cost": 4.0}),
    ("cache_misses", "", {"misses": 5.0}),
    ("malformed_calls", "", {"calls": 8.0}),
    ("new_embedding", "", {"embedding": 1.0}),
]
MAX_DELAY_H = 12


def plant(
    week: Traffic, event: str, where: str, change: Plant, seed: int
) -> tuple[float, bool, bool]:
    """Return the hours until a change is found, whether its slice is first, and whether its cause is among three."""
    traffic = _continue(week, seed)
    traffic.noise = week.noise
    rng = np.random.default_rng(seed)
    traffic.run(2 + int(rng.integers(6)))
    planted_at = traffic.at
    earlier = set(traffic.deviations())
    for _ in range(MAX_DELAY_H * 6):
        traffic.run(1 / 6, change, where)
        found = [
            (key, each)
            for key, each in traffic.monitor.deviations()
            if each.event == event and (each.event, key.tenant or key.replica) not in earlier
        ]
        if found:
            break
    else:
        return math.inf, False, False
    key, deviation = min(
        found, key=lambda each: (each[0].tenant + each[0].replica != where, each[1].onset)
    )
    slices = traffic.monitor.slices("m", event, deviation.onset)
    parts = [each for each in slices if each.dimension in {"tenant", "replica"}]
    is_concentrated = bool(parts) and parts[0].excess_share - parts[0].request_share >= 0.3
    if where:
        has_slice = where in {key.tenant, key.replica} or (
            is_concentrated and parts[0].value == where
        )
    else:
        has_slice = not is_concentrated
    scope = {"model": "m", "pool": "m"}
    if key.tenant or key.replica:
        scope["tenant" if key.tenant else "replica"] = key.tenant or key.replica
    own_scope = (
        {"tenant": where}
        if where in {"acme", "beta"}
        else {"replica": where}
        if where
        else {"pool": "m"}
    )
    true = PastChange(
        at=planted_at - float(rng.uniform(0, 300)), kind="rollout_state", text="", scope=own_scope
    )
    decoys = [
        PastChange(
            at=planted_at + float(rng.uniform(-7200, 600)),
            kind=str(rng.choice(["replica_phase", "key.create", "price.create", "rollout_state"])),
            text="",
            scope=[
                {"pool": "other"},
                {"tenant": "gamma"},
                {"replica": "other-0"},
                {"pool": "m"},
                {},
            ][int(rng.integers(5))],
        )
        for _ in range(20)
    ]
    ranked = rank_changes([*decoys, true], deviation.onset, scope)
    return (
        (traffic.at - planted_at) / HOUR_S,
        has_slice,
        any(each.change is true for each in ranked[:3]),
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_held_out_changes_are_found_with_slice_and_cause() -> None:
    week = Traffic(seed=901, noise=0.15)
    week.run(8 * 24, is_coarse=True)
    results = {
        (event, where): [plant(week, event, where, change, seed) for seed in range(910, 918)]
        for event, where, change in HELD_OUT
    }
    found = [each for of_plant in results.values() for each in of_plant]
    for of_plant in results.values():
        assert sum(hours < math.inf for hours, *_ in of_plant) >= 7, results
    assert sum(has_slice for _, has_slice, _ in found) >= 0.9 * len(found), results
    assert sum(has_cause for *_, has_cause in found) >= 0.9 * len(found), results


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_raises_at_most_one_alarm_in_30_quiet_days_of_a_model_and_its_tenants() -> None:
    traffic = Traffic(seed=902, noise=0.15)
    traffic.run(8 * 24, is_coarse=True)
    alarms = set()
    for _ in range(30 * 4):
        traffic.run(6)
        alarms |= {(each.event, key, each.found_at) for key, each in traffic.monitor.deviations()}
    assert len(alarms) <= 1, alarms


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
