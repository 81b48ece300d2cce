"""A core that hangs is told from one that loads, thinks or idles; restarts back off and end."""

from argosy.engine.serving.core_messages import Heartbeat
from argosy.engine.serving.engine_core.heartbeat_monitor import (
    LOAD_PROGRESS_TIMEOUT_S,
    MAX_MISSED_HEARTBEATS,
    CoreRestartPolicy,
    HeartbeatMonitor,
)

STALL_S = 20.0


def vigil(*, serving: bool = True) -> HeartbeatMonitor:
    watch = HeartbeatMonitor(STALL_S, 1.0, started_at=0.0)
    if serving:
        watch.record_ready(0.0)
    return watch


def first_verdict(
    watch: HeartbeatMonitor, beats: dict[int, Heartbeat], until: int = 100
) -> tuple[int, str] | None:
    """Ask each second, after that second's beat; the time and the words of the first verdict."""
    for second in range(1, until):
        if second in beats:
            watch.record_heartbeat(beats[second], float(second))
        words = watch.check(float(second))
        if words is not None:
            return second, words
    return None


def test_busy_core_that_steps_is_well() -> None:
    assert first_verdict(vigil(), {t: Heartbeat(t, True) for t in range(100)}) is None


def test_idle_core_is_well() -> None:
    assert first_verdict(vigil(), {t: Heartbeat(7, False) for t in range(100)}) is None


def test_busy_core_that_makes_no_step_is_hung_after_the_limit() -> None:
    beats = {t: Heartbeat(7, t >= 30) for t in range(100)}
    found = first_verdict(vigil(), beats)
    assert found is not None
    assert found[0] == 29 + STALL_S
    assert "without a step" in found[1]


def test_silent_core_is_hung() -> None:
    found = first_verdict(vigil(), {t: Heartbeat(t, True) for t in range(40)})
    assert found is not None
    assert found[0] == 39 + MAX_MISSED_HEARTBEATS
    assert "heartbeat" in found[1]


def test_a_core_that_loads_may_take_its_time_while_it_progresses() -> None:
    watch = vigil(serving=False)
    last = int(LOAD_PROGRESS_TIMEOUT_S)
    assert first_verdict(watch, {}, until=last) is None
    watch.record_load_progress(float(last))
    for second in range(last, 2 * last):
        assert watch.check(float(second)) is None
    assert watch.check(2.0 * last) is not None


def test_a_watcher_that_was_itself_stopped_judges_nobody() -> None:
    watch = vigil()
    watch.record_heartbeat(Heartbeat(1, True), 1.0)
    assert watch.check(1.0) is None
    assert watch.check(1000.0) is None
    watch.record_heartbeat(Heartbeat(1, True), 1001.0)
    assert watch.check(1001.0) is None


def test_restarts_back_off_to_a_bound_and_end() -> None:
    policy = CoreRestartPolicy(max_restarts=4, backoff_s=1.0, max_backoff_s=3.0)
    assert [policy.next_backoff_s(n) for n in range(6)] == [1.0, 2.0, 3.0, 3.0, None, None]
