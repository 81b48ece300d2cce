"""KV cache view: the updates of a reader add up to the cached blocks, whatever it misses meanwhile."""

from __future__ import annotations

import asyncio
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.serving.core_messages import KvChange
from argosy.engine.serving.engine_core.kv_cache_view import KvCacheView, KvUpdateReader
from argosy.protocol import pack_block_names

NAMES = st.sets(st.integers(0, 12), max_size=8)
EVENTS = st.one_of(
    st.tuples(st.just("change"), NAMES, NAMES),
    st.tuples(st.just("reset")),
    st.tuples(st.just("read"), st.integers(0, 2)),
)


async def read_update(reader: KvUpdateReader, known: set[int]) -> set[int]:
    """Return the blocks that the reader knows after one more update."""
    update = await reader.next_update(0.0)
    if update is None:
        return known
    assert update.stored.isdisjoint(update.removed)
    return ((set() if update.is_snapshot else known) | update.stored) - update.removed


@given(st.lists(EVENTS, max_size=60))
def test_updates_add_up_to_cached_blocks_at_any_pace(events: list[tuple[object, ...]]) -> None:
    async def play() -> None:
        view, expected = KvCacheView(), set[int]()
        with view.subscribe() as one, view.subscribe() as two, view.subscribe() as three:
            readers, known_by_reader = (one, two, three), [set[int]() for _ in range(3)]
            for event in events:
                match event:
                    case ("change", set() as stored, set() as removed):
                        change = KvChange(
                            pack_block_names(stored - removed), pack_block_names(removed)
                        )
                        view.apply_change(change)
                        expected = (expected | stored) - removed
                    case ("reset",):
                        view.reset()
                        expected = set()
                    case ("read", int() as number):
                        known_by_reader[number] = await read_update(
                            readers[number], known_by_reader[number]
                        )
            for reader, known in zip(readers, known_by_reader, strict=True):
                assert await read_update(reader, known) == view.block_names == expected
                assert await reader.next_update(0.0) is None

    asyncio.run(play())


async def test_reader_far_behind_gets_a_snapshot() -> None:
    view = KvCacheView()
    with view.subscribe() as reader:
        await reader.next_update(0.0)
        for number in range(1000):
            removed_names = pack_block_names([number - 1] if number else [])
            view.apply_change(KvChange(pack_block_names([number]), removed_names))
        update = await reader.next_update(0.0)
        assert update is not None
        assert update.is_snapshot
        assert update.stored == {999}
        assert not update.removed


async def test_idle_reader_takes_bounded_memory() -> None:
    view = KvCacheView()
    with view.subscribe():
        tracemalloc.start()
        try:
            for number in range(5_000):
                removed_names = pack_block_names([number - 1] if number else [])
                view.apply_change(KvChange(pack_block_names([number]), removed_names))
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept_bytes < 100_000


async def test_waiting_reader_wakes_on_change_and_close() -> None:
    view = KvCacheView()
    with view.subscribe() as reader:
        await reader.next_update(0.0)
        waiting = asyncio.create_task(reader.next_update(30.0))
        await asyncio.sleep(0)
        view.apply_change(KvChange(pack_block_names([7]), b""))
        update = await waiting
        assert update is not None
        assert update.stored == {7}
        waiting = asyncio.create_task(reader.next_update(30.0))
        await asyncio.sleep(0)
        view.close()
        assert await waiting is None
        assert reader.is_closed
