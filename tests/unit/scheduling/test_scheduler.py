"""Scheduler: random arrivals, cancellations, cache hits and shortages keep invariants and every request's tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.pooling import PoolingParams
from argosy.engine.scheduling import (
    Scheduler,
    SequenceFailure,
    StepResult,
)
from argosy.engine.scheduling.batching_policy import DynamicBatching, StaticBatching
from tests.support.fake_executor import reference_output
from tests.support.scheduler_harness import (
    WORKLOAD_STEPS,
    SchedulerHarness,
    Workload,
    scheduler_limits,
    workloads,
)


@settings(max_examples=80)
@given(workloads(), st.none() | st.randoms(use_true_random=False))
def test_random_workload_gives_every_request_exactly_its_own_tokens(
    workload: Workload, draft_rng: random.Random | None
) -> None:
    """Invariants hold after every step, and every request ends once, although large steps run out of memory."""
    if workload.limits.state_snapshots is not None:
        draft_rng = None  # a recurrent state cannot go back to the last accepted draft
    harness = SchedulerHarness(workload.limits, draft_rng=draft_rng)
    harness.executor.memory_tokens = workload.memory_tokens
    for step in range(WORKLOAD_STEPS):
        for event in workload.events:
            if event.step == step:
                harness.apply(event)
        harness.step()
    harness.run()
    requests = {
        str(event.options["name"]): event.options
        for event in workload.events
        if event.action == "add"
    }
    assert harness.finish_reasons.keys() == requests.keys()
    assert "error" not in harness.finish_reasons.values()
    for name, options in requests.items():
        expected = reference_output(options["prompt"], options["max_tokens"])  # type: ignore[arg-type]
        output = harness.outputs[name]
        assert output == expected[: len(output)]
        if harness.finish_reasons[name] == "length":
            assert output == expected


def test_stop_tokens_end_a_sequence() -> None:
    harness = SchedulerHarness(scheduler_limits())
    expected = reference_output([1, 2, 3], 20)
    stop = expected[5]
    harness.add("a", [1, 2, 3], 20, stop_token_ids=frozenset([stop]))
    harness.run()
    assert harness.finish_reasons == {"a": "stop"}
    assert harness.outputs["a"] == expected[: expected.index(stop) + 1]


def test_max_tokens_of_zero_generates_nothing() -> None:
    harness = SchedulerHarness(scheduler_limits())
    harness.add("a", [1] * 30, 0)
    harness.run()
    assert harness.outputs == {"a": []}
    assert harness.finish_reasons == {"a": "length"}


def test_prefix_hits_stay_within_a_cache_domain_and_never_cover_the_last_token() -> None:
    harness = SchedulerHarness(scheduler_limits())
    for name, domain, length, hits in (
        ("first", "x", 17, 0),
        ("same", "x", 17, 16),
        ("shorter", "x", 16, 12),
        ("other", "y", 17, 0),
    ):
        seq = harness.add(name, [7] * length, 2, cache_domain=domain)
        harness.run()
        assert seq.hit_tokens == hits


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_evicted_blocks_are_restored_from_the_host_unless_they_are_corrupt(
    is_corrupt: bool,
) -> None:
    harness = SchedulerHarness(scheduler_limits(num_blocks=8, host_blocks=16))
    for name, prompt in (("a", [1] * 21), ("b", [2] * 29)):
        harness.add(name, prompt, 2)
        harness.run()
    harness.executor.corrupt_slots.update(range(16 * is_corrupt))
    second = harness.add("a2", [1] * 21, 2)
    harness.run()
    assert harness.outputs["a2"] == reference_output([1] * 21, 2)
    kv_cache = harness.scheduler.kv_cache
    assert kv_cache.host_hit_tokens > 0
    assert (kv_cache.corrupt_blocks > 0) == is_corrupt
    assert is_corrupt or second.hit_tokens == 20


def test_simultaneous_requests_share_the_first_ones_prefix() -> None:
    """The prefix is computed once, and an unrelated request does not wait for it."""
    harness = SchedulerHarness(scheduler_limits(max_step_tokens=64, num_blocks=64))
    prefix = list(range(40))
    sharers = [harness.add(f"same{i}", [*prefix, 50 + i], 3) for i in range(3)]
    unrelated = harness.add("stranger", [9] * 5, 3)
    harness.step()
    assert unrelated.scheduled_at is not None
    harness.run()
    assert [seq.hit_tokens for seq in sharers] == [0, 40, 40]
    for i in range(3):
        assert harness.outputs[f"same{i}"] == reference_output([*prefix, 50 + i], 3)


def test_block_that_a_failed_step_did_not_offload_is_recomputed() -> None:
    """The failed step reuses host slots, which still hold other blocks."""
    harness = SchedulerHarness(scheduler_limits(num_blocks=8, host_blocks=4, max_step_tokens=40))
    for name in "ab":
        harness.add(name, [ord(name)] * 29, 2)
        harness.run()
    harness.executor.memory_tokens = 0
    harness.add("c", [3] * 29, 2)
    harness.step()
    harness.executor.memory_tokens = None
    harness.cancel("c")
    harness.add("b2", [ord("b")] * 29, 2)
    harness.run()
    assert harness.outputs["b2"] == harness.outputs["b"]


def test_higher_tier_preempts_lower_and_equal_tier_does_not() -> None:
    harness = SchedulerHarness(scheduler_limits(max_seqs=1))
    harness.add("free", [1, 2], 20, tier=2)
    harness.step()
    harness.add("equal", [3, 4], 5, tier=2)
    harness.step()
    assert [seq.id for seq in harness.scheduler.running] == ["free"]
    harness.add("premium", [5, 6], 5, tier=0)
    harness.step()
    assert [seq.id for seq in harness.scheduler.running] == ["premium"]
    harness.run()
    assert list(harness.finish_reasons) == ["premium", "free", "equal"]


@pytest.mark.parametrize("tier", [0, 1, 2])
@pytest.mark.parametrize("shortage", [{"max_seqs": 4}, {"max_seqs": 8, "num_blocks": 16}])
def test_online_request_waits_for_lines_of_batches_no_longer_than_one_step(
    tier: int, shortage: dict[str, int]
) -> None:
    harness = SchedulerHarness(scheduler_limits(**shortage))
    for number in range(8):
        harness.add(f"line{number}", [number + 1] * 9, 30, tier=3)
    for _ in range(4):
        harness.step()
    waiting = harness.add("line8", [9] * 9, 30, tier=3)
    harness.step()
    assert waiting.scheduled_at is None, "lines do not occupy all rows or blocks"
    for number in range(6):
        online = harness.add(f"online{number}", [50 + number] * 5, 3, tier=tier)
        harness.step()
        assert online.is_prefilled
    harness.run()
    assert set(harness.finish_reasons.values()) == {"length"}


def add_group(
    harness: SchedulerHarness, name: str, count: int, max_tokens: int, tenant: str = ""
) -> None:
    """Add a request with `count` choices, which fork from the first one's prompt."""
    for number in range(count):
        harness.add(
            f"{name}{number}",
            [7] * 6,
            max_tokens,
            tenant=tenant,
            group_id=name,
            parent_id=f"{name}0" if number else None,
        )


