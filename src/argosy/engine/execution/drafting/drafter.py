"""Interface of drafters."""

from __future__ import annotations

import collections.abc
from typing import NamedTuple, Protocol

from argosy.engine.scheduling import Sequence


class Draft(NamedTuple):
    """Guess of the tokens that follow a sequence."""

    tokens: list[int]
    match_size: int = 1
    """Number of the sequence's last tokens on which the guess relies. Drafts after long matches are accepted more."""


NO_DRAFT = Draft([])


class Drafter(Protocol):
    """Drafter of the running sequences of one core. Called between two steps, so its time is added to each step."""

    name: str
    """Label of its drafts in metrics."""

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        """Return drafts of the tokens that follow `tokens` of each sequence, up to `limits[i]` of the i-th one.

        A draft without tokens proposes nothing. Tokens are only appended to a sequence from one call to the next,
        except that a request id can be used again after `release`.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, if it is known."""
        ...
