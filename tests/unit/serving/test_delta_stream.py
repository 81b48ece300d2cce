"""What the reader of one request's deltas gets, however it reads and however often the engine starts over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.serving.core_messages import Delta, EngineRequest
from argosy.engine.serving.engine_core.delta_stream import DeltaStream
from argosy.protocol import SamplingParams


def stream(aborted: list[str]) -> DeltaStream:
    request = EngineRequest(id="r", prompt=[1, 2], params=SamplingParams())
    return DeltaStream(request, "r~1", 0.0, lambda ended: aborted.append(ended.id))


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.booleans()), min_size=1))
def test_nothing_is_lost_or_told_twice_whenever_one_takes(
    steps: list[tuple[list[int], bool]],
) -> None:
    aborted: list[str] = []
    deltas, calls = stream(aborted), 0

    def heard() -> None:
        nonlocal calls
        calls += 1

    deltas.set_listener(heard)
    taken: list[Delta] = []
    for index, (tokens, take) in enumerate(steps):
        finish = "length" if index == len(steps) - 1 else None
        first = {"cached_tokens": 1, "queue_s": 0.5} if index == 0 else {}
        deltas.add_delta(Delta(id="r~1", tokens=tokens, finish_reason=finish, **first))  # type: ignore[arg-type]
        if take and (delta := deltas.drain()) is not None:
            taken.append(delta)
    if (delta := deltas.drain()) is not None:
        taken.append(delta)
    assert calls == len(steps)
    whole = [token for tokens, _ in steps for token in tokens]
    assert [token for each in taken for token in each.tokens] == whole
    assert [each.finish_reason for each in taken][-1] == "length"
    assert [each.cached_tokens for each in taken] == [1] + [None] * (len(taken) - 1)
    assert {each.id for each in taken} == {"r"}
    assert deltas.drain() is None
    deltas.close()
    assert not aborted


def test_who_asks_late_is_told_of_what_waits() -> None:
    deltas = stream([])
    deltas.add_delta(Delta(id="r~1", tokens=[3]))
    calls: list[None] = []
    deltas.set_listener(lambda: calls.append(None))
    assert len(calls) == 1
    delta = deltas.drain()
    assert delta is not None
    assert delta.tokens == [3]


def test_after_a_restart_the_first_words_are_not_said_again() -> None:
    deltas = stream([])
    deltas.add_delta(
        Delta(id="r~1", tokens=[3], cached_tokens=7, queue_s=0.5, prompt_block_names=b"x")
    )
    assert deltas.drain() is not None
    deltas.add_delta(
        Delta(id="r~1", tokens=[4], cached_tokens=2, queue_s=0.1, prompt_block_names=b"y")
    )
    delta = deltas.drain()
    assert delta is not None
    assert (delta.tokens, delta.cached_tokens, delta.queue_s) == ([4], None, None)
    assert delta.prompt_block_names == b""


def test_who_closes_early_aborts_and_hears_no_more() -> None:
    aborted: list[str] = []
    deltas = stream(aborted)
    deltas.close()
    deltas.close()
    deltas.add_delta(Delta(id="r~1", tokens=[3]))
    assert aborted == ["r"]
    assert deltas.drain() is None
