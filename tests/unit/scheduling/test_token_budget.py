"""Token budget of a step: it halves when memory runs out, and recovers ever more slowly if that was too early."""

from __future__ import annotations

from argosy.engine.scheduling.token_budget import RECOVERY_STEPS, TokenBudget


def steps_until_growth(budget: TokenBudget) -> int:
    """Record successful steps until the budget grows, and return their number."""
    tokens, steps = budget.tokens, 0
    while budget.tokens == tokens:
        budget.record_success()
        steps += 1
    return steps


def test_budget_halves_failed_step_and_recovers() -> None:
    budget = TokenBudget(1024)
    assert not budget.is_reduced
    for step_tokens, tokens in ((300, 150), (150, 75), (60, 30), (1, 1), (1, 1)):
        budget.record_out_of_memory(step_tokens)
        assert budget.tokens == tokens
    for tokens in (*(2**n for n in range(1, 10)), 1024):
        assert steps_until_growth(budget) == RECOVERY_STEPS
        assert budget.tokens == tokens
    for _ in range(RECOVERY_STEPS):
        budget.record_success()
    assert not budget.is_reduced


def test_budget_recovers_more_slowly_after_growing_too_early() -> None:
    budget = TokenBudget(64)
    budget.record_out_of_memory(64)
    intervals = []
    for _ in range(4):
        intervals.append(steps_until_growth(budget))
        budget.record_out_of_memory(budget.tokens)
    assert intervals == [RECOVERY_STEPS * 2**n for n in range(4)]
