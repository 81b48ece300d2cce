"""KV cache groups with sliding windows: blocks are released, and prefixes hit if their last windows are cached."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine import EngineRequest
from argosy.engine.scheduling import KvCacheGroups, Scheduler, Sequence, StepPlan
from argosy.protocol import SamplingParams
from tests.support.fake_executor import reference_output
from tests.support.scheduler_harness import SchedulerHarness, scheduler_limits

BLOCK = 4


def held_blocks(seq: Sequence) -> list[int]:
    """Return the number of blocks of a running sequence in each group."""
    firsts = zip(seq.block_tables, seq.first_blocks, strict=True)
    return [len(table) - first for table, first in firsts]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("windows", [(None, 10, 10, 1), (9, 5)])
def test_long_sequence_holds_only_its_windows(
    windows: tuple[int | None, ...], prefix_cache: bool
) -> None:
    """The prompt is computed in chunks that are longer than the windows."""
    harness = SchedulerHarness(
        scheduler_limits(num_blocks=200, kv_windows=windows, prefix_cache=prefix_cache)
    )
    prompt = list(range(100))
    seq = harness.add("long", prompt, 60)
    while harness.scheduler.has_work:
        harness.step()
        if harness.scheduler.running and seq.length <= len(prompt):  # a chunk was computed
            assert max(held_blocks(seq)[1:]) <= (16 + 10) // BLOCK + 2
        elif harness.scheduler.running:
            for window, held in zip(windows, held_blocks(seq), strict=True):
                expected = -(-seq.length // BLOCK) if window is None else -(-window // BLOCK) + 2
                assert held <= expected
    assert harness.outputs["long"] == reference_output(prompt, 60)
    harness.run()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("windows", [(None, 10, 10), (None, None, 6), (9,)])
def test_long_prompts_share_a_pool_in_which_one_fits(
    windows: tuple[int | None, ...], lookahead: int
) -> None:
    """Chunks are shortened, and sequences preempted, until all have ended. Steps may be planned ahead."""
    num_blocks = KvCacheGroups(windows, BLOCK).count_blocks(110)
    harness = SchedulerHarness(
        scheduler_limits(num_blocks=num_blocks, kv_windows=windows, max_step_tokens=40)
    )
    harness.scheduler.output_estimator.fraction = 0.0
    prompts = {name: [ord(name)] * (70 + number * 3) for number, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        harness.add(name, prompt, 30)
    results: list[tuple[StepPlan, object]] = []
    for _ in range(3000):
        if not harness.scheduler.has_work:
            break
        plan = harness.scheduler.schedule(harness.now)
        results.append(harness.executor.execute(plan))  # type: ignore[arg-type]
        if len(results) <= lookahead:
            continue
        for seq, _, token, _ in harness.scheduler.commit(results.pop(0)):  # type: ignore[arg-type]
            if token >= 0:
                harness.outputs[seq.id].append(token)
        harness.scheduler.check_invariants()
    for name, prompt in prompts.items():
        assert harness.outputs[name] == reference_output(prompt, 30)
    assert harness.scheduler.kv_cache.available_blocks == num_blocks


@pytest.mark.parametrize("host_blocks", [0, 8])
@pytest.mark.parametrize("windows", [(None, 9, 9), (13,), (None, None, 5, 1)])
def test_prefix_hits_if_its_last_window_is_cached(
    windows: tuple[int | None, ...], host_blocks: int
) -> None:
    harness = SchedulerHarness(
        scheduler_limits(num_blocks=120, kv_windows=windows, host_blocks=host_blocks)
    )
    prompt = [number % 7 for number in range(61)]
    harness.add("first", prompt, 2)
    harness.run()
    again = harness.add("again", [*prompt, 3], 5)
    harness.run()
    assert again.hit_tokens == 60
    assert harness.outputs["again"] == reference_output([*prompt, 3], 5)


@given(st.data())
def test_number_of_hits_equals_definition(data: st.DataObject) -> None:
    """A prefix is a hit if every group has the blocks that its next token attends to, for any cached blocks."""
    windows = data.draw(
        st.sampled_from([(None,), (None, 6), (None, None, 9), (9,), (13, 5, 5), (None, 17, 1)])
    )
    scheduler = Scheduler(scheduler_limits(kv_windows=windows, num_blocks=80))
    prompt = list(range(data.draw(st.integers(1, 40))))
    seq = scheduler.add(EngineRequest(id="a", prompt=prompt, params=SamplingParams()), now=0.0)
    size, max_hits = BLOCK, (seq.prompt_len - 1) // BLOCK
    groups = KvCacheGroups(windows, size)
    places = list(product(range(len(windows)), range(max_hits)))
    missing = data.draw(st.sets(st.sampled_from(places), max_size=6)) if places else set()
    for group, index in set(places) - missing:
        block, _ = scheduler.kv_cache.pool.take_block()
        suffix = bytes([group]) if group else b""
        scheduler.kv_cache.pool.publish(block, seq.block_hash(index, size) + suffix)
        scheduler.kv_cache.pool.release([block])
    expected = max(
        hits
        for hits in range(max_hits + 1)
        if not any(
            (group, index) in missing
            for group in range(len(windows))
            for index in range(groups.first_block(group, hits * size), hits)
        )
    )
    assert seq.length - scheduler.kv_cache.tokens_to_compute(seq) == expected * size


@pytest.mark.parametrize("windows", [(None,), (None, 100, 30), (50,)])
def test_longest_sequence_fits_and_a_longer_one_does_not(windows: tuple[int | None, ...]) -> None:
    groups = KvCacheGroups(windows, BLOCK)
    for num_blocks in range(60):
        tokens = groups.max_tokens(num_blocks, 1000)
        assert groups.count_blocks(tokens) <= num_blocks
        assert tokens == 1000 or groups.count_blocks(tokens + 1) > num_blocks
