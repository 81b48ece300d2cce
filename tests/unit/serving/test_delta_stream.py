"""Delta stream: a reader gets every delta once, at any pace and across engine restarts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.engine import EngineRequest
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream
from argosy.protocol import SamplingParams


def stream(aborted: list[str]) -> DeltaStream:
    request = EngineRequest(id="r", prompt=[1, 2], params=SamplingParams())
    return DeltaStream(request, "r~1", 0.0, lambda ended: aborted.append(ended.id))


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.booleans()), min_size=1))
def test_every_delta_is_delivered_once_at_any_pace(
    added: list[tuple[list[int], bool]],
) -> None:
    aborted: list[str] = []
    delta_stream, calls = stream(aborted), 0

    def count_call() -> None:
        nonlocal calls
        calls += 1

    delta_stream.set_listener(count_call)
    drained: list[Delta] = []
    for index, (tokens, drains) in enumerate(added):
        finish = "length" if index == len(added) - 1 else None
        first = {"cached_tokens": 1, "queue_s": 0.5} if index == 0 else {}
        delta_stream.add_delta(Delta(id="r~1", tokens=[*tokens], finish_reason=finish, **first))  # type: ignore[arg-type]
        if drains and (delta := delta_stream.drain()) is not None:
            drained.append(delta)
    if (delta := delta_stream.drain()) is not None:
        drained.append(delta)
    assert calls == len(added)
    all_tokens = [token for tokens, _ in added for token in tokens]
    assert [token for each in drained for token in each.tokens] == all_tokens
    assert [each.finish_reason for each in drained][-1] == "length"
    assert [each.cached_tokens for each in drained] == [1] + [None] * (len(drained) - 1)
    assert {each.id for each in drained} == {"r"}
    assert delta_stream.drain() is None
    delta_stream.close()
    assert not aborted


def test_late_listener_is_called_for_waiting_deltas() -> None:
    delta_stream = stream([])
    delta_stream.add_delta(Delta(id="r~1", tokens=[3]))
    calls: list[None] = []
    delta_stream.set_listener(lambda: calls.append(None))
    assert len(calls) == 1
    delta = delta_stream.drain()
    assert delta is not None
    assert delta.tokens == [3]


def test_restart_does_not_repeat_first_delta_fields() -> None:
    delta_stream = stream([])
    delta_stream.add_delta(
        Delta(id="r~1", tokens=[3], cached_tokens=7, queue_s=0.5, prompt_block_names=b"x")
    )
    assert delta_stream.drain() is not None
    delta_stream.add_delta(
        Delta(id="r~1", tokens=[4], cached_tokens=2, queue_s=0.1, prompt_block_names=b"y")
    )
    delta = delta_stream.drain()
    assert delta is not None
    assert (delta.tokens, delta.cached_tokens, delta.queue_s) == ([4], None, None)
    assert delta.prompt_block_names == b""


def test_early_close_aborts_the_request_and_drops_deltas() -> None:
    aborted: list[str] = []
    delta_stream = stream(aborted)
    delta_stream.close()
    delta_stream.close()
    delta_stream.add_delta(Delta(id="r~1", tokens=[3]))
    assert aborted == ["r"]
    assert delta_stream.drain() is None
