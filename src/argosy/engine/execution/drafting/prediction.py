"""Drafts from a text that a request predicts for its output (`prediction`), and the position of the output in it."""

from __future__ import annotations

import collections.abc

from argosy.engine.execution.drafting.drafter import NO_DRAFT, Draft
from argosy.engine.execution.drafting.token_index import MAX_MATCH, TokenIndex, load_token_index
from argosy.engine.scheduling import Sequence
from argosy.native import NativeUnavailableError

EXPECTED_MATCH = 8
"""Size of a match after which drafts are as likely to be accepted as those from a prediction's start."""
_NOWHERE = -1


class PredictionCursor:
    """Position in the prediction of the token that probably follows the output.

    An output token that the prediction does not have is first taken for a replaced one. After a second one the output's
    last tokens are searched in the whole prediction. The cursor is a pure function of prediction and output, so it
    does not matter how many of its tokens were drafts. Not thread-safe.
    """

    def __init__(self, prediction: collections.abc.Sequence[int]) -> None:
        """Create a cursor before the first output token. Without native code, no search takes place."""
        self.tokens = prediction
        self.length = 0
        """Number of output tokens so far."""
        self.accepted = 0
        """Number of output tokens that were the expected ones."""
        self.matched = 0
        """Number of the last output tokens that were."""
        self._position = 0
        self._has_mismatch = False
        """Whether the last token was not the expected one."""
        self._last_tokens: list[int] = []
        self._index: TokenIndex | None = None
        """Index of the prediction, from the first search on."""
        try:
            load_token_index()
            self._can_search = True
        except NativeUnavailableError:
            self._can_search = False

    def propose(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that probably follow the output."""
        if self._position == _NOWHERE:
            return []
        return list(self.tokens[self._position : self._position + limit])

    def advance(self, output: collections.abc.Sequence[int]) -> None:
        """Advance by output tokens."""
        self.length += len(output)
        for index, token in enumerate(output):
            position = self._position
            if 0 <= position < len(self.tokens) and self.tokens[position] == token:
                self.accepted += 1
                self.matched += 1
                self._position = position + 1
                self._has_mismatch = False
                continue
            if self._has_mismatch:
                self._position = self._find(output[max(0, index + 1 - MAX_MATCH) : index + 1])
                self._has_mismatch = self._position == _NOWHERE
            else:
                self.matched = 0
                self._position = position + 1
                self._has_mismatch = True
        self._last_tokens = self._join(output)

    def _join(self, output: collections.abc.Sequence[int]) -> list[int]:
        """Return the last tokens of the output with some new ones."""
        return [*self._last_tokens, *output[-MAX_MATCH:]][-MAX_MATCH:]

    def _find(self, output: collections.abc.Sequence[int]) -> int:
        """Return the position after the longest match of the output's last tokens."""
        if not self._can_search:
            return _NOWHERE
        if self._index is None:
            self._index = TokenIndex()
            self._index.append(self.tokens)
        found = self._index.find(1, self._join(output))
        self.matched = 0 if found is None else found.match_size
        return _NOWHERE if found is None else len(self.tokens) - found.age


class PredictionDrafter:
    """Continues the predicted text of each request that has one."""

    name = "prediction"

    def __init__(self) -> None:
        self._cursors: dict[str, PredictionCursor] = {}

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        return [
            self._propose_one(seq, limit) if seq.prediction else NO_DRAFT
            for seq, limit in zip(sequences, limits, strict=True)
        ]

    def _propose_one(self, seq: Sequence, limit: int) -> Draft:
        cursor = self._cursors.get(seq.id)
        if cursor is None:
            cursor = self._cursors[seq.id] = PredictionCursor(seq.prediction)
        cursor.advance(seq.tokens[seq.prompt_len + cursor.length :])
        return Draft(cursor.propose(limit), min(MAX_MATCH, EXPECTED_MATCH + cursor.matched))

    def release(self, request_id: str) -> None:
        self._cursors.pop(request_id, None)
