"""Drafter of the tokens that a grammar forces, such as the names of a JSON schema."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable

from argosy.engine.execution.drafting.drafter import NO_DRAFT, Draft
from argosy.engine.execution.drafting.token_index import MAX_MATCH
from argosy.engine.scheduling import Sequence


class ForcedTokensDrafter:
    """Drafts where the grammar of a sequence allows one text only.

    The tokens are drafts, not results, because a text has several tokenizations, of which the model samples any.
    """

    name = "forced_tokens"

    def __init__(self, find_forced_tokens: Callable[[int], list[int]]) -> None:
        """Create a drafter. `find_forced_tokens` maps the row of a sequence to the tokens that its grammar forces."""
        self._find_forced_tokens = find_forced_tokens

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        return [
            Draft(self._find_forced_tokens(seq.row)[:limit], MAX_MATCH)
            if seq.params.grammar
            else NO_DRAFT
            for seq, limit in zip(sequences, limits, strict=True)
        ]

    def release(self, request_id: str) -> None:
        """Keep nothing of any request."""
