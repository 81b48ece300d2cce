"""Writer that paces a stream: pieces of chunks are the chunks, and few bytes are held."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.gateway.proxy import stream_pacing
from argosy.gateway.proxy.response_writers import StreamingWriter
from argosy.gateway.proxy.stream_pacing import MAX_HELD_BYTES, MAX_PIECES, PacedWriter
from argosy.protocol import EVENT_END, SSE_DONE, format_event

KINDS = ["content", "text", "reasoning", "arguments", "other"]
"""Fields with text."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("SMOOTHING_S", 0.02),
        ("FIRST_PACE_S", 0.002),
        ("INTERVAL_S", 0.002),
        ("MIN_TICK_S", 0.001),
    ):
        monkeypatch.setattr(stream_pacing, name, value)


@pytest.mark.usefixtures("quick")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.text(max_size=40) | st.integers(100, 400).map(lambda size: "ab\u00e9" * size),
        ),
        max_size=8,
    ),
    st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_are_the_chunks_and_few_are_held(
    chunks: list[tuple[str, str]], splits: bool
) -> None:
    """Log-probabilities, ends and unknown fields are sent once. A text of any length has a bounded number of pieces."""
    written: list[bytes] = []
    exchange = Mock()
    exchange.write_nowait.side_effect = written.append
    exchange.write_padded.side_effect = lambda events, _: written.append(events)
    exchange.end_stream = AsyncMock()

    def build(number: int, kind: str, text: str) -> dict[str, Any]:
        delta: dict[str, Any] = {kind: text}
        if kind == "arguments":
            delta = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", kind: text}}]}
        choice: dict[str, Any] = (
            delta if kind == "text" else {"delta": delta | {"role": "assistant"}}
        )
        details = {"logprobs": {"content": [number]}, "token_ids": [number]}
        return {
            "id": "x",
            "model": "m",
            "choices": [{"index": 0, "finish_reason": None} | choice | details],
        }

    events = [format_event(json.dumps(build(n, *each)).encode()) for n, each in enumerate(chunks)]

    async def run() -> None:
        writer = PacedWriter(StreamingWriter(exchange), splits=splits)
        for event in [*events, SSE_DONE]:
            writer.write_events(event)
            assert writer.has_output
        await writer.finish()
        writer.close()

    asyncio.run(run())
    assert exchange.end_stream.await_count == 1
    output = b"".join(written).removesuffix(EVENT_END).split(EVENT_END)
    assert output[-1] == b"data: [DONE]"
    assert splits or output[:-1] == [event.removesuffix(EVENT_END) for event in events]
    assert len(output) <= 1 + MAX_PIECES * len(events)
    joined, token_ids = "", []
    for event in output[:-1]:
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        delta = choice.get("delta", choice)
        for call in delta.get("tool_calls", ()):
            delta |= call["function"]
        joined += "".join(delta.get(kind, "") for kind in KINDS)
        token_ids += choice.get("token_ids", ())
    assert joined == "".join(text for _, text in chunks)
    assert token_ids == list(range(len(chunks)))


async def test_what_may_not_be_held_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pacing, "SMOOTHING_S", 1e-6)  # each write changes the pace
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    written: list[bytes] = []
    exchange = Mock()
    exchange.write_nowait.side_effect = written.append
    for splits in (False, True):
        writer = PacedWriter(StreamingWriter(exchange), splits=splits)
        writer.write_events(format_event(b"x" * MAX_HELD_BYTES))
        assert len(written.pop()) > MAX_HELD_BYTES
        writer.write_events(format_event(b"later"))
        writer.flush()
        assert written.pop() == format_event(b"later")
        await asyncio.sleep(0.001)  # the timer of the writes has nothing to send
        writer.close()
    assert not errors
