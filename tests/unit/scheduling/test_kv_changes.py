"""KV changes: the reported changes always add up to the prefix index of the KV cache, and so does a gateway's index."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.scheduling import SchedulerLimits, Sequence
from argosy.policy import CacheHitReport, EventPrefixIndex, TextBlockMap, compute_prefix_keys
from argosy.protocol import BLOCK_NAME_BYTES, unpack_block_names
from tests.support.scheduler_harness import (
    WORKLOAD_STEPS,
    SchedulerHarness,
    Workload,
    WorkloadEvent,
    scheduler_limits,
    workloads,
)


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


def test_no_changes_are_reported_without_prefix_cache() -> None:
    harness = SchedulerHarness(scheduler_limits(prefix_cache=False))
    harness.add("a", [1] * 17, 9)
    harness.run()
    assert not harness.scheduler.kv_cache.has_changes
