"""Changes of a few logits in place, and back: what a row asks for costs no copy of its row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

INFINITY = float("inf")


class Edits:
    """Changes of `logits` [S, V] float32, one over the other, until `undo`."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._old: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def put(self, where: tuple[Tensor, ...], values: Tensor) -> None:
        """Set `logits[where]`; a place that is named twice is given one value."""
        self._old.append((where, self.logits[where]))
        self.logits[where] = values

    def bar(self, where: tuple[Tensor, ...]) -> None:
        """Let `logits[where]` never be drawn; NaN and infinity stay, for the draw to find."""
        values = self.logits[where]
        self.put(where, values.masked_fill(values < INFINITY, -INFINITY))

    def undo(self) -> None:
        """Give the logits back, bit for bit."""
        for where, values in reversed(self._old):
            self.logits[where] = values
        self._old.clear()
