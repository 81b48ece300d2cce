"""Drafter that continues a sequence as it went on after an earlier occurrence of its newest tokens.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

import collections.abc

from argosy.engine.execution.drafting.drafter import NO_DRAFT, Draft
from argosy.engine.execution.drafting.token_index import TokenIndex, load_token_index
from argosy.engine.scheduling import Sequence


class PromptLookupDrafter:
    """Index of the prompt and output of each sequence. The longest match is continued."""

    name = "prompt_lookup"

    def __init__(self, min_match: int) -> None:
        """Create a drafter without sequences, which drafts after `min_match` equal tokens or more.

        Raises:
            NativeUnavailableError: The native code cannot be built or loaded.
        """
        load_token_index()
        self._min_match = min_match
        self._indexes: dict[str, TokenIndex] = {}

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        return [self._propose_one(seq, limit) for seq, limit in zip(sequences, limits, strict=True)]

    def _propose_one(self, seq: Sequence, limit: int) -> Draft:
        index = self._indexes.get(seq.id)
        if index is None:
            index = self._indexes[seq.id] = TokenIndex()
        tokens = seq.tokens
        if index.length < len(tokens):
            index.append(tokens[index.length :])
        found = index.find(limit)
        if found is None or found.match_size < self._min_match:
            return NO_DRAFT
        return Draft(found.tokens, found.match_size)

    def release(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
