"""Reversible in-place edits of single logits, which avoid a copy of whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

INFINITY = float("inf")


class LogitEdits:
    """Sequence of edits of `logits` [S, V] float32, which `undo` reverts."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._saved: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def set_values(self, index: tuple[Tensor, ...], values: Tensor) -> None:
        """Set `logits[index]`. An index that occurs twice must have the same value twice."""
        self._saved.append((index, self.logits[index]))
        self.logits[index] = values

    def mask_out(self, index: tuple[Tensor, ...]) -> None:
        """Set `logits[index]` to -infinity, except for NaN and infinity, which sampling must detect."""
        values = self.logits[index]
        self.set_values(index, values.masked_fill(values < INFINITY, -INFINITY))

    def mask_rows(self, rows: Tensor, masked: Tensor, restored_rows: Tensor) -> None:
        """Add `masked` [M, V], which has 0 for allowed tokens and -infinity for others, to some rows.

        Sampling still detects NaN, which stays NaN, and infinity, which becomes NaN. `undo` restores only
        `restored_rows`, a subset of `rows`. A copy of all rows would cost more than sampling.
        """
        if len(restored_rows):
            self._saved.append(((restored_rows,), self.logits[restored_rows]))
        if self.logits.device.type == "cpu":  # index_add_ is not vectorized there
            for row, values in zip(rows.tolist(), masked, strict=True):
                self.logits[row].add_(values)
        else:
            self.logits.index_add_(0, rows, masked)

    def undo(self) -> None:
        """Restore the original logits, bit for bit, except those of masked rows that need not be restored."""
        for index, values in reversed(self._saved):
            self.logits[index] = values
        self._saved.clear()
