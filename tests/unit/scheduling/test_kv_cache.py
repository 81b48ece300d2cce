"""KV cache: sliding windows release blocks, recurrent states start from snapshots, and changes are reported."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine import AdapterSource, EngineRequest
from argosy.engine.scheduling import KvCacheGroups, Scheduler, SchedulerLimits, Sequence, StepResult
from argosy.policy import CacheHitReport, EventPrefixIndex, TextBlockMap, compute_prefix_keys
from argosy.protocol import BLOCK_NAME_BYTES, SamplingParams, unpack_block_names
from tests.support.fake_executor import reference_output
from tests.support.scheduler_harness import (
    WORKLOAD_STEPS,
    SchedulerHarness,
    Workload,
    WorkloadEvent,
    scheduler_limits,
    workloads,
)

BLOCK = 4
PROMPT = list(range(18))
"""Four blocks and a half."""


def held_blocks(seq: Sequence) -> list[int]:
    """Return the number of blocks of a running sequence in each group."""
    firsts = zip(seq.block_tables, seq.first_blocks, strict=True)
    return [len(table) - first for table, first in firsts]


def run_ahead(harness: SchedulerHarness, lookahead: int) -> None:
    """Run all requests, with steps planned before the results of the last `lookahead` steps are known."""
    results: list[StepResult] = []
    for _ in range(3000):
        if not harness.scheduler.has_work:
            break
        results.append(harness.executor.execute(harness.scheduler.schedule(harness.now)))
        if len(results) > lookahead:
            for seq, _, tokens, _ in harness.scheduler.commit(results.pop(0)):
                harness.outputs[seq.id] += tokens
            harness.scheduler.check_invariants()


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
    run_ahead(harness, lookahead)
    for name, prompt in prompts.items():
        assert harness.outputs[name] == reference_output(prompt, 30)
    assert harness.scheduler.kv_cache.pool.available_blocks == num_blocks


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


def build_harness(**changes: object) -> SchedulerHarness:
    return SchedulerHarness(scheduler_limits(**{"num_blocks": 64, "state_snapshots": 8} | changes))


def count_hits(
    harness: SchedulerHarness,
    name: str,
    prompt: list[int],
    domain: str = "",
    max_tokens: int = 6,
    adapter: AdapterSource | None = None,
) -> int:
    """Run a request alone, and return the number of its tokens that were cached."""
    seq = harness.add(name, prompt, max_tokens, cache_domain=domain, adapter=adapter)
    harness.run()
    assert harness.outputs[name] == reference_output(prompt, max_tokens)
    return seq.hit_tokens


def test_prompt_and_next_turn_hit_at_the_last_block_before_their_new_tokens() -> None:
    harness = build_harness()
    assert count_hits(harness, "first", PROMPT) == 0
    assert count_hits(harness, "same prompt", PROMPT) == 16
    turn = PROMPT + reference_output(PROMPT, 6) + [7, 7]
    assert count_hits(harness, "next turn", turn) == 20  # of the 23 tokens with keys and values
    assert count_hits(harness, "other domain", PROMPT, "other") == 0


def test_adapters_share_blocks_by_domain_and_content_not_by_folder() -> None:
    harness = build_harness()
    requests = [
        ("", None, 0),
        ("", AdapterSource("sha256:a", "/one", 1), 0),
        ("", AdapterSource("sha256:b", "/one", 1), 0),  # another version in the same folder
        ("other", AdapterSource("sha256:a", "/one", 1), 0),
        ("", AdapterSource("sha256:a", "/two", 1), 16),
        ("", None, 16),
    ]
    for number, (domain, adapter, hits) in enumerate(requests):
        assert count_hits(harness, str(number), PROMPT, domain, adapter=adapter) == hits


@pytest.mark.parametrize("length", [16, 17])
def test_prompt_that_ends_with_a_block_hits_before_that_block(length: int) -> None:
    harness = build_harness()
    count_hits(harness, "first", PROMPT[:length])
    assert count_hits(harness, "second", PROMPT[:length]) == (length - 1) // 4 * 4


def test_shared_prefix_of_different_prompts_hits_from_the_third_prompt_on() -> None:
    """The second prompt finds cached blocks without a snapshot, and saves one where it leaves the first prompt."""
    harness = build_harness(state_snapshots=16)
    hits = [count_hits(harness, str(n), [*PROMPT[:10], 30 + n] + [9] * 12) for n in range(4)]
    assert hits == [0, 0, 8, 8]


def test_newer_snapshots_of_a_sequence_evict_its_older_ones_first() -> None:
    harness = build_harness(state_snapshots=5)
    count_hits(harness, "first", PROMPT)
    count_hits(harness, "long output", [50] * 5, max_tokens=60)
    assert count_hits(harness, "same prompt", PROMPT) == 16


def test_preempted_sequence_resumes_from_its_newest_snapshot() -> None:
    harness = build_harness(state_snapshots=32)
    seq = harness.add("low", PROMPT, 30, tier=2)
    while seq.output_len < 9:
        harness.step()
    for number in range(4):  # fills the batch
        harness.add(f"high {number}", [60 + number] * 5, 9)
    while seq.row >= 0:
        harness.step()
    while seq.row < 0:
        harness.step()
    assert seq.computed_len >= 24
    harness.run()
    assert harness.outputs["low"] == reference_output(PROMPT, 30)


@pytest.mark.parametrize(("state_snapshots", "hits"), [(0, 0), (8, 16)])
def test_siblings_compute_their_own_state(state_snapshots: int, hits: int) -> None:
    harness = build_harness(state_snapshots=state_snapshots)
    harness.add("lead", PROMPT, 9)
    siblings = [harness.add(f"sibling {n}", PROMPT, 9, parent_id="lead") for n in range(3)]
    harness.run()
    assert all(output == reference_output(PROMPT, 9) for output in harness.outputs.values())
    assert {seq.hit_tokens for seq in siblings} == {hits}


@pytest.mark.parametrize("state_snapshots", [1, 3, 20])
def test_steps_planned_ahead_do_not_mix_up_states(state_snapshots: int) -> None:
    """Too few blocks for all prompts preempt sequences whose next step is in flight."""
    harness = build_harness(num_blocks=30, state_snapshots=state_snapshots, max_step_tokens=13)
    harness.scheduler.output_estimator.fraction = 0.0
    prompts = {str(n): PROMPT[: 6 + n] + [40 + n % 2] * 20 for n in range(6)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, 40)
    run_ahead(harness, lookahead=1)
    assert harness.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        assert harness.outputs[name] == reference_output(prompt, 40)


class KvChangeObserver:
    """Scheduler harness, the blocks that it reported, and a gateway's index of them."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.harness = SchedulerHarness(limits)
        self.reported: set[bytes] = set()
        self.index = EventPrefixIndex(TextBlockMap(), limits.block_size)
        self._sequences: list[Sequence] = []

    def apply(self, event: WorkloadEvent) -> None:
        """Apply one event of a workload."""
        sequence = self.harness.apply(event)
        if sequence is not None:
            self._sequences.append(sequence)

    def run(self, name: str, prompt: list[int]) -> None:
        """Run one request to its end, then compare."""
        self._sequences.append(self.harness.add(name, prompt, 1))
        self.harness.run()
        self.compare()

    def compare(self) -> None:
        """Apply the reported changes and compare them with the KV cache."""
        kv_cache = self.harness.scheduler.kv_cache
        stored, removed = kv_cache.drain_changes()
        assert not kv_cache.has_changes
        assert set(stored).isdisjoint(removed)
        self.reported.update(stored)
        self.reported.difference_update(removed)
        self.index.on_blocks_stored(block_names(stored))
        self.index.on_blocks_removed(block_names(removed))
        assert self.index.blocks == set(block_names(self.reported))
        all_keys = {key for seq in self._sequences for key in seq.block_hashes}
        assert self.reported == {key for key in all_keys if kv_cache.has_block(key)}
        for seq in self._sequences:
            self._compare_prompt(seq)

    def _compare_prompt(self, seq: Sequence) -> None:
        """Check that the gateway's index finds the cached prefix of a prompt."""
        size = self.harness.limits.block_size
        prompt_bytes = array("i", seq.tokens[: seq.prompt_len]).tobytes()
        keys = compute_prefix_keys(seq.cache_salt, prompt_bytes, 4 * size)
        names = block_names(seq.block_hashes[: len(keys)])
        if len(names) == len(keys) > 0:
            report = CacheHitReport(keys, [], seq.prompt_len / size, seq.prompt_len, 0, names)
            self.index.on_cache_hit_report(report)
            has_block = self.harness.scheduler.kv_cache.has_block
            cached_blocks = next(
                (n for n, key in enumerate(seq.block_hashes) if not has_block(key)), len(keys)
            )
            assert len(self.index.match_prefix(keys)) == min(cached_blocks, len(keys))


def block_names(keys: Iterable[bytes]) -> array[int]:
    return unpack_block_names(b"".join(key[:BLOCK_NAME_BYTES] for key in keys))


@settings(max_examples=40)
@given(workloads(), st.lists(st.booleans(), min_size=WORKLOAD_STEPS, max_size=WORKLOAD_STEPS))
def test_reported_blocks_equal_the_prefix_index_in_random_workloads(
    workload: Workload, comparisons: list[bool]
) -> None:
    observer = KvChangeObserver(workload.limits)
    for step in range(WORKLOAD_STEPS):
        for event in workload.events:
            if event.step == step:
                observer.apply(event)
        observer.harness.step()
        if comparisons[step]:
            observer.compare()
    observer.harness.run()
    observer.compare()


def test_offloaded_blocks_stay_reported_until_they_leave_the_host() -> None:
    observer = KvChangeObserver(scheduler_limits(num_blocks=8, host_blocks=4))
    observer.run("a", [1] * 17)
    first = set(observer.reported)
    assert len(first) == 4
    observer.run("b", [2] * 29)
    assert first < observer.reported
    observer.run("c", [3] * 29)
    assert first.isdisjoint(observer.reported)
