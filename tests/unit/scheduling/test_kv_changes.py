"""What the memory tells of its blocks is its prefix index, after each telling and in any world; an index agrees."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.scheduling import SchedulerLimits, Sequence
from argosy.policy import CacheHitReport, EventPrefixIndex, TextBlockMap, compute_prefix_keys
from argosy.protocol import BLOCK_NAME_BYTES, unpack_block_names
from tests.unit.scheduling.test_scheduler import Rig, limits, worlds

World = tuple[SchedulerLimits, list[tuple[int, str, dict[str, object]]]]


class Listener:
    """A rig, and what was told of its blocks."""

    def __init__(self, sizes: SchedulerLimits) -> None:
        self.rig = Rig(sizes)
        self.told: set[bytes] = set()
        self.index = EventPrefixIndex(TextBlockMap(), sizes.block_size)
        self._sequences: list[Sequence] = []

    def play(self, what: str, options: dict[str, object]) -> None:
        if what == "add":
            self._sequences.append(self.rig.add(**options))  # type: ignore[arg-type]
        elif what == "cancel":
            self.rig.cancel(str(options["name"]))
        else:
            self.rig.executor.rotten.add(int(options["slot"]))  # type: ignore[call-overload]

    def listen(self) -> None:
        """Take in what has changed, and compare."""
        memory = self.rig.scheduler.kv_cache
        stored, removed = memory.drain_changes()
        assert not memory.has_changes
        assert set(stored).isdisjoint(removed)
        self.told.update(stored)
        self.told.difference_update(removed)
        self.index.on_blocks_stored(_names(stored))
        self.index.on_blocks_removed(_names(removed))
        assert self.index.blocks == set(_names(self.told))
        everything = {key for seq in self._sequences for key in seq.block_hashes}
        assert self.told == {key for key in everything if memory.has_block(key)}
        for seq in self._sequences:
            self._compare(seq)

    def _compare(self, seq: Sequence) -> None:
        """The index finds of a prompt what the memory holds of it."""
        size = self.rig.limits.block_size
        text = array("i", seq.tokens[: seq.prompt_len]).tobytes()
        keys = compute_prefix_keys(seq.cache_salt, text, 4 * size)
        names = _names(seq.block_hashes[: len(keys)])
        if len(names) == len(keys) > 0:
            told = CacheHitReport(keys, [], seq.prompt_len / size, seq.prompt_len, 0, names)
            self.index.on_cache_hit_report(told)
            held = self.rig.scheduler.kv_cache.has_block
            there = next((n for n, key in enumerate(seq.block_hashes) if not held(key)), len(keys))
            assert len(self.index.match_prefix(keys)) == min(there, len(keys))


def _names(keys: Iterable[bytes]) -> array[int]:
    return unpack_block_names(b"".join(key[:BLOCK_NAME_BYTES] for key in keys))


@settings(max_examples=200)
@given(worlds(), st.lists(st.booleans(), min_size=41, max_size=41))
def test_random_worlds(world: World, listens: list[bool]) -> None:
    sizes, events = world
    listener = Listener(sizes)
    for tick in range(41):
        for when, what, options in events:
            if when == tick:
                listener.play(what, options)
        listener.rig.step()
        if listens[tick]:
            listener.listen()
    listener.rig.run()
    listener.listen()


def test_what_moves_to_the_host_is_still_there_and_what_leaves_it_is_not() -> None:
    listener = Listener(limits(num_blocks=8, host_blocks=4))
    listener.play("add", {"name": "a", "prompt": [1] * 17, "max_tokens": 1})
    listener.rig.run()
    listener.listen()
    first = set(listener.told)
    assert len(first) == 4
    listener.play("add", {"name": "b", "prompt": [2] * 29, "max_tokens": 1})
    listener.rig.run()
    listener.listen()
    assert first < listener.told
    listener.play("add", {"name": "c", "prompt": [3] * 29, "max_tokens": 1})
    listener.rig.run()
    listener.listen()
    assert first.isdisjoint(listener.told)


def test_nothing_is_told_without_a_prefix_cache() -> None:
    listener = Listener(limits(prefix_cache=False))
    listener.play("add", {"name": "a", "prompt": [1] * 17, "max_tokens": 9})
    listener.rig.run()
    assert not listener.rig.scheduler.kv_cache.has_changes
