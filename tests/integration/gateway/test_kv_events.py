"""What a replica tells of its prefix cache, and how a gateway follows it through cuts, nonsense and silence."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from tests.integration.fake_engine import FakeEngine, always, says
from tests.integration.serving import MODEL, Served, serve

from argosy.engine.serving.http.kv_events import MOST_NAMES
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.engine.serving.wire import KvChange
from argosy.gateway.kv_events import KvFollower, TextsOf
from argosy.gateway.replicas import Replica
from argosy.gateway.upstream import Upstream
from argosy.policy import ExactIndex, PrefixIndex
from argosy.protocol import EventParser, KvEvent, pack_names, parse_endpoint, unpack_names


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


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
    names = set(range(1, 2 * MOST_NAMES + 2))
    async with serve(fake) as served:
        fake.kv.change(KvChange(pack_names(names), b""))
        told = await read(served, lambda told: len(told) == 4)
        assert told[0].start is not None
        assert told[0].start.block_size == 16
        pieces = [set(unpack_names(event.stored)) for event in told[1:]]
        assert [len(piece) for piece in pieces] == [MOST_NAMES, MOST_NAMES, 1]
        assert set().union(*pieces) == names

        def more(told: list[KvEvent]) -> bool:
            if len(told) == 4:
                fake.kv.change(KvChange(pack_names([0]), pack_names([5])))
            return len(told) == 6

        told = await read(served, more)
        assert told[4] == KvEvent(stored=pack_names([0]))
        assert told[5] == KvEvent(removed=pack_names([5]))


async def test_replicas_that_read_alike_say_so(tokenizer: Tokenizer) -> None:
    engines = [FakeEngine(tokenizer, always(says(tokenizer, "Yes."))) for _ in range(2)]
    async with serve(engines[0]) as one, serve(engines[1]) as two:
        (first,) = await read(one, bool)
        (second,) = await read(two, bool)
    assert first.start == second.start


async def test_a_stream_does_not_keep_its_replica_from_draining(fake: FakeEngine) -> None:
    async with serve(fake) as served, served.client.stream("GET", "/kv_events") as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        served.replica.drain(None)
        async with asyncio.timeout(5):
            assert b"".join([piece async for piece in pieces]) in {b"", b": keep-alive\n\n"}
            await served.replica.drained()


# --- the follower ----------------------------------------------------------------------------------

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def following(url: str) -> AsyncIterator[tuple[Replica, asyncio.Task[None]]]:
    """A replica at this address, followed."""
    replica = Replica("r", "argosy", MODEL, Upstream(parse_endpoint(url)))
    task = asyncio.create_task(KvFollower(replica, TextsOf()).run())
    try:
        yield replica, task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        replica.upstream.close()


@contextlib.asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that answers its connections one after the other as scripted, the last one again and again."""
    seen: list[int] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            seen.append(len(seen))
            await scripts[min(len(seen), len(scripts)) - 1](writer)
        writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


def stream(*told: bytes, end: asyncio.Event | None = None) -> Script:
    """These pieces, and then the cut, or nothing until `end`."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for piece in told:
            writer.write(piece)
            await writer.drain()
        if end is not None:
            await end.wait()

    return script


START = b'data: {"start":{"text":"t","block_size":16}}\n\n'


def names(field: str, *numbers: int) -> bytes:
    """An event."""
    told = {field: pack_names(numbers)}
    return b"data: " + msgspec.json.encode(told) + b"\n\n"


def holds(replica: Replica) -> set[int] | None:
    """The blocks that it tells of; None: it does not tell."""
    index = replica.prefixes
    return index.blocks if isinstance(index, ExactIndex) else None


async def test_after_a_cut_everything_is_learned_anew() -> None:
    end = asyncio.Event()
    first = stream(START, names("stored", 1, 2), names("removed", 1))
    second = stream(START + names("stored", 3)[:20], names("stored", 3)[20:], end=end)
    async with scripted(first, second) as (url, _), following(url) as (replica, _):
        await until(lambda: holds(replica) == {3})
        end.set()


async def test_while_nothing_is_told_what_was_sent_is_believed() -> None:
    gate = asyncio.Event()

    async def refuse(writer: asyncio.StreamWriter) -> None:
        gate.set()
        writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")

    async with (
        scripted(stream(START, names("stored", 1)), refuse) as (url, _),
        following(url) as (replica, _),
    ):
        await gate.wait()
        assert holds(replica) is None
        replica.prefixes.sent([b"key"])
        assert len(replica.prefixes.find([b"key"])) == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(names("stored", 1), id="no start"),
        pytest.param(START + b'data: {"stored":"AAAA"}\n\n', id="half a name"),
        pytest.param(b"data: so it is\n\n", id="no JSON"),
    ],
)
async def test_nonsense_is_not_followed(nonsense: bytes) -> None:
    never = asyncio.Event()
    async with (
        scripted(stream(nonsense, end=never)) as (url, seen),
        following(url) as (replica, task),
    ):
        await until(lambda: bool(seen))
        for _ in range(20):
            await asyncio.sleep(0)
        await until(lambda: holds(replica) is None)
        assert not task.done()
        never.set()


async def test_more_than_can_be_followed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.MOST_HELD", 3)
    never, asked = asyncio.Event(), asyncio.Event()

    async def much(writer: asyncio.StreamWriter) -> None:
        asked.set()
        await stream(START, names("stored", 1, 2, 3, 4), end=never)(writer)

    async with scripted(much) as (url, _), following(url) as (replica, _):
        await asked.wait()
        await until(lambda: isinstance(replica.prefixes, PrefixIndex))
        never.set()


async def test_an_unreachable_replica_is_tried_again(fake: FakeEngine) -> None:
    async with serve(fake) as served:
        fake.kv.change(KvChange(pack_names([4]), b""))
        async with following(served.url) as (replica, _):
            await until(lambda: holds(replica) == {4})
            fake.kv.reset()
            await until(lambda: holds(replica) == set())
    async with following(served.url) as (replica, task):
        for _ in range(5):
            await asyncio.sleep(0)
        assert holds(replica) is None
        assert not task.done()
