"""Native KV events: the replica's event stream, and its subscription through cuts, invalid data and silence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.replica_servers import MODEL, RunningReplica, serve
from tests.support.waiting import until

from argosy.engine.serving.api_server.kv_events_handler import MAX_NAMES_PER_EVENT
from argosy.engine.serving.core_messages import KvChange
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.kv_events import TextBlockMaps, subscribe
from argosy.gateway.kv_events.native_subscriber import MAX_BYTES_PER_TURN
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.upstream import Upstream
from argosy.policy import EventPrefixIndex
from argosy.protocol import (
    EventParser,
    KvEvent,
    pack_block_names,
    parse_endpoint,
    unpack_block_names,
)

# --- the event stream ------------------------------------------------------------------------------


@pytest.fixture(name="fake")
def make_fake_engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, constant_script(reply_script(tokenizer, "Yes.")))


async def read_events(
    served: RunningReplica, is_enough: Callable[[list[KvEvent]], bool]
) -> list[KvEvent]:
    """Read events of the stream until `is_enough`."""
    parser, received = EventParser(), list[KvEvent]()
    async with served.client.stream("GET", "/kv_events") as response:
        assert response.status_code == 200
        async for body in response.aiter_bytes():
            received += [msgspec.json.decode(data, type=KvEvent) for data in parser.feed(body)]
            if is_enough(received):
                break
    return received


async def test_all_blocks_are_sent_in_batches_and_then_changes(engine: FakeEngine) -> None:
    names = set(range(1, 2 * MAX_NAMES_PER_EVENT + 2))
    async with serve(engine) as served:
        engine.kv_cache_view.apply_change(KvChange(pack_block_names(names), b""))
        received = await read_events(served, lambda received: len(received) == 4)
        assert received[0].reset is not None
        assert received[0].reset.block_size == 16
        batches = [set(unpack_block_names(event.stored)) for event in received[1:]]
        assert [len(batch) for batch in batches] == [MAX_NAMES_PER_EVENT, MAX_NAMES_PER_EVENT, 1]
        assert set().union(*batches) == names

        def change_after_four(received: list[KvEvent]) -> bool:
            if len(received) == 4:
                engine.kv_cache_view.apply_change(
                    KvChange(pack_block_names([0]), pack_block_names([5]))
                )
            return len(received) == 6

        received = await read_events(served, change_after_four)
        assert received[4] == KvEvent(stored=pack_block_names([0]))
        assert received[5] == KvEvent(removed=pack_block_names([5]))


async def test_replicas_with_same_tokenizer_report_same_reset(tokenizer: Tokenizer) -> None:
    engines = [
        FakeEngine(tokenizer, constant_script(reply_script(tokenizer, "Yes."))) for _ in range(2)
    ]
    async with serve(engines[0]) as first_server, serve(engines[1]) as second_server:
        (first,) = await read_events(first_server, bool)
        (second,) = await read_events(second_server, bool)
    assert first.reset == second.reset


async def test_head_request_does_not_wait_for_stream(engine: FakeEngine) -> None:
    async with serve(engine) as served:
        assert (await served.client.head("/kv_events")).status_code == 200


async def test_stream_does_not_delay_drain(engine: FakeEngine) -> None:
    async with serve(engine) as served, served.client.stream("GET", "/kv_events") as response:
        pieces = response.aiter_bytes()
        await anext(pieces)
        served.replica.drain(None)
        async with asyncio.timeout(30):
            assert b"".join([piece async for piece in pieces]) in {b"", b": keep-alive\n\n"}
            await served.replica.wait_drained()


# --- the subscription ------------------------------------------------------------------------------

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
START = b'data: {"reset":{"tokenizer":"t","block_size":16}}\n\n'


def format_event(field: str, *numbers: int) -> bytes:
    """Return an event with these block names."""
    return b"data: " + msgspec.json.encode({field: pack_block_names(numbers)}) + b"\n\n"


def send_and_close(*events: bytes) -> Script:
    """Return a script that sends these events and closes the connection."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for event in events:
            writer.write(event)
            await writer.drain()

    return script


def send_and_wait(*events: bytes) -> Script:
    """Return a script that sends these events and waits for the client to disconnect."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send_and_close(*events)(reader, writer)
        await reader.read()

    return script


async def respond_not_found(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The server has no event stream."""
    writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")


@dataclass
class Subscription:
    """The replica of a scripted server, with a running subscription."""

    replica: ReplicaEndpoint
    disconnects: asyncio.Semaphore
    """Released for each closed connection."""
    task: asyncio.Task[None]

    async def wait_for_disconnects(self, connections: int) -> None:
        """Wait until this many more connections are closed."""
        async with asyncio.timeout(30):
            for _ in range(connections):
                await self.disconnects.acquire()

    @property
    def blocks(self) -> set[int] | None:
        """Names of the indexed blocks, or None without events."""
        index = self.replica.prefix_index
        return index.blocks if isinstance(index, EventPrefixIndex) else None