def run_beside(harness: SchedulerHarness, names: list[str]) -> int:
    """Run until these requests have ended, and return the number of steps."""
    steps = 0
    while not set(names) <= harness.finish_reasons.keys():
        harness.step()
        steps += 1
    return steps


@pytest.mark.parametrize("tenant", ["other", "wide"])
def test_request_with_many_choices_yields_one_to_each_other_request(tenant: str) -> None:
    """Requests of its own tenant get all but a quarter of the rows. The choices run again, and each output is exact."""
    harness = SchedulerHarness(scheduler_limits(max_seqs=8, num_blocks=128, max_step_tokens=32))
    add_group(harness, "wide", 20, 60, "wide")
    for _ in range(5):
        harness.step()
    assert [seq.tenant_counter.tenant for seq in harness.scheduler.running] == ["wide"] * 8
    for number in range(3):
        harness.add(f"single{number}", [number], 1, tenant=tenant)
        assert run_beside(harness, [f"single{number}"]) <= 2
        harness.step()
        assert len(harness.scheduler.running) == 8, "the choice runs again"
    assert harness.scheduler.preemptions == 3
    long = [f"long{number}" for number in range(8)]
    for number, name in enumerate(long):
        harness.add(name, [number], 40, tenant=tenant)
    run_beside(harness, long[:1])
    running = [seq.group is not None for seq in harness.scheduler.running]
    share = 4 if tenant == "other" else 2
    assert running.count(True) in {share, share + 1}, (
        "shares are equal, and one of the others has ended"
    )
    assert harness.scheduler.preemptions == 3 + 8 - share, "it yields once for each, and not back"
    harness.run()
    assert all(harness.outputs[f"wide{n}"] == reference_output([7] * 6, 60) for n in range(20))
    assert all(harness.outputs[name] == reference_output([n], 40) for n, name in enumerate(long))


