"""One streamed answer: fed by one replica after another until it is whole, the client noticing a pause at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from argosy.gateway.attempt import Attempt
from argosy.gateway.dialects import StreamReader
from argosy.gateway.journal import Delivered
from argosy.gateway.upstream import UpstreamError
from argosy.protocol import comment
from argosy.web import Exchange

KEEP_ALIVE = comment(b"keep-alive")


class StreamLimits(Protocol):
    """How long a stream may be silent, in seconds."""

    @property
    def between_tokens_s(self) -> float:
        """The replica: then it counts as stalled."""

    @property
    def keep_alive_s(self) -> float:
        """Towards the client: then it gets a comment."""


class ClientStream:
    """Watches the client and passes on what its replica gives, piece by piece, without a task between."""

    def __init__(
        self,
        exchange: Exchange,
        delivered: Delivered,
        *,
        leave: Callable[[], object],
        charge: Callable[[int], None],
    ) -> None:
        self.gone = False
        self._exchange = exchange
        self._delivered = delivered
        self._leave = leave
        self._charge = charge
        self._charged = 0
        self._full = False
        self._attempt: Attempt | None = None
        self._reader: StreamReader | None = None
        self._shown_at = 0.0

    def feed_from(self, attempt: Attempt, reader: StreamReader) -> None:
        """Pass on what `reader` makes of what `attempt` gives; the answer's head must have been sent."""
        self._attempt = attempt
        self._reader = reader
        if self._full:
            attempt.pause()
        attempt.deliver(self._take)

    def finish(self) -> None:
        """Pass on the end of the attempt that has ended. Raises UpstreamError when that was no answer's end."""
        self._attempt = None
        self._settle()
        reader = self._reader
        if reader is None or not reader.done:
            failure = reader.failure if reader is not None else ""
            raise UpstreamError(failure or "the stream ended before its end")
        self._push(reader.take_held())

    def end_with(self, events: bytes) -> None:
        """Pass on an end that the replica no longer told."""
        self._push(events)

    def let_go(self) -> None:
        """The attempt failed: what was not told for good is forgotten."""
        self._settle()
        self._attempt = self._reader = None

    def tend(self, now: float, limits: StreamLimits) -> None:
        """Called each second: end an attempt that has stalled, and show the client that somebody is there."""
        attempt = self._attempt
        if attempt is None:
            return
        self._settle()
        quiet = now - max(attempt.last, self._shown_at)
        if not self._full and now - attempt.last > limits.between_tokens_s:
            attempt.abandon(f"nothing came for {limits.between_tokens_s:g} s")
        elif quiet > limits.keep_alive_s:
            self._shown_at = now
            self._push(KEEP_ALIVE)

    def _take(self, body: bytes) -> None:
        if self._reader is not None:
            self._push(self._reader.feed(body))

    def _settle(self) -> None:
        """Charge the tenant's share for what came since the last time."""
        came = self._delivered.output_tokens - self._charged
        if came:
            self._charged += came
            self._charge(came)

    def _push(self, data: bytes) -> None:
        if data and not self.gone:  # an empty chunk would end the stream
            self._exchange.push(data)

    # --- what the client's connection calls --------------------------------------------------------

    def on_full(self) -> None:
        """The client is behind: the replica waits."""
        self._full = True
        if self._attempt is not None:
            self._attempt.pause()

    def on_room(self) -> None:
        """It has caught up."""
        self._full = False
        if self._attempt is not None:
            self._attempt.resume()

    def on_gone(self) -> None:
        """Nobody waits any more: the replica learns of it at once."""
        self.gone = True
        self._leave()
