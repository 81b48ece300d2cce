"""Tokens of a step: the budget follows the memory, and lower tiers yield for a higher tier's first token."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.scheduling import Sequence
from argosy.engine.scheduling.token_budget import (
    MAX_BURST_YIELDS,
    RECOVERY_STEPS,
    YIELD_INTERVAL_STEPS,
    TokenBudget,
)
from tests.support.scheduler_harness import SchedulerHarness, scheduler_limits


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


LIMITS = scheduler_limits(
    max_seqs=32,
    max_step_tokens=1024,
    block_size=16,
    num_blocks=2000,
    max_prefill_fraction=0.25,
    prefix_cache=False,
    ridge_tokens=24,
)
NEVER_YIELD = 1 << 60
"""Ridge at which no step is worth a pass over the weights, so that no request yields."""


class TierHarness(SchedulerHarness):
    """Scheduler to which requests are added by tier, numbered in their order."""

    def add_to_tier(self, tier: int, prompt: int, output: int) -> Sequence:
        name = str(len(self.outputs))
        return self.add(name, [1] * prompt, output, tier=tier, tenant=str(tier))


def engine_with_decodes(count: int, tier: int = 1) -> TierHarness:
    """Return an engine in which `count` requests of a tier decode."""
    engine = TierHarness(LIMITS)
    for _ in range(count):
        engine.add_to_tier(tier, 20, 50)
    engine.step()
    return engine


def test_first_token_of_higher_tier_gets_its_own_step() -> None:
    engine = TierHarness(LIMITS)
    standard = [engine.add_to_tier(1, 20, 50) for _ in range(20)]
    for _ in range(3):
        engine.step()
    premium, late = engine.add_to_tier(0, 20, 50), engine.add_to_tier(1, 20, 50)
    plan = engine.step()
    assert plan.rows == [premium.row]
    assert premium.is_prefilled
    assert late.row < 0, "a lower tier joins the step"
    plan = engine.step()
    assert sorted(plan.rows) == sorted(seq.row for seq in (premium, late, *standard))


def test_scheduled_first_token_delays_no_further_step() -> None:
    engine = engine_with_decodes(20)
    engine.add_to_tier(0, 20, 50)
    plans = [engine.scheduler.schedule(engine.now) for _ in range(2)]
    assert [len(plan.rows) for plan in plans] == [1, 21]


def test_prompts_of_batches_lengthen_steps_of_others_by_little() -> None:
    engine = engine_with_decodes(4)
    batch = engine.add_to_tier(3, 200, 2)
    ridge = LIMITS.ridge_tokens
    for _ in range(4):
        assert sum(engine.step().counts) <= 4 + max(8, ridge // 4)
    assert 0 < batch.computed_len < 200
    engine.run()
    assert len(batch.tokens) == 202


def test_requests_do_not_yield_to_their_own_tier() -> None:
    engine = engine_with_decodes(20)
    engine.add_to_tier(1, 20, 50)
    assert len(engine.step().rows) == 21


def test_requests_do_not_yield_for_a_small_gain() -> None:
    """A few decodes cost less than a pass over the weights, or little compared with a long prompt."""
    for standard, prompt in ((8, 20), (28, 2000)):
        engine = engine_with_decodes(standard)
        engine.add_to_tier(0, prompt, 50)
        assert len(engine.step().rows) == standard + 1


def test_step_of_first_tokens_stays_within_the_prefill_share() -> None:
    """Decodes that yield wait for one share of prefills, not for a full step of them."""
    engine = engine_with_decodes(28, tier=2)
    long = [engine.add_to_tier(0, 120, 50) for _ in range(2)] + [engine.add_to_tier(1, 900, 50)]
    plan = engine.step()
    assert plan.rows == [seq.row for seq in long[:2]]
    assert plan.total_tokens <= 1 + LIMITS.max_prefill_fraction * LIMITS.max_step_tokens


def test_higher_tier_prefills_go_first_until_others_have_waited_long() -> None:
    engine = TierHarness(replace(LIMITS, max_step_tokens=64, ridge_tokens=NEVER_YIELD))
    old = engine.add_to_tier(1, 5000, 2)
    engine.step()
    premium = engine.add_to_tier(0, 6000, 2)
    engine.step()
    before = old.computed_len
    while not premium.is_prefilled:
        assert old.computed_len == before
        engine.step()
    for step in range(1500):  # more premium prompts than can be computed, for 150 s
        engine.now += 0.1
        if step % 5 == 0:
            engine.add_to_tier(0, 100, 2)
        engine.step()
    assert old.id in engine.finish_reasons


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 40)),
        min_size=5,
        max_size=120,
    ),
    st.integers(0, 30),
)
def test_decodes_yield_within_the_bound(
    arrivals: list[tuple[int, int, int]], ridge_tokens: int
) -> None:
    """At most `MAX_BURST_YIELDS` + n / `YIELD_INTERVAL_STEPS` of any n steps skip a runnable decode."""
    engine = TierHarness(replace(LIMITS, max_step_tokens=128, ridge_tokens=ridge_tokens))
    skipped_decode = [0]
    pending = arrivals[::-1]
    while engine.scheduler.has_work or pending:
        for _ in range(min(2, len(pending))):
            engine.add_to_tier(*pending.pop())
        decodable = [seq for seq in engine.scheduler.running if seq.length - seq.computed_len == 1]
        rows = [(seq, seq.row) for seq in decodable]
        plan = engine.step()
        assert plan.rows, "a step that computes nothing"
        skipped_decode.append(any(row not in plan.rows for seq, row in rows if seq.row == row))
    # The largest excess of any interval is the maximum of a running sum over its earlier minimum.
    excess = [
        total - step / YIELD_INTERVAL_STEPS for step, total in enumerate(accumulate(skipped_decode))
    ]
    for value, lowest in zip(excess, accumulate(excess, min), strict=True):
        assert value - lowest <= MAX_BURST_YIELDS + 1e-9
    assert len(engine.finish_reasons) == len(arrivals)
