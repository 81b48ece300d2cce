"""Token budget of a step, which shrinks when memory runs out and recovers step by step."""

from __future__ import annotations

RECOVERY_STEPS = 256
"""Successful steps after which a reduced budget doubles."""
MAX_RECOVERY_STEPS = RECOVERY_STEPS << 8


class TokenBudget:
    """Maximum number of tokens in one step. Deterministic.

    A budget that grew and then proves too large again recovers half as fast from then on. The work that each failure
    repeats is therefore small compared with the work between two failures.
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens
        """Current budget, at least 1."""
        self._max_tokens = max_tokens
        self._recovery_steps = RECOVERY_STEPS
        self._successful_steps = 0
        self._has_grown = False
        """Whether the budget has grown since the last failure."""

    @property
    def is_reduced(self) -> bool:
        """Whether the budget is below its maximum, or was until recently, so that `record_success` has an effect."""
        return self.tokens < self._max_tokens or self._has_grown

    def record_out_of_memory(self, step_tokens: int) -> None:
        """Reduce the budget to half of a step that ran out of memory."""
        if self._has_grown:
            self._recovery_steps = min(2 * self._recovery_steps, MAX_RECOVERY_STEPS)
        self._has_grown = False
        self._successful_steps = 0
        self.tokens = max(1, min(self.tokens, step_tokens) // 2)

    def record_success(self) -> None:
        """Record a step that succeeded. Double the budget after enough of them."""
        self._successful_steps += 1
        if self._successful_steps < self._recovery_steps:
            return
        self._successful_steps = 0
        if self.tokens < self._max_tokens:
            self.tokens = min(2 * self.tokens, self._max_tokens)
            self._has_grown = True
        else:
            self._recovery_steps = RECOVERY_STEPS
            self._has_grown = False
