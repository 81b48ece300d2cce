"""Silence of a stream: when its replica counts as stalled, its client as too slow, and when a keep-alive is due."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    """Limits on the silence of a stream, in seconds."""

    first_token_timeout_s: float
    """Silence of the replica before its first token, after which the attempt fails."""
    stream_idle_timeout_s: float
    """Silence of the replica after its first token, after which the attempt fails."""
    sse_keepalive_interval_s: float
    """Silence towards the client, after which an SSE comment is sent."""
    slow_reader_timeout_s: float
    """How long a client may apply backpressure before it is disconnected."""


class StreamMonitor:
    """Times of the last progress and of the last comment of one response."""

    __slots__ = ("_backpressure_since", "keepalive_at", "progress_at")

    def __init__(self) -> None:
        self.progress_at = 0.0
        """Time of the latest progress. A comment shows that the server is alive, but is not progress."""
        self.keepalive_at = 0.0
        """When the client was last sent a comment."""
        self._backpressure_since: float | None = None

    def on_writable(self) -> None:
        """Record that the client reads again."""
        self._backpressure_since = None

    def is_client_too_slow(self, now: float, timeouts: StreamTimeouts) -> bool:
        """Record that the client applies backpressure, and return whether it has done so for too long."""
        self.progress_at = now  # the replica is paused
        if self._backpressure_since is None:
            self._backpressure_since = now
        return now - self._backpressure_since > timeouts.slow_reader_timeout_s

    def find_stall(self, now: float, timeouts: StreamTimeouts, *, has_token: bool) -> float | None:
        """Return the limit on the replica's silence, if the replica exceeded it."""
        limit_s = timeouts.stream_idle_timeout_s if has_token else timeouts.first_token_timeout_s
        return limit_s if now - self.progress_at > limit_s else None

    def is_keepalive_due(self, now: float, timeouts: StreamTimeouts) -> bool:
        """Return whether the client should be sent a comment, and record that it is."""
        is_due = now - max(self.progress_at, self.keepalive_at) > timeouts.sse_keepalive_interval_s
        if is_due:
            self.keepalive_at = now
        return is_due