@contextlib.asynccontextmanager
async def subscribe_to(url: str, disconnects: asyncio.Semaphore) -> AsyncIterator[Subscription]:
    """Subscribe to the replica at this address."""
    replica = ReplicaEndpoint("r", "argosy", MODEL, Upstream(parse_endpoint(url)))
    task = asyncio.create_task(subscribe(replica, TextBlockMaps()))
    try:
        yield Subscription(replica, disconnects, task)
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        replica.upstream.close()


@contextlib.asynccontextmanager
async def subscribe_to_scripts(*scripts: Script) -> AsyncIterator[Subscription]:
    """Subscribe to a server that runs one script per connection, and the last script for all further connections."""
    disconnects, connection_numbers = asyncio.Semaphore(0), itertools.count()
    connection_tasks: set[asyncio.Task[None] | None] = set()

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection_tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await scripts[min(next(connection_numbers), len(scripts) - 1)](reader, writer)
            writer.close()
            await writer.wait_closed()
        disconnects.release()

    server = await asyncio.start_server(serve_connection, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with subscribe_to(url, disconnects) as subscription:
            yield subscription
    finally:
        server.close()
        await asyncio.gather(*filter(None, connection_tasks))


async def test_index_is_rebuilt_after_cut() -> None:
    first = send_and_close(START, format_event("stored", 1, 2), format_event("removed", 1))
    second = send_and_wait(START + format_event("stored", 3)[:20], format_event("stored", 3)[20:])
    async with subscribe_to_scripts(first, second) as subscription:
        await until(lambda: subscription.blocks == {3})


async def test_changes_add_up() -> None:
    events = [
        START,
        format_event("stored", 1, 2),
        format_event("removed", 1),
        format_event("stored", 5),
    ]
    async with subscribe_to_scripts(send_and_wait(*events)) as subscription:
        await until(lambda: subscription.blocks == {2, 5})
    async with subscribe_to_scripts(
        send_and_wait(*events, START, format_event("stored", 7))
    ) as subscription:
        await until(lambda: subscription.blocks == {7})


async def test_sent_prompts_are_estimated_as_cached_without_events() -> None:
    async with subscribe_to_scripts(
        send_and_close(START, format_event("stored", 1)), respond_not_found
    ) as subscription:
        await subscription.wait_for_disconnects(2)
        assert subscription.blocks is None
        subscription.replica.prefix_index.on_prompt_sent([b"key"])
        assert len(subscription.replica.prefix_index.match_prefix([b"key"])) == 1


@pytest.mark.parametrize(
    "invalid_events",
    [
        pytest.param(format_event("stored", 1), id="no-reset"),
        pytest.param(START + b'data: {"stored":"AAAA"}\n\n', id="half-a-name"),
        pytest.param(b"data: so it is\n\n", id="not-json"),
        pytest.param(START.replace(b"16", b"0"), id="no-block-size"),
        pytest.param(START + b'data: {"x":' + b"[" * 100_000 + b"\n\n", id="nested-too-deeply"),
        pytest.param(START + format_event("stored", 1, 2, 3, 4), id="too-many-blocks"),
    ],
)
async def test_invalid_events_end_subscription(
    invalid_events: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.native_subscriber.MAX_INDEXED_BLOCKS", 3)
    async with subscribe_to_scripts(send_and_wait(invalid_events)) as subscription:
        await subscription.wait_for_disconnects(1)
        assert subscription.blocks is None


@pytest.mark.parametrize("flood", [START, b":\n\n"], ids=["resets", "comments"])
async def test_other_work_runs_between_parts_of_a_flood(
    flood: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, parts = itertools.count(), list[tuple[int, int]]()
    original = EventParser.feed

    def feed(parser: EventParser, chunk: bytes) -> list[bytes]:
        parts.append((turn, len(chunk)))
        return original(parser, chunk)

    monkeypatch.setattr(EventParser, "feed", feed)
    turn = 0
    events = START, flood * (500_000 // len(flood)), START + format_event("stored", 5)
    with capture_logs() as logs:
        async with subscribe_to_scripts(send_and_wait(*events)) as subscription:
            async with asyncio.timeout(30):
                while subscription.blocks != {5}:
                    turn = next(turns)
                    await asyncio.sleep(0)
    assert len(logs) == 1, "each reset wrote to the log"
    assert len({turn for turn, _ in parts}) == len(parts)
    assert max(size for _, size in parts) <= MAX_BYTES_PER_TURN


async def test_silent_stream_is_reopened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.native_subscriber.STREAM_IDLE_TIMEOUT_S", 0.2)
    async with subscribe_to_scripts(
        send_and_wait(START, format_event("stored", 1))
    ) as subscription:
        await subscription.wait_for_disconnects(2)


async def test_lost_engine_core_clears_index(engine: FakeEngine) -> None:
    async with serve(engine) as served:
        engine.kv_cache_view.apply_change(KvChange(pack_block_names([4]), b""))
        async with subscribe_to(served.url, asyncio.Semaphore(0)) as subscription:
            await until(lambda: subscription.blocks == {4})
            engine.kv_cache_view.reset()
            await until(lambda: subscription.blocks == set())
