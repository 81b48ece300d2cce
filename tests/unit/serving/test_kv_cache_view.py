"""Whatever a reader misses meanwhile, what it is told adds up to what is held."""

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


async def told(reader: KvUpdateReader, before: set[int]) -> set[int]:
    """What the reader knows after one more reading."""
    news = await reader.next_update(0.0)
    if news is None:
        return before
    assert news.stored.isdisjoint(news.removed)
    return ((set() if news.is_snapshot else before) | news.stored) - news.removed


@given(st.lists(EVENTS, max_size=60))
def test_readers_of_any_pace_learn_what_is_held(events: list[tuple[object, ...]]) -> None:
    async def play() -> None:
        ledger, expected = KvCacheView(), set[int]()
        with ledger.subscribe() as one, ledger.subscribe() as two, ledger.subscribe() as three:
            readers, known = (one, two, three), [set[int]() for _ in range(3)]
            for event in events:
                match event:
                    case ("change", set() as stored, set() as removed):
                        change = KvChange(
                            pack_block_names(stored - removed), pack_block_names(removed)
                        )
                        ledger.apply_change(change)
                        expected = (expected | stored) - removed
                    case ("reset",):
                        ledger.reset()
                        expected = set()
                    case ("read", int() as number):
                        known[number] = await told(readers[number], known[number])
            for reader, before in zip(readers, known, strict=True):
                assert await told(reader, before) == ledger.block_names == expected
                assert await reader.next_update(0.0) is None

    asyncio.run(play())


async def test_a_reader_that_is_far_behind_is_told_everything_anew() -> None:
    ledger = KvCacheView()
    with ledger.subscribe() as reader:
        await reader.next_update(0.0)
        for number in range(1000):
            gone = pack_block_names([number - 1] if number else [])
            ledger.apply_change(KvChange(pack_block_names([number]), gone))
        news = await reader.next_update(0.0)
        assert news is not None
        assert news.is_snapshot
        assert news.stored == {999}
        assert not news.removed


async def test_a_reader_that_reads_nothing_takes_no_more_memory_than_what_is_held() -> None:
    ledger = KvCacheView()
    with ledger.subscribe():
        tracemalloc.start()
        try:
            for number in range(20_000):
                gone = pack_block_names([number - 1] if number else [])
                ledger.apply_change(KvChange(pack_block_names([number]), gone))
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept_bytes < 100_000


async def test_who_waits_is_woken_by_a_change_and_by_the_end() -> None:
    ledger = KvCacheView()
    with ledger.subscribe() as reader:
        await reader.next_update(0.0)
        waiting = asyncio.create_task(reader.next_update(30.0))
        await asyncio.sleep(0)
        ledger.apply_change(KvChange(pack_block_names([7]), b""))
        news = await waiting
        assert news is not None
        assert news.stored == {7}
        waiting = asyncio.create_task(reader.next_update(30.0))
        await asyncio.sleep(0)
        ledger.close()
        assert await waiting is None
        assert reader.is_closed