def test_tenant_that_fills_the_cache_bears_the_shortage_itself() -> None:
    harness = SchedulerHarness(scheduler_limits(max_seqs=16, num_blocks=60, max_step_tokens=64))
    for number in range(16):
        harness.add(f"flood{number}", [number] * 8, 60, tenant="flood")
    for _ in range(8):
        harness.step()
    for number in range(15):
        name = f"calm{number}"
        seq = harness.add(name, [number] * 20, 6, tenant="calm")
        assert run_beside(harness, [name]) <= 12
        assert not seq.preemptions
    assert harness.scheduler.preemptions > 0
    harness.run()
    assert all(harness.outputs[f"flood{n}"] == reference_output([n] * 8, 60) for n in range(16))


def test_step_mixes_partial_prefills_with_decodes() -> None:
    harness = SchedulerHarness(scheduler_limits(max_step_tokens=16, num_blocks=64))
    harness.add("decode", [1], 30)
    harness.step()
    harness.add("long", [2] * 60, 2)
    harness.add("short", [3] * 6, 2)
    before = len(harness.outputs["decode"])
    plan = harness.scheduler.schedule(harness.now)
    assert plan.counts[0] == 1
    assert plan.total_tokens <= 2 + 8, "prefills take at most their share while decodes run"
    harness.scheduler.commit(harness.executor.execute(plan))
    harness.step()
    assert len(harness.outputs["decode"]) == before + 1
    assert harness.outputs["short"], "the shorter prefill goes first"
    assert not harness.outputs["long"]


def test_backlogged_tenants_share_evenly() -> None:
    """Service of tenants with weights 1 and 2 differs by no more than the bound."""
    harness = SchedulerHarness(scheduler_limits(max_seqs=2, num_blocks=64, max_step_tokens=16))
    rng = random.Random(0)
    for number in range(200):
        harness.add(f"flood{number}", [1] * rng.randint(1, 12), rng.randint(1, 12), tenant="flood")
    for number in range(60):
        prompt = [2] * rng.randint(1, 12)
        harness.add(f"calm{number}", prompt, rng.randint(1, 12), tenant="calm", weight=2.0)
    counters = {s.tenant_counter.tenant: s.tenant_counter for s in harness.scheduler.queue}
    bound = 2 * max(12 * 1.0, 2.0 * 2 * 12)
    while {"flood", "calm"} <= {s.tenant_counter.tenant for s in harness.scheduler.queue}:
        harness.step()
        assert abs(counters["flood"].served_tokens - counters["calm"].served_tokens) <= bound


def test_returning_tenant_has_no_credit_for_its_absence() -> None:
    harness = SchedulerHarness(scheduler_limits(max_seqs=1))
    for number in range(10):
        harness.add(f"busy{number}", [1, 2, 3], 5, tenant="busy")
    for _ in range(20):
        harness.step()
    late = harness.add("late", [1], 1, tenant="late")
    assert late.tenant_counter.served_tokens > 0


def test_new_tenant_does_not_lock_out_earlier_tenant() -> None:
    """Service without competition is no debt to tenants that arrive later."""
    harness = SchedulerHarness(scheduler_limits(max_seqs=1))
    for number in range(20):
        harness.add(f"early{number}", [1, 2, 3], 10, tenant="old")
    harness.run()
    for number in range(10):
        harness.add(f"new{number}", [1, 2, 3], 10, tenant="new")
    harness.step()
    harness.add("again", [1, 2, 3], 10, tenant="old")
    harness.run()
    order = list(harness.finish_reasons)
    assert order.index("again") <= order.index("new1")


def test_static_batches_run_to_their_end() -> None:
    harness = SchedulerHarness(scheduler_limits(max_seqs=2))
    harness.scheduler = Scheduler(harness.limits, StaticBatching())
    for name, max_tokens in (("a", 2), ("b", 10), ("c", 2)):
        harness.add(name, [1, 2], max_tokens)
    harness.run()
    assert list(harness.finish_reasons) == ["a", "b", "c"]


