"""How fast the tokens of one sequence come, told its replica while they do: one that crawls may do so for an hour."""

from __future__ import annotations

from argosy.gateway.pool import Replica


class Pace:
    """One attempt's, from its first token on."""

    def __init__(self, replica: Replica, tokens: int, at: float) -> None:
        """The answer had so many tokens then."""
        self._replica = replica
        self._tokens = tokens
        self._at = at
        self.held = False
        """The client has kept the replica back since it was measured last: that says nothing."""

    def measure(self, tokens: int, until: float) -> None:
        """It has so many now."""
        if not self.held:
            self._replica.streamed(tokens - self._tokens, until - self._at)
        self._tokens, self._at = tokens, until
