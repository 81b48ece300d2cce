"""Pacing of a stream, which hides the engine's steps from an observer of the encrypted packets.

The sizes and times of packets show how many tokens each step generated, and so where drafts were accepted. That reveals
parts of prompt and output (arXiv 2411.01076).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.proxy.response_writers import StreamingWriter, WrappingWriter
from argosy.protocol import EVENT_END, ApiError, event_data, format_event
from argosy.store import GatewayFlag

PACING_FLAGS: dict[GatewayFlag, bool] = {
    "stream-pacing-interval": False,
    "stream-pacing-tokens": True,
}
"""Flags of projects and keys whose streams are paced, and whether chunks are split. The first one has precedence."""
INTERVAL_S = 0.1
"""Time between two writes of a stream that is sent at a fixed rate."""
PADDED_BYTES = 2048
"""Size of which such a write is a multiple."""
SMOOTHING_S = 0.5
"""Mean time for which the pieces of split chunks wait, and minimum time between two changes of their pace."""
FIRST_PACE_S = 0.05
"""Pace of the pieces before the first change."""
MIN_TICK_S = 0.005
"""Minimum time between two writes of a stream."""
PIECE_CHARS = 4
"""Characters of a piece, which are about those of a token."""
MAX_PIECES = 64
"""Maximum number of pieces of a chunk. Those of a longer text have more characters."""
MAX_SPLIT_BYTES = 16 * 1024
"""Size of a chunk up to which it is split."""
MAX_HELD_BYTES = 256 * 1024
"""Size of what a stream holds back, above which it is sent at once."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class PacedWriter(WrappingWriter):
    """Response writer that holds events back, and sends them at times and in sizes that do not show the steps.

    With `splits`, a write has a few characters, and the pace follows the mean speed of the last half second. Otherwise
    there is a write at a fixed rate, which is padded and may have nothing else.
    """

    def __init__(self, writer: StreamingWriter, *, splits: bool) -> None:
        super().__init__(writer)
        self._stream = writer
        self._splits = splits
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[bytes] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0
        """Time of the event loop from which the next write is due."""
        self._pace_s = FIRST_PACE_S if splits else INTERVAL_S
        """Time between two writes."""
        self._pace_until = math.inf
        """Time of the event loop up to which the pace does not change."""
        self._error: ApiError | None = None
        """Error of a write, which ends the response."""
        self._drained: asyncio.Future[None] | None = None
        """Set when all pieces are sent, after the response has ended."""

    @property
    def has_output(self) -> bool:  # type: ignore[override]
        return self._writer.has_output or bool(self._pieces)

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        return self._error is not None or self._writer.is_full

    def write_events(self, events: bytes) -> None:
        """Queue events. More of them than may be held back are sent at once."""
        if self._error is not None:
            return
        if self._splits and not self.has_output:
            self._pace_until = self._loop.time() + SMOOTHING_S
        if self._splits:
            for event in events.removesuffix(EVENT_END).split(EVENT_END):
                self._pieces += _split_event(event)
        else:
            self._pieces.append(events)
        if sum(map(len, self._pieces)) > MAX_HELD_BYTES:
            self._send(len(self._pieces))
        self._schedule()

    def flush(self) -> None:
        with contextlib.suppress(ValueError):  # the response has another error
            self._send(len(self._pieces))

    def discard(self) -> bool:
        return not self.has_output

    async def finish(self) -> None:
        """Send the rest at the pace of the stream, which takes at most about `SMOOTHING_S`, and end the response.

        Raises:
            ApiError: 502 if an event was malformed.
        """
        if self._pieces:
            if self._splits:
                self._pace_s = min(self._pace_s, SMOOTHING_S / len(self._pieces))
                self._pace_until = math.inf
            self._drained = self._loop.create_future()
            await self._drained
        if self._error is not None:
            raise self._error
        self._cancel_timer()
        await self._writer.finish()

    def close(self) -> None:
        """Drop what was not sent."""
        self._cancel_timer()
        self._pieces.clear()
        self._writer.close()

    def _schedule(self) -> None:
        """Set the timer of the next write, if one is due and has none."""
        if self._timer is None and (self._pieces or not self._splits):
            self._timer = self._loop.call_at(self._next_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, now = None, self._loop.time()
        if self._pieces and now >= self._pace_until:
            self._pace_s = SMOOTHING_S / len(self._pieces)
            self._pace_until = now + SMOOTHING_S
        self._next_at = now + max(MIN_TICK_S, self._pace_s)
        try:
            if self._splits:
                self._send(math.ceil(MIN_TICK_S / self._pace_s))
            else:
                events = b"".join(self._pieces)
                self._pieces.clear()
                self._stream.write_padded(events, PADDED_BYTES)
        except ValueError:
            self._pieces.clear()
            message = "An event of the replica is malformed. Try again shortly."
            self._error = ApiError(502, "upstream_failed", message)
        if not self._pieces and self._drained is not None:
            if not self._drained.done():
                self._drained.set_result(None)
        elif self._error is None:
            self._schedule()

    def _send(self, count: int) -> None:
        """Send the first `count` pieces. Raises ValueError if an event is malformed."""
        pieces = [self._pieces.popleft() for _ in range(min(count, len(self._pieces)))]
        if pieces:
            self._writer.write_events(b"".join(pieces))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def pace_stream(writer: StreamingWriter, flags: Collection[str]) -> PacedWriter | None:
    """Return a writer that paces a stream as the flags of its sender say; None if they do not."""
    for flag, splits in PACING_FLAGS.items():
        if flag in flags:
            return PacedWriter(writer, splits=splits)
    return None


def _split_event(event: bytes) -> Iterator[bytes]:
    """Yield events with an event's text in pieces. Token ids, log-probabilities and the end are in the last one."""
    data, pieces = event_data(event), None
    if data is not None and len(data) <= MAX_SPLIT_BYTES:
        try:
            chunk = _decode(data)
            pieces = _split_chunk(chunk)
        except MALFORMED_EVENT_ERRORS:  # the end, or nothing that clients of this API know
            pieces = None
    if pieces is None:
        yield event + EVENT_END
    else:
        yield from (format_event(_encode(piece)) for piece in pieces)


def _split_chunk(chunk: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return chunks with a chunk's text in pieces; None if it has no text of one kind in one choice."""
    (choice,) = chunk["choices"]
    has_delta = "delta" in choice
    delta = choice["delta"] if has_delta else {"text": choice["text"]}
    names = [name for name, value in delta.items() if value and name != "role"]
    text = delta[names[0]] if names else ""
    call: dict[str, Any] = {}
    if names == ["tool_calls"]:
        (call,) = delta["tool_calls"]
        text = call["function"]["arguments"]
    if not isinstance(text, str) or any(delta[name] != text for name in names if not call):
        return None
    size = max(PIECE_CHARS, math.ceil(len(text) / MAX_PIECES))
    texts = [text[start : start + size] for start in range(0, len(text), size)]
    if len(texts) < 2:
        return None
    envelope = {
        name: value
        for name, value in chunk.items()
        if name in {"id", "object", "created", "model", "system_fingerprint"}
        or (name == "usage" and value is None)
    }
    begun = {"index": choice["index"], "logprobs": None, "finish_reason": None, "stop_reason": None}
    pieces: list[dict[str, Any]] = []
    for number, piece in enumerate(texts):
        is_first, is_last = number == 0, number == len(texts) - 1
        part: dict[str, Any] = dict.fromkeys(names, piece)
        if call:
            function = (call["function"] if is_first else {}) | {"arguments": piece}
            own = call if is_first else {"index": call["index"]}
            part = {"tool_calls": [own | {"function": function}]}
        part = (delta if is_first else {}) | part
        own_choice = (choice if is_last else begun) | ({"delta": part} if has_delta else part)
        pieces.append((chunk if is_last else envelope) | {"choices": [own_choice]})
    return pieces
