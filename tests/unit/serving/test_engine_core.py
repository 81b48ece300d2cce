"""Parts of the engine core and its client: delta streams, the view of the KV cache, hang detection, measured speed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine import EngineRequest
from argosy.engine.scheduling import StepDurations, StepPlan, StepResult
from argosy.engine.serving.core_messages import Delta, Heartbeat, KvChange
from argosy.engine.serving.engine_core.heartbeat_monitor import (
    LOAD_PROGRESS_TIMEOUT_S,
    MAX_LOAD_FRACTION,
    MAX_MISSED_HEARTBEATS,
    CoreRestartPolicy,
    HeartbeatMonitor,
)
from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream
from argosy.engine.serving.engine_core.kv_cache_view import KvCacheView, KvUpdateReader
from argosy.engine.serving.engine_core.step_stats import SpeedEstimator
from argosy.protocol import ResourceUsage, SamplingParams, pack_block_names

NAMES = st.sets(st.integers(0, 12), max_size=8)
EVENTS = st.one_of(
    st.tuples(st.just("change"), NAMES, NAMES),
    st.tuples(st.just("reset")),
    st.tuples(st.just("read"), st.integers(0, 2)),
)
STALL_S = 20.0
STARVED = ResourceUsage(cpus=0.2, host_cpus=2, host_free_cpus=0.0)
SPINNING = ResourceUsage(cpus=1.0, host_cpus=2, host_free_cpus=0.0)
REQUEST = EngineRequest(id="r", prompt=[1, 2], params=SamplingParams())


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.booleans()), min_size=1))
def test_every_delta_is_delivered_once_at_any_pace_and_fields_of_the_first_not_again(
    added: list[tuple[list[int], bool]],
) -> None:
    calls: list[None] = []
    delta_stream = DeltaStream(REQUEST, "r~1", 0.0, lambda _: pytest.fail("it ended by itself"))
    delta_stream.set_listener(lambda: calls.append(None))
    drained: list[Delta | None] = []
    for index, (tokens, drains) in enumerate(added):
        finish = "length" if index == len(added) - 1 else None
        first = {"cached_tokens": index, "queue_s": 0.5, "prompt_block_names": b"x"}
        delta_stream.add_delta(Delta(id="r~1", tokens=[*tokens], finish_reason=finish, **first))  # type: ignore[arg-type]
        if drains:
            drained.append(delta_stream.drain())
    drained.append(delta_stream.drain())
    assert len(calls) == len(added)
    delivered = [delta for delta in drained if delta is not None]
    all_tokens = [token for tokens, _ in added for token in tokens]
    assert [token for each in delivered for token in each.tokens] == all_tokens
    assert [each.finish_reason for each in delivered][-1] == "length"
    assert [each.cached_tokens for each in delivered] == [0] + [None] * (len(delivered) - 1)
    assert b"".join(each.prompt_block_names for each in delivered) == b"x"
    assert {each.id for each in delivered} == {"r"}
    delta_stream.close()


def test_late_listener_is_called_and_early_close_aborts_the_request_once() -> None:
    aborted: list[str] = []
    delta_stream = DeltaStream(REQUEST, "r~1", 0.0, lambda ended: aborted.append(ended.id))
    delta_stream.add_delta(Delta(id="r~1", tokens=[3]))
    calls: list[None] = []
    delta_stream.set_listener(lambda: calls.append(None))
    delta_stream.close()
    delta_stream.close()
    delta_stream.add_delta(Delta(id="r~1", tokens=[3]))
    assert (len(calls), aborted, delta_stream.drain()) == (1, ["r"], None)


async def read_update(reader: KvUpdateReader, known: set[int]) -> set[int]:
    """Return the blocks that the reader knows after one more update."""
    update = await reader.next_update(0.0)
    if update is None:
        return known
    assert update.stored.isdisjoint(update.removed)
    return ((set() if update.is_snapshot else known) | update.stored) - update.removed


@given(st.lists(EVENTS, max_size=60))
def test_updates_add_up_to_cached_blocks_at_any_pace(events: list[tuple[object, ...]]) -> None:
    async def play() -> None:
        view, expected = KvCacheView(), set[int]()
        with view.subscribe() as one, view.subscribe() as two, view.subscribe() as three:
            readers, known_by_reader = (one, two, three), [set[int]() for _ in range(3)]
            for event in events:
                match event:
                    case ("change", set() as stored, set() as removed):
                        change = KvChange(
                            pack_block_names(stored - removed), pack_block_names(removed)
                        )
                        view.apply_change(change)
                        expected = (expected | stored) - removed
                    case ("reset",):
                        view.reset()
                        expected = set()
                    case ("read", int() as number):
                        known_by_reader[number] = await read_update(
                            readers[number], known_by_reader[number]
                        )
            for reader, known in zip(readers, known_by_reader, strict=True):
                assert await read_update(reader, known) == view.block_names == expected
                assert await reader.next_update(0.0) is None

    asyncio.run(play())


async def test_reader_far_behind_gets_a_snapshot() -> None:
    view = KvCacheView()
    with view.subscribe() as reader:
        await reader.next_update(0.0)
        for number in range(1000):
            removed_names = pack_block_names([number - 1] if number else [])
            view.apply_change(KvChange(pack_block_names([number]), removed_names))
        update = await reader.next_update(0.0)
        assert update is not None
        assert update.is_snapshot
        assert update.stored == {999}
        assert not update.removed


async def test_waiting_reader_wakes_on_change_and_close() -> None:
    view = KvCacheView()
    with view.subscribe() as reader:
        await reader.next_update(0.0)
        waiting = asyncio.create_task(reader.next_update(30.0))
        await asyncio.sleep(0)
        view.apply_change(KvChange(pack_block_names([7]), b""))
        update = await waiting
        assert update is not None
        assert update.stored == {7}
        waiting = asyncio.create_task(reader.next_update(30.0))
        await asyncio.sleep(0)
        view.close()
        assert await waiting is None
        assert reader.is_closed


def serving_monitor(*, is_serving: bool = True) -> HeartbeatMonitor:
    monitor = HeartbeatMonitor(STALL_S, 1.0, started_at=0.0)
    if is_serving:
        monitor.record_ready(0.0)
    return monitor


@pytest.mark.parametrize(
    ("heartbeats", "failed_at", "reason"),
    [
        ([Heartbeat(t, True) for t in range(100)], None, ""),
        ([Heartbeat(7, False)] * 100, None, ""),
        ([Heartbeat(7, t >= 30) for t in range(100)], 29 + STALL_S, "without a step"),
        ([Heartbeat(t, True) for t in range(40)], 39 + MAX_MISSED_HEARTBEATS, "heartbeat"),
        ([Heartbeat(7, True, STARVED)] * 100, None, ""),
        ([Heartbeat(7, True, SPINNING)] * 100, 1 + STALL_S, "without a step"),
    ],
    ids=["busy", "idle", "stalled", "silent", "starved", "spinning"],
)
def test_core_is_hung_that_makes_no_step_or_is_silent(
    heartbeats: list[Heartbeat], failed_at: float | None, reason: str
) -> None:
    monitor = serving_monitor()
    for second in range(1, 100):
        if second < len(heartbeats):
            monitor.record_heartbeat(heartbeats[second], float(second))
        failure = monitor.check(float(second))
        if failure is not None:
            assert (second, reason in failure) == (failed_at, True)
            return
    assert failed_at is None


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(0, 20), st.integers(0, 4))
def test_core_above_its_memory_bound_sheds_before_it_is_recycled(
    memory: list[int], bound: int, load_s: int
) -> None:
    """Nothing happens below the bound, and recycling leaves most of the time for serving."""
    monitor = HeartbeatMonitor(STALL_S, 1.0, started_at=0.0)
    monitor.record_ready(0.0, float(load_s), bound)
    actions = [
        monitor.record_heartbeat(
            Heartbeat(second, True, ResourceUsage(memory_bytes=used)), float(second)
        )
        for second, used in enumerate(memory)
    ]
    streak = 0
    for second, (used, action) in enumerate(zip(memory, actions, strict=True)):
        streak = streak + 1 if 0 < bound < used else 0
        can_recycle = second >= load_s / MAX_LOAD_FRACTION
        expected = {1: "drop_caches", 3: "end_requests", 0: "recycle" if can_recycle else None}
        assert action == (expected.get(streak % 5) if streak else None)


def test_loading_core_is_healthy_while_it_reports_progress() -> None:
    monitor = serving_monitor(is_serving=False)
    last = int(LOAD_PROGRESS_TIMEOUT_S)
    assert not any(monitor.check(float(second)) for second in range(1, last))
    monitor.record_load_progress(float(last))
    for second in range(last, 2 * last):
        assert monitor.check(float(second)) is None
    assert monitor.check(2.0 * last) is not None


def test_silence_is_ignored_after_the_monitor_itself_was_suspended() -> None:
    monitor = serving_monitor()
    monitor.record_heartbeat(Heartbeat(1, True), 1.0)
    assert monitor.check(1.0) is None
    assert monitor.check(1000.0) is None
    monitor.record_heartbeat(Heartbeat(1, True), 1001.0)
    assert monitor.check(1001.0) is None


def test_restarts_back_off_and_end() -> None:
    policy = CoreRestartPolicy(max_restarts=4, backoff_s=1.0, max_backoff_s=3.0)
    assert [policy.next_backoff_s(n) for n in range(6)] == [1.0, 2.0, 3.0, 3.0, None, None]


def step(*counts: int) -> StepPlan:
    return StepPlan(1, counts=list(counts))


def test_prefill_and_decode_speeds_are_estimated_separately() -> None:
    """A decode with drafts that gives two tokens may take twice as long."""
    speed = SpeedEstimator()
    assert speed.prefill_tokens_per_s == speed.inter_token_s(1) == 0.0

    def record(plan: StepPlan, *, new_tokens: int = 1, **durations: float) -> None:
        windows = dict.fromkeys(plan.draft_tokens, [7] * new_tokens)
        speed.record_step(plan, StepResult([], windows, durations=StepDurations(**durations)))

    for running in (1, 4, 16, 4, 1) * 20:
        record(step(*[1] * running), compute_s=0.01 + 0.001 * running)
        record(step(*[1] * running, 500), launch_s=0.05, compute_s=0.15, sample_s=0.05)
        record(step(*[1] * running, 10), compute_s=9.0)
        drafted = step(*[5] * running)
        drafted.draft_tokens.update(dict.fromkeys(range(running), [7] * 4))
        record(drafted, new_tokens=2, compute_s=2 * (0.01 + 0.001 * running))
    assert speed.prefill_tokens_per_s == pytest.approx(2000)
    assert speed.inter_token_s(1) == pytest.approx(0.011)
    assert speed.inter_token_s(17) == pytest.approx(0.027)
