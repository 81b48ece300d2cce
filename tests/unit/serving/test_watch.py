"""A core that hangs is told from one that loads, thinks or idles; restarts back off and end."""

from argosy.engine.serving.core_messages import Beat
from argosy.engine.serving.engine_core.heartbeat_monitor import (
    LOADING_SILENCE_S,
    MISSED_BEATS,
    RestartPolicy,
    Vigil,
)

STALL_S = 20.0


def vigil(*, serving: bool = True) -> Vigil:
    watch = Vigil(STALL_S, 1.0, started=0.0)
    if serving:
        watch.ready(0.0)
    return watch


def first_verdict(watch: Vigil, beats: dict[int, Beat], until: int = 100) -> tuple[int, str] | None:
    """Ask each second, after that second's beat; the time and the words of the first verdict."""
    for second in range(1, until):
        if second in beats:
            watch.beat(beats[second], float(second))
        words = watch.verdict(float(second))
        if words is not None:
            return second, words
    return None


def test_busy_core_that_steps_is_well() -> None:
    assert first_verdict(vigil(), {t: Beat(t, True) for t in range(100)}) is None


def test_idle_core_is_well() -> None:
    assert first_verdict(vigil(), {t: Beat(7, False) for t in range(100)}) is None


def test_busy_core_that_makes_no_step_is_hung_after_the_limit() -> None:
    beats = {t: Beat(7, t >= 30) for t in range(100)}
    found = first_verdict(vigil(), beats)
    assert found is not None
    assert found[0] == 29 + STALL_S
    assert "without a step" in found[1]


def test_silent_core_is_hung() -> None:
    found = first_verdict(vigil(), {t: Beat(t, True) for t in range(40)})
    assert found is not None
    assert found[0] == 39 + MISSED_BEATS
    assert "heartbeat" in found[1]


def test_a_core_that_loads_may_take_its_time_while_it_progresses() -> None:
    watch = vigil(serving=False)
    last = int(LOADING_SILENCE_S)
    assert first_verdict(watch, {}, until=last) is None
    watch.progress(float(last))
    for second in range(last, 2 * last):
        assert watch.verdict(float(second)) is None
    assert watch.verdict(2.0 * last) is not None


def test_a_watcher_that_was_itself_stopped_judges_nobody() -> None:
    watch = vigil()
    watch.beat(Beat(1, True), 1.0)
    assert watch.verdict(1.0) is None
    assert watch.verdict(1000.0) is None
    watch.beat(Beat(1, True), 1001.0)
    assert watch.verdict(1001.0) is None


def test_restarts_back_off_to_a_bound_and_end() -> None:
    policy = RestartPolicy(limit=4, backoff_s=1.0, longest_s=3.0)
    assert [policy.wait_s(n) for n in range(6)] == [1.0, 2.0, 3.0, 3.0, None, None]
