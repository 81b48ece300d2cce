"""Meter of one stream's token rate, reported to the replica's statistics while the stream runs."""

from __future__ import annotations

from argosy.gateway.pool import ReplicaEndpoint


class TokenRateMeter:
    """Measures the decode rate of one attempt from its first token on.

    Rates are reported during the stream, because a slow stream may last an hour.
    """

    def __init__(self, replica: ReplicaEndpoint, tokens: int, now: float) -> None:
        """Start at `tokens` output tokens at the monotonic time `now`."""
        self._replica = replica
        self._tokens = tokens
        self._measured_at = now
        self.is_client_limited = False
        """Whether client backpressure slowed the replica since the last measurement, which is then discarded."""

    def measure(self, tokens: int, now: float) -> None:
        """Report the rate since the last call, at `tokens` output tokens now."""
        if not self.is_client_limited:
            self._replica.on_tokens_streamed(tokens - self._tokens, now - self._measured_at)
        self._tokens, self._measured_at = tokens, now
