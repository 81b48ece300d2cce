"""Changes of a few logits in place, and back: what a row asks for costs no copy of its row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

INFINITY = float("inf")


class LogitEdits:
    """Changes of `logits` [S, V] float32, one over the other, until `undo`."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._saved: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def set_values(self, index: tuple[Tensor, ...], values: Tensor) -> None:
        """Set `logits[where]`; a place that is named twice is given one value."""
        self._saved.append((index, self.logits[index]))
        self.logits[index] = values

    def mask_out(self, index: tuple[Tensor, ...]) -> None:
        """Let `logits[where]` never be drawn; NaN and infinity stay, for the draw to find."""
        values = self.logits[index]
        self.set_values(index, values.masked_fill(values < INFINITY, -INFINITY))

    def undo(self) -> None:
        """Give the logits back, bit for bit."""
        for where, values in reversed(self._saved):
            self.logits[where] = values
        self._saved.clear()
