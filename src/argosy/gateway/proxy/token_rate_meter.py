"""How fast the tokens of one sequence come, told its replica while they do: one that crawls may do so for an hour."""

from __future__ import annotations

from argosy.gateway.pool import ReplicaEndpoint


class TokenRateMeter:
    """One attempt's, from its first token on."""

    def __init__(self, replica: ReplicaEndpoint, tokens: int, now: float) -> None:
        """The answer had so many tokens then."""
        self._replica = replica
        self._tokens = tokens
        self._measured_at = now
        self.is_client_limited = False
        """The client has kept the replica back since it was measured last: that says nothing."""

    def measure(self, tokens: int, now: float) -> None:
        """It has so many now."""
        if not self.is_client_limited:
            self._replica.on_tokens_streamed(tokens - self._tokens, now - self._measured_at)
        self._tokens, self._measured_at = tokens, now
