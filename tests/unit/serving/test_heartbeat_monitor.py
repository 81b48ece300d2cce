"""Heartbeat monitor: a hanging core is distinguished from a loading, busy or idle one, and restarts are bounded."""

from argosy.engine.serving.core_messages import Heartbeat
from argosy.engine.serving.engine_core.heartbeat_monitor import (
    LOAD_PROGRESS_TIMEOUT_S,
    MAX_MISSED_HEARTBEATS,
    CoreRestartPolicy,
    HeartbeatMonitor,
)

STALL_S = 20.0


def serving_monitor(*, is_serving: bool = True) -> HeartbeatMonitor:
    monitor = HeartbeatMonitor(STALL_S, 1.0, started_at=0.0)
    if is_serving:
        monitor.record_ready(0.0)
    return monitor


def first_failure(
    monitor: HeartbeatMonitor, heartbeats: dict[int, Heartbeat], until: int = 100
) -> tuple[int, str] | None:
    """Check each second, after its heartbeat. Return time and message of the first failure."""
    for second in range(1, until):
        if second in heartbeats:
            monitor.record_heartbeat(heartbeats[second], float(second))
        failure = monitor.check(float(second))
        if failure is not None:
            return second, failure
    return None


def test_busy_core_with_steps_is_healthy() -> None:
    assert first_failure(serving_monitor(), {t: Heartbeat(t, True) for t in range(100)}) is None


def test_idle_core_is_healthy() -> None:
    assert first_failure(serving_monitor(), {t: Heartbeat(7, False) for t in range(100)}) is None


def test_busy_core_without_steps_is_hung_after_the_stall_timeout() -> None:
    heartbeats = {t: Heartbeat(7, t >= 30) for t in range(100)}
    failure = first_failure(serving_monitor(), heartbeats)
    assert failure is not None
    assert failure[0] == 29 + STALL_S
    assert "without a step" in failure[1]


def test_silent_core_is_hung() -> None:
    failure = first_failure(serving_monitor(), {t: Heartbeat(t, True) for t in range(40)})
    assert failure is not None
    assert failure[0] == 39 + MAX_MISSED_HEARTBEATS
    assert "heartbeat" in failure[1]


def test_loading_core_is_healthy_while_it_reports_progress() -> None:
    monitor = serving_monitor(is_serving=False)
    last = int(LOAD_PROGRESS_TIMEOUT_S)
    assert first_failure(monitor, {}, until=last) is None
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
