"""Tracking of the reasoning block at the start of an output, by token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.protocol import ReasoningBlock


class ReasoningGate:
    """Position of one sequence relative to its reasoning block, a pure function of the tokens so far.

    The engine core lets a grammar begin after the block. The replica server counts the block's tokens and ignores stop
    strings inside it.
    """

    __slots__ = ("_block", "_matched_end", "_matched_start", "is_open", "may_open", "tokens")

    def __init__(self, block: ReasoningBlock) -> None:
        self._block = block
        self._matched_start = 0
        self._matched_end = 0
        self.may_open = bool(block.start_ids)
        """Whether the next token may be part of the opening sequence."""
        self.is_open = not block.start_ids
        """Whether the next token belongs to the block. The tokens of the closing sequence belong to it."""
        self.tokens = 0
        """Number of reasoning tokens so far, without opening and closing sequence."""

    @property
    def is_past(self) -> bool:
        """Whether the block has ended, or the output began without one."""
        return not (self.is_open or self.may_open)

    @property
    def opening_token(self) -> int | None:
        """Token that continues the opening sequence, or None if the block cannot open any more."""
        return self._block.start_ids[self._matched_start] if self.may_open else None

    @property
    def forced_token(self) -> int | None:
        """Token that closes the block because the budget is used up, or None."""
        budget = self._block.budget
        if not self.is_open or budget is None or self.tokens < budget:
            return None
        return self._block.end_ids[self._matched_end]

    def accept(self, token: int) -> bool:
        """Advance by one output token. Return whether the token belongs to the block or its markers."""
        if self.may_open:
            if token != self._block.start_ids[self._matched_start]:
                self.may_open = False
                return False
            self._matched_start += 1
            if self._matched_start == len(self._block.start_ids):
                self.may_open, self.is_open = False, True
            return True
        if not self.is_open:
            return False
        self._advance_end(token)
        return True

    def _advance_end(self, token: int) -> None:
        """Match the closing sequence. Tokens of a partial match count as reasoning once it fails."""
        end_ids = self._block.end_ids
        seen = (*end_ids[: self._matched_end], token)
        self._matched_end = next(
            size
            for size in range(min(len(seen), len(end_ids)), -1, -1)
            if seen[len(seen) - size :] == end_ids[:size]
        )
        self.tokens += len(seen) - self._matched_end
        self.is_open = self._matched_end < len(end_ids)
