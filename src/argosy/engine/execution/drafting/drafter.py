"""Interface of drafters."""

from __future__ import annotations

import collections.abc
from typing import Protocol

from argosy.engine.scheduling import Sequence


class Drafter(Protocol):
    """Drafter of the running sequences of one core. Called between two steps, so its time is added to each step."""

    name: str
    """Label of its drafts in metrics."""

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[list[int]]:
        """Return drafts of the tokens that follow `tokens` of each sequence, up to `limits[i]` of the i-th one.

        An empty list proposes nothing. Tokens are only appended to a sequence from one call to the next, except that
        a request id can be used again after `release`.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, if it is known."""
        ...
