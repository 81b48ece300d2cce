"""What a replica tells of its prefix cache, and how a gateway follows it through cuts, nonsense and silence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
import pytest
from tests.support.fake_engine import FakeEngine, always, says
from tests.support.replica_servers import MODEL, Served, serve
from tests.support.waiting import until

from argosy.engine.serving.api_server.kv_events_handler import MAX_NAMES_PER_EVENT
from argosy.engine.serving.core_messages import KvChange
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway.kv_events.subscription import subscribe
from argosy.gateway.kv_events.text_block_maps import TextBlockMaps
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import EventPrefixIndex
from argosy.protocol import (
    EventParser,
    KvEvent,
    pack_block_names,
    parse_endpoint,
    unpack_block_names,
)

# --- the stream ------------------------------------------------------------------------------------


@pytest.fixture(name="fake")
def a_fake(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, always(says(tokenizer, "Yes.")))


async def read(served: Served, enough: Callable[[list[KvEvent]], bool]) -> list[KvEvent]:
    """The first events of the stream."""
    parser, told = EventParser(), list[KvEvent]()
    async with served.client.stream("GET", "/kv_events") as answer:
        assert answer.status_code == 200
        async for body in answer.aiter_bytes():
            told += [msgspec.json.decode(data, type=KvEvent) for data in parser.feed(body)]
            if enough(told):
                break
    return told


async def test_everything_is_told_in_pieces_and_then_what_changes(fake: FakeEngine) -> None:
    names = set(range(1, 2 * MAX_NAMES_PER_EVENT + 2))
    async with serve(fake) as served:
        fake.kv_cache_view.apply_change(KvChange(pack_block_names(names), b""))
        told = await read(served, lambda told: len(told) == 4)
        assert told[0].reset is not None
        assert told[0].reset.block_size == 16
        pieces = [set(unpack_block_names(event.stored)) for event in told[1:]]
        assert [len(piece) for piece in pieces] == [MAX_NAMES_PER_EVENT, MAX_NAMES_PER_EVENT, 1]
        assert set().union(*pieces) == names

        def more(told: list[KvEvent]) -> bool:
            if len(told) == 4:
                fake.kv_cache_view.apply_change(
                    KvChange(pack_block_names([0]), pack_block_names([5]))
                )
            return len(told) == 6

        told = await read(served, more)
        assert told[4] == KvEvent(stored=pack_block_names([0]))
        assert told[5] == KvEvent(removed=pack_block_names([5]))


async def test_replicas_that_read_alike_say_so(tokenizer: Tokenizer) -> None:
    engines = [FakeEngine(tokenizer, always(says(tokenizer, "Yes."))) for _ in range(2)]
    async with serve(engines[0]) as one, serve(engines[1]) as two:
        (first,) = await read(one, bool)
        (second,) = await read(two, bool)
    assert first.reset == second.reset


async def test_who_asks_for_the_head_only_does_not_wait_for_a_body(fake: FakeEngine) -> None:
    async with serve(fake) as served:
        assert (await served.client.head("/kv_events")).status_code == 200


async def test_a_stream_does_not_keep_its_replica_from_draining(fake: FakeEngine) -> None:
    async with serve(fake) as served, served.client.stream("GET", "/kv_events") as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        served.replica.drain(None)
        async with asyncio.timeout(5):
            assert b"".join([piece async for piece in pieces]) in {b"", b": keep-alive\n\n"}
            await served.replica.wait_drained()


# --- the follower ----------------------------------------------------------------------------------

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
START = b'data: {"start":{"text":"t","block_size":16}}\n\n'


def names(field: str, *numbers: int) -> bytes:
    """An event."""
    return b"data: " + msgspec.json.encode({field: pack_block_names(numbers)}) + b"\n\n"


def cut_after(*told: bytes) -> Script:
    """A stream of these pieces, and its end."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for piece in told:
            writer.write(piece)
            await writer.drain()

    return script


