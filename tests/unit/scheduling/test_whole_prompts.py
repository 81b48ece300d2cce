"""Prompts that cannot be divided: each is computed in one step, without KV blocks, whatever the token budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.engine import EngineRequest
from argosy.engine.pooling import PoolingParams
from argosy.engine.scheduling import Scheduler, SchedulerLimits, StepPlan, StepResult
from argosy.protocol import SamplingParams

MAX_STEP_TOKENS = 20
LIMITS = SchedulerLimits(
    max_seqs=4,
    max_step_tokens=MAX_STEP_TOKENS,
    block_size=16,
    num_blocks=0,
    max_prefill_fraction=1.0,
    watermark=0.01,
    prefix_cache=True,
    ridge_tokens=8,
    kv_windows=(),
    is_chunked=False,
)


def create_scheduler(lengths: list[int]) -> Scheduler:
    """Create a scheduler with a prompt of each length."""
    scheduler = Scheduler(LIMITS)
    for index, length in enumerate(lengths):
        request = EngineRequest(
            id=str(index),
            prompt=[1] * length,
            params=SamplingParams(max_tokens=0),
            tenant=str(index % 2),
            tier=index % 3,
            pooling=PoolingParams(reads_all_tokens=True),
        )
        scheduler.add(request, now=0.0)
    return scheduler


def commit(scheduler: Scheduler, plan: StepPlan) -> list[str]:
    """Commit a step whose sequences are complete, and return their ids."""
    updates = scheduler.commit(StepResult([-1] * len(plan.rows)))
    scheduler.check_invariants()
    return [update.seq.id for update in updates if update.finish_reason == "length"]


@given(st.lists(st.integers(1, MAX_STEP_TOKENS), min_size=1, max_size=30))
def test_every_prompt_is_computed_once_in_one_step(lengths: list[int]) -> None:
    scheduler = create_scheduler(lengths)
    ended: list[str] = []
    for now in range(2 * len(lengths) + 1):
        plan = scheduler.schedule(float(now))
        assert plan.starts == [0] * len(plan.rows)
        assert all(plan.sample_flags)
        assert plan.total_tokens <= MAX_STEP_TOKENS
        ended += commit(scheduler, plan)
    assert sorted(ended, key=int) == [str(index) for index in range(len(lengths))]
    assert not scheduler.has_work


def test_prompt_beyond_a_reduced_budget_runs_alone_and_ends_if_it_does_not_fit() -> None:
    scheduler = create_scheduler([18, 18])
    scheduler.schedule(0.0)
    (failed,) = scheduler.recover_out_of_memory()
    plan = scheduler.schedule(1.0)
    assert plan.counts == [18]
    assert scheduler.token_budget.tokens < 18
    assert commit(scheduler, plan) == [str(1 - int(failed.id))]
