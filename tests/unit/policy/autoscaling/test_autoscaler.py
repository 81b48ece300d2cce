"""Properties of the autoscaler: bounds, missing metrics, slow starts, restarts of the controller, owners."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, time
from itertools import pairwise

import msgspec
import pytest
from benchmarks.autoscaling import BASELINES, OURS, compare, find_worse
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy.autoscaling import (
    ArrivedTokens,
    Autoscaler,
    AutoscalerSettings,
    AutoscalerState,
    CapacityEstimator,
    CapacityState,
    ManualScale,
    PoolObservation,
    ReplicaReport,
    ScalingAction,
    ScalingDecision,
    ScalingOwner,
    ScheduleWindow,
)

CAPACITY = 100.0
"""Tokens per second of a replica."""
TICK_S = 5.0


class SimulatedPool:
    """Replicas that start after `startup_s`, and an autoscaler that decides each 5 s what the pool becomes.

    Args:
        settings: Settings of the autoscaler.
        replicas: Replicas that are ready at the beginning.
        startup_s: Time until a started replica is ready; infinite if none ever becomes ready.
    """

    def __init__(
        self, settings: AutoscalerSettings, replicas: int = 1, startup_s: float = 60.0
    ) -> None:
        self.autoscaler = Autoscaler(settings)
        self.now = 1_000_000.0
        self.ready = replicas
        self.desired = replicas
        self.decisions: list[ScalingDecision] = []
        self._startup_s = startup_s
        self._ready_at: list[float] = []
        self._backlog = 0.0
        self._waiting_since = self.now

    def observe(self, tokens_per_s: float, **fields: object) -> PoolObservation:
        """Return the observation of a tick with these arrivals, except for the given fields."""
        observation = PoolObservation(
            at=self.now,
            desired_replicas=self.desired,
            ready_replicas=self.ready,
            arrivals=(ArrivedTokens(tokens_per_s, 1.0),) * int(TICK_S),
            queued_requests=int(self._backlog > 0.0),
            queued_tokens=self._backlog,
            queue_age_s=self.now - self._waiting_since if self._backlog else 0.0,
            running_requests=int(tokens_per_s > 0.0),
            capacity_tokens_per_s=CAPACITY,
            startup_s=min(self._startup_s, 600.0),
            metrics_age_s=1.0,
        )
        return msgspec.structs.replace(observation, **fields)

    def run(
        self, seconds: float, load: float | Callable[[float], float], **fields: object
    ) -> list[int]:
        """Serve a load in tokens per second for a while, and return the number of replicas after each decision.

        Args:
            seconds: Length of the run.
            load: Tokens per second, or a function of the seconds since the beginning of this run.
            fields: Fields of the observations that differ.
        """
        begin = self.now
        counts = []
        while self.now < begin + seconds:
            self.now += TICK_S
            self.ready += sum(at <= self.now for at in self._ready_at)
            self._ready_at = [at for at in self._ready_at if at > self.now]
            tokens_per_s = load(self.now - begin) if callable(load) else load
            self._serve(tokens_per_s)
            decision = self.autoscaler.decide(self.observe(tokens_per_s, **fields))
            self._apply(decision.target)
            self.decisions.append(decision)
            counts.append(decision.target)
        return counts

    def restart_controller(self, *, keeps_state: bool = True) -> None:
        """Replace the autoscaler by one that continues with its stored state, or with none."""
        encoded = msgspec.json.encode(self.autoscaler.state)
        state = msgspec.json.decode(encoded, type=AutoscalerState) if keeps_state else None
        self.autoscaler = Autoscaler(self.autoscaler.settings, state)

    def _serve(self, tokens_per_s: float) -> None:
        had_backlog = self._backlog > 0.0
        arrived = tokens_per_s * TICK_S
        self._backlog = max(0.0, self._backlog + arrived - self.ready * CAPACITY * TICK_S)
        if self._backlog <= arrived:  # what waited before is served
            self._waiting_since = self.now - TICK_S if had_backlog else self.now

    def _apply(self, target: int) -> None:
        for _ in range(target - self.desired):
            self._ready_at.append(self.now + self._startup_s)
        for _ in range(self.desired - target):
            if self._ready_at:
                self._ready_at.pop()
            else:
                self.ready -= 1
        self.desired = target


SETTINGS = AutoscalerSettings(min_replicas=1, max_replicas=20)
IDLE_SETTINGS = AutoscalerSettings(min_replicas=0, max_replicas=20, spares=1)

LARGE = AutoscalerSettings(min_replicas=1, max_replicas=40)
LARGE_FROM_ZERO = AutoscalerSettings(min_replicas=0, max_replicas=40)

amounts = st.floats(0.0, 1e6) | st.sampled_from([math.nan, math.inf, -1.0])
counts = st.integers(0, 30)


@st.composite
def observations(draw: st.DrawFn) -> list[PoolObservation]:
    """Draw successive observations of any kind, also impossible and stale ones."""
    result = []
    at = 1e6
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0.0, 0.1, 5.0, 5.0, 60.0, 900.0]))
        result.append(
            PoolObservation(
                at=at,
                desired_replicas=draw(counts),
                ready_replicas=draw(counts),
                failing_replicas=draw(counts),
                sleeping_replicas=draw(counts),
                arrivals=(ArrivedTokens(draw(amounts), draw(amounts)),),
                queued_requests=draw(counts),
                queued_tokens=draw(amounts),
                queue_age_s=draw(amounts),
                running_requests=draw(counts),
                kv_used_replicas=draw(amounts),
                capacity_tokens_per_s=draw(st.none() | amounts),
                startup_s=draw(amounts),
                metrics_age_s=draw(st.none() | st.sampled_from([1.0, 100.0, math.nan])),
                rollout_in_progress=draw(st.booleans()),
            )
        )
    return result


@given(observations(), st.sampled_from([SETTINGS, IDLE_SETTINGS]))
def test_any_observation_gives_a_count_within_the_limits(
    steps: list[PoolObservation], pool_settings: AutoscalerSettings
) -> None:
    autoscaler = Autoscaler(pool_settings)
    previous_at = 0.0
    for step in steps:
        decision = autoscaler.decide(step)
        if step.at == previous_at:
            continue
        previous_at = step.at
        desired = step.desired_replicas
        assert pool_settings.min_replicas <= decision.target <= pool_settings.max_replicas
        assert decision.target <= max(2 * desired, desired + 2)
        assert decision.spares == (pool_settings.spares if decision.target else 0)
        assert decision.reason.endswith(".")
        if step.find_defect(pool_settings.stale_after_s) and desired:
            assert decision.target == min(max(desired, pool_settings.min_replicas), 20)
        if decision.target < desired <= pool_settings.max_replicas and decision.target:
            assert decision.target >= decision.arithmetic.needed


@given(observations(), st.data())
def test_a_restarted_controller_decides_as_if_it_had_run_on(
    steps: list[PoolObservation], data: st.DataObject
) -> None:
    undisturbed, restarted = Autoscaler(IDLE_SETTINGS), Autoscaler(IDLE_SETTINGS)
    for step in steps:
        expected = undisturbed.decide(step)
        assert undisturbed.decide(step) == expected, "the same tick counts once"
        assert restarted.decide(step) == expected
        if data.draw(st.booleans()):
            stored = msgspec.json.encode(restarted.state)
            state = msgspec.json.decode(stored, type=AutoscalerState)
            restarted = Autoscaler(IDLE_SETTINGS, state)
    assert msgspec.json.encode(undisturbed.state) == msgspec.json.encode(restarted.state)


@settings(max_examples=15)
@given(
    st.floats(10.0, 1200.0),
    st.floats(10.0, 1200.0),
    st.sampled_from([30.0, 120.0, 600.0, math.inf]),
)
def test_slow_starts_do_not_multiply_replicas(
    before: float, after: float, startup_s: float
) -> None:
    """Without a backlog that grows, the count never exceeds what the larger load needs."""
    pool = SimulatedPool(SETTINGS, replicas=math.ceil(before / CAPACITY) + 1, startup_s=startup_s)
    # Nothing is queued, as if what does not fit was rejected.
    quiet = {"queued_requests": 0, "queued_tokens": 0.0, "queue_age_s": 0.0}
    counts = pool.run(300, before, **quiet) + pool.run(1200, after, **quiet)
    needed = math.ceil(1.15 * max(before, after) / CAPACITY - 1e-9)
    assert max(counts) <= max(needed, math.ceil(before / CAPACITY) + 1)


@pytest.mark.parametrize(("startup_s", "growth"), [(30.0, 0.2), (600.0, 0.05)])
def test_monotone_demand_causes_no_reversal(startup_s: float, growth: float) -> None:
    pool = SimulatedPool(SETTINGS, replicas=3, startup_s=startup_s)
    peak = 165.0 + 5400.0 * growth
    rising = pool.run(5400, lambda second: 165.0 + second * growth) + pool.run(2400, peak)
    falling = pool.run(9000, lambda second: max(165.0, peak - second * growth))
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == 3
    assert pool.decisions[-1].reason == (
        "Hold 3: (1.15 x 165.0 tokens/s (mean of 120 s)) / 100.0 tokens/s = 1.90 replicas; "
        f"2 would not hold the peak of {max(600.0, 2.0 * startup_s):.0f} s."
    )


def test_burst_of_seconds_is_met_before_the_mean_of_two_minutes_shows_it() -> None:
    pool = SimulatedPool(SETTINGS, replicas=4)
    pool.run(600, lambda second: 250.0 + 10.0 * (second % 10.0))
    assert pool.desired == 4
    assert pool.run(5, 800.0)[0] > 4
    assert pool.decisions[-1].arithmetic.demand_basis == "mean of 6 s"


def test_full_kv_caches_need_replicas_although_few_tokens_arrive() -> None:
    pool = SimulatedPool(SETTINGS, replicas=4)
    assert pool.run(10, 100.0, kv_used_replicas=3.9)[-1] == 5
    assert pool.decisions[-1].reason == (
        "Hold 5: the KV caches in use need 4.88 replicas; none can be removed."
    )
    assert min(pool.run(2000, 100.0, kv_used_replicas=3.3)) == 5


@pytest.mark.parametrize("capacity", [None, 10 * CAPACITY], ids=["unknown", "overestimated"])
def test_old_queue_adds_one_replica_at_a_time_if_the_capacity_misleads(
    capacity: float | None,
) -> None:
    pool = SimulatedPool(SETTINGS, replicas=2)
    counts = pool.run(400, 250.0, capacity_tokens_per_s=capacity)
    assert 3 <= counts[-1] <= 5
    assert all(after - before in {0, 1} for before, after in pairwise(counts))
    up = next(each for each in pool.decisions if each.action is ScalingAction.SCALE_UP)
    assert "a request has waited for" in up.reason


def test_idle_pool_is_scaled_to_zero_and_woken_by_the_queue() -> None:
    pool = SimulatedPool(IDLE_SETTINGS, replicas=3)
    pool.run(900, 100.0)
    assert pool.run(595, 0.0)[-1] >= 1
    assert pool.run(10, 0.0)[-1] == 0
    assert pool.decisions[-1].spares == 0
    assert set(pool.run(3600, 0.0)) == {0}
    assert pool.run(5, 0.0, queued_requests=1, metrics_age_s=None) == [1]
    assert pool.decisions[-1].spares == 1
    assert set(pool.run(120, 0.0, queued_requests=1)) == {1}


def test_replicas_that_sleep_are_supply_but_not_ready() -> None:
    """They wake up before others start, do not keep an idle pool from zero, and further need starts replicas."""
    pool = SimulatedPool(IDLE_SETTINGS, replicas=3)
    asleep = {"ready_replicas": 1, "sleeping_replicas": 2, "wake_s": 0.4}
    assert set(pool.run(300, 150.0, **asleep)) == {3}
    decision = pool.decisions[-1]
    assert decision.arithmetic.starting_replicas == 0
    assert "1 of 2 that sleep wake up in 0.4 s, where a start takes 60 s" in decision.reason
    pool.run(5, 150.0, **asleep | {"wake_s": 0.0})
    assert "1 of 2 that sleep wake up first, and a start takes 60 s" in pool.decisions[-1].reason
    assert pool.run(300, 400.0, **asleep)[-1] > 3
    pool = SimulatedPool(IDLE_SETTINGS, replicas=2)
    assert pool.run(700, 0.0, ready_replicas=0, sleeping_replicas=2)[-1] == 0


def test_start_for_a_client_that_could_not_wait_is_completed() -> None:
    idle = msgspec.structs.replace(IDLE_SETTINGS, idle_s=60.0)
    pool = SimulatedPool(idle, replicas=0, startup_s=300.0)
    assert set(pool.run(60, 0.0)) == {0}
    refused = (ArrivedTokens(20.0, 1.0),)
    assert pool.run(5, 0.0, arrivals=refused, capacity_tokens_per_s=None) == [1]
    assert set(pool.run(340, 0.0)) == {1}, "it starts, and is then kept for as long as any other"
    assert pool.run(30, 0.0)[-1] == 0
    pool = SimulatedPool(idle, replicas=1)
    pool.run(600, 100.0)
    counts = pool.run(600, 0.0)
    assert counts == sorted(counts, reverse=True), "the mean demand of two minutes starts nothing"
    assert counts[-1] == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"running_requests": 1}, "none can be removed"),
        ({"rollout_in_progress": True}, "a rollout is in progress"),
    ],
    ids=["long-stream", "rollout"],
)
def test_pool_is_not_scaled_to_zero_while_it_is_in_use(
    fields: dict[str, object], reason: str
) -> None:
    pool = SimulatedPool(IDLE_SETTINGS)
    assert set(pool.run(1800, 0.0, **fields)) == {1}
    assert reason in pool.decisions[-1].reason


def test_operator_pauses_the_autoscaler() -> None:
    pool = SimulatedPool(SETTINGS, replicas=4)
    manual = ManualScale(replicas=7, set_by="alice")
    assert set(pool.run(900, 1000.0, manual_scale=manual)) == {7}
    paused = pool.decisions[-1]
    assert paused.owner is ScalingOwner.OPERATOR
    assert paused.recommended > 7
    assert paused.reason.startswith("Paused, because alice scaled to 7 by hand")
    assert pool.run(5, 1000.0)[-1] > 7


def test_advisory_autoscaler_only_recommends() -> None:
    pool = SimulatedPool(msgspec.structs.replace(SETTINGS, is_advisory=True), replicas=2)
    assert set(pool.run(300, 500.0)) == {2}
    assert pool.decisions[-1].owner is ScalingOwner.DECLARATION
    assert pool.decisions[-1].recommended == 4


def test_rollout_divides_the_sum_that_the_autoscaler_decides() -> None:
    pool = SimulatedPool(SETTINGS, replicas=2)
    assert pool.run(5, 300.0, rollout_in_progress=True) == [4]
    assert pool.decisions[-1].reason.endswith(
        "The rollout divides this number between its versions."
    )


def test_failing_replicas_are_replaced_but_do_not_fill_the_pool() -> None:
    pool = SimulatedPool(SETTINGS, replicas=12)
    assert set(pool.run(60, 900.0, failing_replicas=2, ready_replicas=10)) == {13}
    broken = SimulatedPool(SETTINGS, replicas=4)
    counts = broken.run(600, 300.0, ready_replicas=0, failing_replicas=4)
    assert max(counts) <= 6


def test_trend_is_used_only_where_it_is_better_than_the_last_value() -> None:
    with_trend = msgspec.structs.replace(SETTINGS, uses_trend=True)
    ramp, constant = (SimulatedPool(with_trend, replicas=4, startup_s=300.0) for _ in range(2))
    ramp.run(5400, lambda second: 300.0 + second / 5.0)
    constant.run(5400, lambda second: 300.0 + 50.0 * (second % 60.0 < 30.0))
    assert ramp.decisions[-1].arithmetic.demand_basis == "forecast"
    assert ramp.decisions[-1].arithmetic.trend_error == pytest.approx(0.0, abs=0.05)
    assert constant.decisions[-1].arithmetic.demand_basis != "forecast"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_replicas": 30}, "at most max_replicas"),
        ({"min_replicas": 0, "max_replicas": 0}, "max_replicas must be at least 1"),
        ({"kv_limit": 0.0}, "kv_limit must be above 0"),
        ({"drain_s": 0.0}, "drain_s must be above 0"),
        ({"spares": -1}, "spares must be 0 or more"),
        ({"spare_fraction": -0.1}, "spare_fraction must be 0 or more"),
        (
            {"schedule": [{"min_replicas": 21, "start": "08:00:00", "end": "18:00:00"}]},
            "raise max_replicas",
        ),
    ],
)
def test_contradictory_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"max_replicas": 20, **changes}, AutoscalerSettings)


def test_schedule_raises_the_minimum_early_enough_for_the_start() -> None:
    window = msgspec.convert(
        {"min_replicas": 6, "start": "08:00:00", "end": "18:00:00"}, ScheduleWindow
    )
    scheduled = msgspec.structs.replace(SETTINGS, schedule=(window,))
    pool = SimulatedPool(scheduled, replicas=2, startup_s=600.0)
    day = 1_036_800.0  # midnight
    pool.now = day + 7 * 3600 + 2900.0
    assert set(pool.run(90, 50.0)) == {2}
    assert pool.run(15, 50.0)[-1] == 6
    assert "the minimum is 6 now" in next(
        d.reason for d in reversed(pool.decisions) if d.target > d.arithmetic.desired_replicas
    )
    assert set(pool.run(3600, 50.0, metrics_age_s=None)) == {6}


def test_autoscaler_is_nowhere_worse_than_the_others() -> None:
    rows = list(compare(3600, (120,), seed=1, shapes=("flash crowd", "square wave")))
    ours = [row for row in rows if row.scaler == OURS]
    assert not any(theirs.scaler in BASELINES for _, theirs in find_worse(rows))
    assert not any(row.below_minimum or row.unfounded_reversals for row in ours)
    for baseline in BASELINES:
        theirs = [row for row in rows if row.scaler == baseline]
        assert sum(row.replica_hours for row in ours) < sum(row.replica_hours for row in theirs)


# --- complaints about other autoscalers (docs/explanation/autoscaling.md) -------------------------


def count_changes(counts: list[int]) -> int:
    return sum(before != after for before, after in pairwise(counts))


def test_replicas_of_a_burst_are_kept_for_a_while() -> None:
    """Replicas are started for a burst and dropped as soon as it ends."""
    pool = SimulatedPool(LARGE, replicas=4)
    pool.run(600, 200.0)
    top = max(pool.run(120, 1500.0))
    assert min(pool.run(250, 200.0)) == top


@pytest.mark.parametrize(
    ("replicas", "low", "high", "period_s"), [(1, 60.0, 65.0, 20.0), (4, 200.0, 800.0, 120.0)]
)
def test_constant_or_alternating_demand_changes_nothing(
    replicas: int, low: float, high: float, period_s: float
) -> None:
    """A constant rate flaps for ever, and the count alternates each 60 s, as the demand does."""
    pool = SimulatedPool(LARGE, replicas)
    counts = pool.run(4500, lambda second: low if second % period_s < period_s / 2 else high)
    assert count_changes(counts[180:]) == 0


def test_restarted_controller_keeps_the_count() -> None:
    """A restart of the controller gives 7, 1, 2, 6, 7 replicas."""
    for keeps_state in (True, False):
        pool = SimulatedPool(LARGE, replicas=7)
        before = pool.run(700, 500.0)[-1]
        pool.restart_controller(keeps_state=keeps_state)
        assert set(pool.run(300, 500.0)) == {before}


def test_nothing_is_removed_while_requests_wait() -> None:
    """The queue divided by many replicas looks small, so that they are removed although requests wait."""
    pool = SimulatedPool(LARGE, replicas=20)
    pool.run(900, 1700.0)
    waiting = {"queued_requests": 3, "queued_tokens": 20.0, "queue_age_s": 2.0}
    assert min(pool.run(1200, 300.0, **waiting)) == 20


def test_queue_does_not_multiply_replicas() -> None:
    """Each interval multiplies the replicas by the queue: 1 to 22,745 for 100 requests per second."""
    pool = SimulatedPool(LARGE, replicas=1, startup_s=60.0)
    counts = pool.run(1200, 300.0)
    assert max(counts) <= 10


def test_cache_in_use_changes_the_count_once() -> None:
    """Series of deleted replicas remain, and count 2, 1, 2, 1 for ever."""
    pool = SimulatedPool(LARGE, replicas=2)
    assert count_changes(pool.run(1200, 40.0, kv_used_replicas=0.3)) == 1


def test_missing_metrics_hold_the_count() -> None:
    """An empty answer of the metrics system counts as 0: at peak load all go to the minimum."""
    for defect in (
        {"metrics_age_s": None},
        {"metrics_age_s": 300.0},
        {"arrivals": (ArrivedTokens(math.nan, 5.0),)},
        {"capacity_tokens_per_s": None, "queued_requests": 0, "queue_age_s": 0.0},
    ):
        pool = SimulatedPool(LARGE, replicas=12)
        pool.run(900, 1000.0)
        assert set(pool.run(3600, 0.0 if "arrivals" in defect else 1000.0, **defect)) == {12}


def test_metrics_that_begin_again_are_no_idle_pool() -> None:
    """Counters begin at 0 after a restart of the metrics system, which is no idle pool."""
    pool = SimulatedPool(LARGE_FROM_ZERO, replicas=12)
    pool.run(900, 1000.0)
    assert set(pool.run(300, 0.0, metrics_age_s=None)) == {12}
    assert set(pool.run(590, 0.0)) == {12}, "the demand has to be known for the whole window"


def test_count_falls_soon_after_a_peak() -> None:
    """The count remains high for half an hour after a peak, or without any demand."""
    pool = SimulatedPool(LARGE, replicas=12)
    pool.run(900, 1000.0)
    assert pool.run(1500, 100.0)[-1] <= 3
    assert pool.run(1200, 0.0)[-1] == 1


def test_work_of_prompts_adds_replicas() -> None:
    """Prefill replicas are never added, because running requests do not show the work of prompts."""
    pool = SimulatedPool(LARGE, replicas=2)
    assert pool.run(120, 500.0, running_requests=1)[-1] >= 6


# --- schedules ----------------------------------------------------------------------------------

OFFICE = ScheduleWindow(
    min_replicas=5,
    start=time(8),
    end=time(18),
    days=("mon", "fri"),
    timezone="Europe/Berlin",
)
NIGHT = ScheduleWindow(min_replicas=2, start=time(22), end=time(6), days=("sun",))
ALWAYS = ScheduleWindow(min_replicas=1, start=time(0), end=time(0))


@pytest.mark.parametrize(
    ("window", "at", "lead_s", "expected"),
    [
        (OFFICE, "2026-11-27T07:00", 0, True),  # Friday, 8:00 in Berlin
        (OFFICE, "2026-11-27T06:59", 0, False),
        (OFFICE, "2026-11-27T06:59", 120, True),
        (OFFICE, "2026-11-27T16:59", 0, True),
        (OFFICE, "2026-11-27T17:00", 120, False),
        (OFFICE, "2026-11-26T12:00", 0, False),
        (OFFICE, "2026-07-03T06:00", 0, True),  # summer time
        (OFFICE, "2026-07-03T05:59", 0, False),
        (NIGHT, "2026-11-29T22:00", 0, True),
        (NIGHT, "2026-11-30T05:59", 0, True),
        (NIGHT, "2026-11-30T06:00", 0, False),
        (NIGHT, "2026-11-30T22:00", 0, False),
        (NIGHT, "2026-11-28T23:00", 86400, True),
        (ALWAYS, "2026-11-30T12:00", 0, True),
    ],
)
def test_window_is_open(window: ScheduleWindow, at: str, lead_s: float, *, expected: bool) -> None:
    now = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    assert window.is_open(now, lead_s) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timezone": "Europe/Atlantis"}, "Unknown time zone Europe/Atlantis"),
        ({"timezone": "../etc/passwd"}, "Unknown time zone"),
        ({"min_replicas": -1}, "0 or more"),
        ({"days": []}, "without days"),
        ({"start": "08:00:00Z"}, "local times"),
    ],
)
def test_invalid_window_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {"min_replicas": 1, "start": "08:00:00", "end": "18:00:00", **changes}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(fields, ScheduleWindow)


# --- capacity -------------------------------------------------------------------------------------


MAX_RUNNING = 64.0


def report(
    running: float, base_s: float, share_s: float, mix: float, ttft_s: float = 0.0
) -> ReplicaReport:
    """Return the report of a replica that decodes a step in `base_s + running * share_s`."""
    inter_token_s = base_s + running * share_s
    return ReplicaReport(
        tokens_per_s=mix * running / inter_token_s,
        running=running,
        max_running=MAX_RUNNING,
        inter_token_s=inter_token_s,
        ttft_s=ttft_s,
    )


@given(
    st.floats(0.005, 0.02),
    st.floats(1e-4, 2e-3),
    st.floats(2.0, 20.0),
    st.lists(st.floats(1.0, 20.0), min_size=6, max_size=30).filter(
        lambda loads: max(loads) - min(loads) > 1.0
    ),
)
def test_capacity_at_the_objective_is_known_from_lower_loads(
    base_s: float, share_s: float, mix: float, loads: list[float]
) -> None:
    estimator = CapacityEstimator(ttft_s=1.0, itl_s=0.04)
    for running in loads:
        estimator.add([report(running, base_s, share_s, mix)] * 3)
    running = min(MAX_RUNNING, (0.04 - base_s) / share_s)
    expected = mix * running / (base_s + running * share_s)
    assert estimator.tokens_per_s == pytest.approx(expected, rel=0.01)


def test_without_an_itl_objective_the_concurrency_is_the_limit() -> None:
    estimator = CapacityEstimator(ttft_s=None, itl_s=None)
    assert estimator.tokens_per_s is None
    for running in (4, 5, 6, 7, 8, 9):
        estimator.add([report(running, 0.01, 0.001, 3.0)])
    assert estimator.tokens_per_s == pytest.approx(3.0 * 64 / 0.074)
    estimator.add([report(0, 0.01, 0.001, 3.0)])
    assert estimator.tokens_per_s == pytest.approx(3.0 * 64 / 0.074)


def test_constant_load_beyond_the_objective_is_scaled_down_to_it() -> None:
    estimator = CapacityEstimator(ttft_s=None, itl_s=0.02)
    for _ in range(6):
        estimator.add([report(20, 0.02, 0.001, 1.0)])
    assert estimator.tokens_per_s == pytest.approx(20 / 0.04)


def test_missed_ttft_bounds_the_capacity_until_it_is_met_again() -> None:
    estimator = CapacityEstimator(ttft_s=1.0, itl_s=None)
    free = report(10, 0.01, 0.001, 2.0)
    for running in (8, 9, 10, 11, 12, 13):
        estimator.add([report(running, 0.01, 0.001, 2.0)])
    unbounded = estimator.tokens_per_s
    assert unbounded is not None
    late = msgspec.structs.replace(free, ttft_s=3.0)
    estimator.add([free] * 99 + [late])
    assert estimator.tokens_per_s == pytest.approx(unbounded), "one slow replica proves nothing"
    for _ in range(20):
        estimator.add([late])
    assert estimator.tokens_per_s == pytest.approx(free.tokens_per_s, rel=0.01)
    for _ in range(100):
        estimator.add([free])
    assert 1.05 * free.tokens_per_s < (estimator.tokens_per_s or 0.0) < 1.2 * free.tokens_per_s


def test_state_resumes() -> None:
    estimator = CapacityEstimator(ttft_s=1.0, itl_s=0.04)
    for running in (4, 5, 6, 7, 8, 9):
        estimator.add([report(running, 0.01, 0.001, 3.0, ttft_s=running / 8.0)])
    stored = msgspec.json.encode(estimator.state)
    resumed = CapacityEstimator(1.0, 0.04, msgspec.json.decode(stored, type=CapacityState))
    assert resumed.tokens_per_s == estimator.tokens_per_s
    resumed.add([report(12, 0.01, 0.001, 3.0)])
    estimator.add([report(12, 0.01, 0.001, 3.0)])
    assert resumed.state == estimator.state
