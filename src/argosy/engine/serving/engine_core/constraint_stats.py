"""Totals about constrained sampling, from the results of the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy.engine.grammar import DEAD_END_CODE

if TYPE_CHECKING:
    from argosy.engine.scheduling import StepResult
    from argosy.engine.serving.core_messages import Delta


@dataclass(slots=True)
class ConstraintStats:
    """Sums since the start."""

    masked_tokens: int = 0
    """Tokens sampled under a mask."""
    dead_ends: int = 0
    """Sequences that ended because no token could continue their output."""
    mask_fill_s: float = 0.0
    """Seconds that a thread spent on masks, while the device computed."""
    mask_wait_s: float = 0.0
    """Seconds for which sampling waited for masks."""

    def record_step(self, result: StepResult, deltas: list[Delta]) -> None:
        """Add the result of one step. `deltas` leave out sequences that ended in an earlier step."""
        self.masked_tokens += result.masked_rows
        if result.failures:
            self.dead_ends += sum(delta.error_code == DEAD_END_CODE for delta in deltas)
        self.mask_fill_s += result.durations.mask_fill_s
        self.mask_wait_s += result.durations.mask_wait_s