def test_dynamic_batching_waits_up_to_its_limit() -> None:
    harness = SchedulerHarness(scheduler_limits(max_seqs=2))
    harness.scheduler = Scheduler(harness.limits, DynamicBatching(batch_size=2, max_wait_s=0.05))
    harness.add("a", [1, 2], 3)
    harness.step()
    assert not harness.scheduler.running
    harness.add("b", [1, 2], 3)
    harness.step()
    assert len(harness.scheduler.running) == 2
    harness.run()
    harness.add("alone", [1], 2)
    harness.run()
    assert harness.finish_reasons["alone"] == "length"


def test_failed_step_fails_only_the_request_that_causes_it() -> None:
    """A request whose step raises while it runs alone fails. Requests of the same batch start over."""
    harness = SchedulerHarness(scheduler_limits(num_blocks=64))
    for name in "abc":
        harness.add(name, [ord(name)] * 5, 6)
    harness.step()
    failing = {s.id: s for s in harness.scheduler.running}["b"]
    while failing.id not in harness.finish_reasons:
        plan = harness.scheduler.schedule(harness.now)
        if failing.row in plan.rows and failing.row >= 0:
            for seq in harness.scheduler.recover_failed_step():
                harness.finish(seq.id, "error")
            harness.scheduler.check_invariants()
        else:
            for seq, _, tokens, finish in harness.scheduler.commit(harness.executor.execute(plan)):
                harness.outputs[seq.id] += tokens
                if finish:
                    harness.finish(seq.id, finish)
    harness.run()
    assert harness.finish_reasons["b"] == "error"
    for name in "ac":
        assert harness.outputs[name] == reference_output([ord(name)] * 5, 6)


def test_prefill_with_invalid_logits_is_not_cached() -> None:
    harness = SchedulerHarness(scheduler_limits())
    harness.add("sick", [1] * 10, 3)
    harness.executor.execute(harness.scheduler.schedule(harness.now))
    (progress,) = harness.scheduler.commit(
        StepResult([-1], failures={0: SequenceFailure("not finite")})
    )
    assert progress.finish_reason == "error"
    second = harness.add("again", [1] * 10, 3)
    harness.run()
    assert second.hit_tokens == 0


def test_queued_tokens_include_unfinished_prefills() -> None:
    harness = SchedulerHarness(scheduler_limits(max_seqs=2, max_step_tokens=10, num_blocks=64))
    for name, length in (("a", 25), ("b", 8), ("c", 12)):
        harness.add(name, list(range(length)), 3)
    queued_tokens = [harness.scheduler.queued_tokens]
    while harness.scheduler.has_work:
        harness.step()
        queued_tokens.append(harness.scheduler.queued_tokens)
    assert queued_tokens[:2] == [45, 35]
    assert queued_tokens == sorted(queued_tokens, reverse=True)
    assert queued_tokens[-1] == 0


def pooling_harness(lengths: list[int]) -> SchedulerHarness:
    """Return a scheduler of undivided prompts, with one prompt of each length to be pooled."""
    harness = SchedulerHarness(
        scheduler_limits(max_step_tokens=20, num_blocks=0, kv_windows=(), is_chunked=False)
    )
    pooling = PoolingParams(reads_all_tokens=True)
    for index, length in enumerate(lengths):
        harness.add(
            str(index), [1] * length, 0, tenant=str(index % 2), tier=index % 3, pooling=pooling
        )
    return harness


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_every_prompt_is_computed_once_in_one_step(lengths: list[int]) -> None:
    harness = pooling_harness(lengths)
    scheduler = harness.scheduler
    ended: list[str] = []
    for now in range(2 * len(lengths) + 1):
        plan = scheduler.schedule(float(now))
        assert plan.starts == [0] * len(plan.rows)
        assert all(plan.sample_counts)
        assert plan.total_tokens <= 20
        updates = scheduler.commit(StepResult([-1] * len(plan.rows)))
        scheduler.check_invariants()
        ended += [update.seq.id for update in updates if update.finish_reason == "length"]
    assert sorted(ended, key=int) == [str(index) for index in range(len(lengths))]
    assert not scheduler.has_work


def test_prompt_beyond_a_reduced_budget_runs_alone_and_ends_if_it_does_not_fit() -> None:
    harness = pooling_harness([18, 18])
    harness.executor.memory_tokens = 17
    harness.run()
    assert harness.finish_reasons == dict.fromkeys("01", "error")
    harness = pooling_harness([18, 18])
    harness.scheduler.schedule(0.0)
    harness.scheduler.recover_out_of_memory()
    assert harness.scheduler.schedule(1.0).counts == [18]
    assert harness.scheduler.token_budget.tokens < 18