def silent_after(*told: bytes) -> Script:
    """A stream of these pieces, open until the reader leaves."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await cut_after(*told)(reader, writer)
        await reader.read()

    return script


async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """There is no such stream here."""
    writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")


@dataclass
class Followed:
    """A scripted server's replica, followed."""

    replica: ReplicaEndpoint
    left: asyncio.Semaphore
    """Released when a connection is over."""
    task: asyncio.Task[None]

    async def done_with(self, connections: int) -> None:
        """Wait until so many more are over."""
        async with asyncio.timeout(30):
            for _ in range(connections):
                await self.left.acquire()

    @property
    def blocks(self) -> set[int] | None:
        """Those that it tells of; None: it does not tell."""
        index = self.replica.prefix_index
        return index.blocks if isinstance(index, EventPrefixIndex) else None


@contextlib.asynccontextmanager
async def followed(url: str, left: asyncio.Semaphore) -> AsyncIterator[Followed]:
    """The replica at this address."""
    replica = ReplicaEndpoint("r", "argosy", MODEL, Upstream(parse_endpoint(url)))
    task = asyncio.create_task(subscribe(replica, TextBlockMaps()))
    try:
        yield Followed(replica, left, task)
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        replica.upstream.close()


@contextlib.asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[Followed]:
    """Of a server that answers its connections one after the other, all further ones as the last."""
    left, turns = asyncio.Semaphore(0), itertools.count()
    open_ones: set[asyncio.Task[None] | None] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await scripts[min(next(turns), len(scripts) - 1)](reader, writer)
            writer.close()
            await writer.wait_closed()
        left.release()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with followed(url, left) as running:
            yield running
    finally:
        server.close()
        await asyncio.gather(*filter(None, open_ones))


async def test_after_a_cut_everything_is_learned_anew() -> None:
    first = cut_after(START, names("stored", 1, 2), names("removed", 1))
    second = silent_after(START + names("stored", 3)[:20], names("stored", 3)[20:])
    async with scripted(first, second) as running:
        await until(lambda: running.blocks == {3})


async def test_changes_add_up() -> None:
    told = [START, names("stored", 1, 2), names("removed", 1), names("stored", 5)]
    async with scripted(silent_after(*told)) as running:
        await until(lambda: running.blocks == {2, 5})
    async with scripted(silent_after(*told, START, names("stored", 7))) as running:
        await until(lambda: running.blocks == {7})


async def test_while_nothing_is_told_what_was_sent_is_believed() -> None:
    async with scripted(cut_after(START, names("stored", 1)), refuse) as running:
        await running.done_with(2)
        assert running.blocks is None
        running.replica.prefix_index.on_prompt_sent([b"key"])
        assert len(running.replica.prefix_index.match_prefix([b"key"])) == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(names("stored", 1), id="no start"),
        pytest.param(START + b'data: {"stored":"AAAA"}\n\n', id="half a name"),
        pytest.param(b"data: so it is\n\n", id="no JSON"),
        pytest.param(START.replace(b"16", b"0"), id="no size"),
        pytest.param(START + b'data: {"x":' + b"[" * 100_000 + b"\n\n", id="too deep"),
        pytest.param(START + names("stored", 1, 2, 3, 4), id="too much"),
    ],
)
async def test_what_cannot_be_followed_is_left(
    nonsense: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.native_subscriber.MAX_INDEXED_BLOCKS", 3)
    async with scripted(silent_after(nonsense)) as running:
        await running.done_with(1)
        assert running.blocks is None


async def test_a_stream_that_falls_silent_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.native_subscriber.STREAM_IDLE_TIMEOUT_S", 0.2)
    async with scripted(silent_after(START, names("stored", 1))) as running:
        await running.done_with(2)


async def test_a_core_that_was_lost_takes_its_blocks_with_it(fake: FakeEngine) -> None:
    async with serve(fake) as served:
        fake.kv_cache_view.apply_change(KvChange(pack_block_names([4]), b""))
        async with followed(served.url, asyncio.Semaphore(0)) as running:
            await until(lambda: running.blocks == {4})
            fake.kv_cache_view.reset()
            await until(lambda: running.blocks == set())
