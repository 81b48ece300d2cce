"""Drafter that continues a sequence as it went on after the last occurrence of its newest tokens.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

import collections.abc

from argosy.engine.scheduling import Sequence

MATCH_TOKENS = 3
"""Number of newest tokens that must have occurred before. Fewer ones match by chance too often."""


class PromptLookupDrafter:
    """Index of the prompt and output of each sequence, which costs constant time for each token."""

    name = "prompt_lookup"

    def __init__(self) -> None:
        self._indexes: dict[str, _LastOccurrences] = {}

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[list[int]]:
        drafts = []
        for seq, limit in zip(sequences, limits, strict=True):
            index = self._indexes.get(seq.id)
            if index is None:
                index = self._indexes[seq.id] = _LastOccurrences()
            drafts.append(index.continue_tokens(seq.tokens, limit))
        return drafts

    def release(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class _LastOccurrences:
    """Position after the last occurrence of each run of `MATCH_TOKENS` tokens of one sequence."""

    __slots__ = ("_num_indexed", "_positions")

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], int] = {}
        self._num_indexed = MATCH_TOKENS

    def continue_tokens(self, tokens: list[int], limit: int) -> list[int]:
        """Index the new tokens, and return what followed the newest ones before. It repeats if it is too short."""
        for end in range(self._num_indexed, len(tokens)):
            self._positions[tuple(tokens[end - MATCH_TOKENS : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))
        start = self._positions.get(tuple(tokens[-MATCH_TOKENS:]))
        if start is None:
            return []
        following = tokens[start : start + limit]
        return (following * limit)[:limit]
