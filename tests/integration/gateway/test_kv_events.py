"""KV events of replicas: native streams and ZeroMQ of vLLM and SGLang; subscription, gaps, invalid data and routing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import Sglang, Vllm
from tests.support.byte_server import Handler, serve_handler
from tests.support.fake_backend import serve_backends
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.kv_event_publisher import (
    CLEARED,
    Event,
    KvEventPublisher,
    blocks_removed,
    blocks_stored,
    encode_batch,
    kv_event_publisher,
)
from tests.support.placed_requests import RoutedRequest, last_decision
from tests.support.replica_servers import RunningReplica, serve
from tests.support.waiting import until

from argosy.deployment import BackendKind, KvEventAddress, ReplicaConfig
from argosy.engine.serving.api_server.kv_events_handler import MAX_NAMES_PER_EVENT
from argosy.engine.serving.core_messages import KvChange
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.kv_events import TextBlockMaps, subscribe
from argosy.gateway.kv_events.native_subscriber import MAX_BYTES_PER_TURN
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.upstream import Upstream
from argosy.policy import BLOCK_BYTES, EstimatedPrefixIndex, EventPrefixIndex, compute_block_names
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

START = b'data: {"reset":{"tokenizer":"t","block_size":16}}\n\n'


def format_event(field: str, *numbers: int) -> bytes:
    """Return an event with these block names."""
    return b"data: " + msgspec.json.encode({field: pack_block_names(numbers)}) + b"\n\n"


def send_and_close(*events: bytes) -> Handler:
    """Return a script that sends these events and closes the connection."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for event in events:
            writer.write(event)
            await writer.drain()

    return script


def send_and_wait(*events: bytes) -> Handler:
    """Return a script that sends these events and waits for the client to disconnect."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send_and_close(*events)(reader, writer)
        await reader.read()

    return script


async def respond_not_found(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The server has no event stream."""
    writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")


@contextlib.asynccontextmanager
async def follow_replica(
    kind: BackendKind, address: KvEventAddress | None, url: str = "http://127.0.0.1:9"
) -> AsyncIterator[ReplicaEndpoint]:
    """Subscribe to the events of a replica."""
    replica = ReplicaEndpoint("r", kind, "cat", Upstream(parse_endpoint(url)), kv_events=address)
    task = asyncio.create_task(subscribe(replica, TextBlockMaps()))
    try:
        yield replica
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})
        replica.upstream.close()


def indexed_blocks(replica: ReplicaEndpoint) -> set[int] | None:
    """Return the names of the indexed blocks, or None without events."""
    index = replica.prefix_index
    return index.blocks if isinstance(index, EventPrefixIndex) else None


def count_blocks(replica: ReplicaEndpoint) -> int | None:
    """Return the number of indexed blocks, or None without events."""
    blocks = indexed_blocks(replica)
    return None if blocks is None else len(blocks)


@contextlib.asynccontextmanager
async def follow_scripts(
    *scripts: Handler,
) -> AsyncIterator[tuple[ReplicaEndpoint, asyncio.Semaphore]]:
    """Subscribe to a native server that runs one script per connection, and the last one for all further connections.

    Yields the replica, and a semaphore that is released for each closed connection.
    """
    disconnects, connection_numbers = asyncio.Semaphore(0), itertools.count()

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await scripts[min(next(connection_numbers), len(scripts) - 1)](reader, writer)
            writer.close()
            await writer.wait_closed()
        disconnects.release()

    async with (
        serve_handler(serve_connection) as url,
        follow_replica("argosy", None, url) as replica,
        asyncio.timeout(30),
    ):
        yield replica, disconnects


async def test_index_is_rebuilt_after_cut() -> None:
    first = send_and_close(START, format_event("stored", 1, 2), format_event("removed", 1))
    second = send_and_wait(START + format_event("stored", 3)[:20], format_event("stored", 3)[20:])
    async with follow_scripts(first, second) as (replica, _):
        await until(lambda: indexed_blocks(replica) == {3})


async def test_changes_add_up() -> None:
    events = [
        START,
        format_event("stored", 1, 2),
        format_event("removed", 1),
        format_event("stored", 5),
    ]
    async with follow_scripts(send_and_wait(*events)) as (replica, _):
        await until(lambda: indexed_blocks(replica) == {2, 5})
    events += [START, format_event("stored", 7)]
    async with follow_scripts(send_and_wait(*events)) as (replica, _):
        await until(lambda: indexed_blocks(replica) == {7})


async def test_sent_prompts_are_estimated_as_cached_without_events() -> None:
    async with follow_scripts(
        send_and_close(START, format_event("stored", 1)), respond_not_found
    ) as (replica, disconnects):
        await disconnects.acquire()
        await disconnects.acquire()
        assert indexed_blocks(replica) is None
        replica.prefix_index.on_prompt_sent([b"key"])
        assert len(replica.prefix_index.match_prefix([b"key"])) == 1


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
    async with follow_scripts(send_and_wait(invalid_events)) as (replica, disconnects):
        await disconnects.acquire()
        assert indexed_blocks(replica) is None


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
        async with follow_scripts(send_and_wait(*events)) as (replica, _):
            while indexed_blocks(replica) != {5}:
                turn = next(turns)
                await asyncio.sleep(0)
    assert len(logs) == 1, "each reset wrote to the log"
    assert len({turn for turn, _ in parts}) == len(parts)
    assert max(size for _, size in parts) <= MAX_BYTES_PER_TURN


async def test_silent_stream_is_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.native_subscriber.STREAM_IDLE_TIMEOUT_S", 0.2)
    events = send_and_wait(START, format_event("stored", 1))
    async with follow_scripts(events) as (_, disconnects):
        await disconnects.acquire()
        await disconnects.acquire()


async def test_lost_engine_core_clears_index(engine: FakeEngine) -> None:
    async with serve(engine) as served:
        engine.kv_cache_view.apply_change(KvChange(pack_block_names([4]), b""))
        async with follow_replica("argosy", None, served.url) as replica:
            await until(lambda: indexed_blocks(replica) == {4})
            engine.kv_cache_view.reset()
            await until(lambda: indexed_blocks(replica) == set())


SIZE = 16


def make_block(number: int, parent: int | None = None, **fields: object) -> Event:
    """Return an event for a block of equal tokens, whose hash is the token."""
    return blocks_stored([number], [number] * SIZE, parent, **fields)


DEEPLY_NESTED_BATCH = encode_batch(make_block(1, extra_keys=[["*"]])).replace(
    b"\xa1*", b"\x91" * 100_000 + b"\xc0"
)


@pytest.fixture(name="soon", autouse=True)
def make_retries_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "argosy.gateway.kv_events.zmq_subscriber.UNSUPPORTED_RETRY_INTERVAL_S", 0.01
    )


# --- subscription ----------------------------------------------------------------------------------


async def test_published_changes_add_up() -> None:
    async with (
        kv_event_publisher() as publisher,
        follow_replica("sglang", KvEventAddress(endpoint=publisher.endpoint)) as replica,
    ):
        await publisher.wait_for_subscriber()
        assert count_blocks(replica) is None
        await publisher.publish(make_block(1), blocks_stored([2, 3], [2] * 2 * SIZE, 1))
        await until(lambda: count_blocks(replica) == 3)
        await publisher.publish(make_block(2, 1), blocks_removed(3, 9))
        await until(lambda: count_blocks(replica) == 2)
        await publisher.publish(blocks_removed(2))  # removes one of two copies
        await publisher.publish(make_block(4, 2))
        await until(lambda: count_blocks(replica) == 3)
        replica.prefix_index.on_prompt_sent([b"key"])
        await publisher.publish(CLEARED)
        await until(lambda: count_blocks(replica) == 0)
        assert replica.prefix_index.match_prefix([b"key"]) == []


async def test_earlier_blocks_are_known_after_replay() -> None:
    async with kv_event_publisher(topics=False) as publisher:
        for number in (1, 2, 3):
            publisher.lose_batch(encode_batch(make_block(number)))
        for replay, expected in ((publisher.replay, 4), (None, 1)):
            address = KvEventAddress(endpoint=publisher.endpoint, replay=replay)
            async with follow_replica("vllm", address) as replica:
                await publisher.wait_for_subscriber()
                await until(lambda: replay is None or count_blocks(replica) == 3)  # noqa: B023
                await publisher.publish(make_block(4))
                await until(lambda: count_blocks(replica) == expected)  # noqa: B023
            publisher.lose_batch(encode_batch(blocks_removed(4)))


@pytest.mark.parametrize("replays", [True, False])
async def test_missed_events_are_replayed_or_index_is_cleared(replays: bool) -> None:
    async with kv_event_publisher() as publisher:
        replay = publisher.replay if replays else None
        async with follow_replica(
            "vllm", KvEventAddress(endpoint=publisher.endpoint, replay=replay)
        ) as replica:
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(1), make_block(2))
            await until(lambda: count_blocks(replica) == 2)
            replica.prefix_index.on_prompt_sent([b"key"])
            publisher.lose_batch(encode_batch(blocks_removed(1), make_block(3)))
            publisher.lose_batch(encode_batch(make_block(4)))
            await publisher.publish(make_block(5))
            await until(lambda: count_blocks(replica) == (4 if replays else 1))
            assert len(replica.prefix_index.match_prefix([b"key"])) == replays


async def test_events_too_old_for_replay_are_dropped_from_index() -> None:
    async with kv_event_publisher() as publisher:
        address = KvEventAddress(endpoint=publisher.endpoint, replay=publisher.replay)
        async with follow_replica("vllm", address) as replica:
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(1), make_block(2))
            await until(lambda: count_blocks(replica) == 2)
            for number in range(200):
                publisher.lose_batch(encode_batch(make_block(100 + number)))
            await publisher.publish(make_block(5))
            await until(lambda: count_blocks(replica) == 100)


async def test_missing_replay_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.REPLAY_TIMEOUT_S", 0.05)
    async with kv_event_publisher() as publisher:
        address = KvEventAddress(endpoint=publisher.endpoint, replay="tcp://127.0.0.1:9")
        async with follow_replica("vllm", address) as replica:
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(1))
            await until(lambda: count_blocks(replica) == 1)


async def test_restarted_publisher_is_followed_from_scratch(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    async with follow_replica("vllm", KvEventAddress(endpoint=endpoint)) as replica:
        async with kv_event_publisher(endpoint) as publisher:
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(1), make_block(2))
            await until(lambda: count_blocks(replica) == 2)
        await until(lambda: count_blocks(replica) is None)
        replica.prefix_index.on_prompt_sent([b"key"])
        assert len(replica.prefix_index.match_prefix([b"key"])) == 1
        async with kv_event_publisher(endpoint) as publisher:
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(3))
            await until(lambda: count_blocks(replica) == 1)


@pytest.mark.parametrize(
    "invalid_frames",
    [
        pytest.param([b"kv"], id="one-frame"),
        pytest.param([b"kv", b"1", encode_batch()], id="invalid-sequence-number"),
        pytest.param([b"kv", bytes(8), b"so it is"], id="invalid-batch"),
        pytest.param(
            [b"kv", bytes(8), encode_batch(blocks_stored([1], [-1] * SIZE))], id="invalid-token"
        ),
        pytest.param(
            [b"kv", bytes(8), encode_batch(*map(make_block, range(5)))], id="too-many-blocks"
        ),
        pytest.param(
            [b"kv", bytes(8), encode_batch(blocks_stored([1], [1]))], id="block-too-small"
        ),
        pytest.param([b"kv", bytes(8), DEEPLY_NESTED_BATCH], id="nested-too-deeply"),
    ],
)
async def test_invalid_messages_end_subscription_and_it_is_retried(
    invalid_frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscriber.MAX_NAMED_BLOCKS", 4)
    async with (
        kv_event_publisher() as publisher,
        follow_replica("vllm", KvEventAddress(endpoint=publisher.endpoint)) as replica,
    ):
        await publisher.wait_for_subscriber()
        with capture_logs() as logs:
            await publisher.send_frames(*invalid_frames)
            await publisher.wait_for_subscriber()
        assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [
            "kv_events_subscription_failed"
        ]
        assert count_blocks(replica) is None
        await publisher.publish(make_block(1))
        await until(lambda: count_blocks(replica) == 1)


async def test_missing_publisher_is_logged_with_remedy() -> None:
    with capture_logs() as logs:
        async with follow_replica("vllm", KvEventAddress(endpoint="tcp://127.0.0.1:9")):
            await until(lambda: len(logs) > 1)
    reason = (
        "no KV event publisher at tcp://127.0.0.1:9. "
        "Start the engine with KV events, or correct `kv_events` of this replica."
    )
    assert {(entry["event"], entry["reason"]) for entry in logs} == {
        ("kv_events_subscription_failed", reason)
    }


async def test_peer_without_handshake_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.HANDSHAKE_TIMEOUT_S", 0.05)
    connected = asyncio.Semaphore(0)

    async def stay_silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        connected.release()
        await reader.read()

    async with (
        serve_handler(stay_silent) as url,
        follow_replica("sglang", KvEventAddress(endpoint=url.replace("http", "tcp"))) as replica,
    ):
        for _ in range(2):
            await connected.acquire()
        assert count_blocks(replica) is None


async def test_publisher_without_heartbeats_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after the loss of its machine, no data arrives and heartbeats are not answered."""
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.HEARTBEAT_INTERVAL_MS", 50)
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.HEARTBEAT_TIMEOUT_MS", 100)
    is_silent = asyncio.Event()
    async with kv_event_publisher() as publisher:

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream_reader, upstream_writer = await asyncio.open_connection(
                "127.0.0.1", publisher.port
            )
            copies = [
                copy_until_closed(reader, upstream_writer, asyncio.Event()),
                copy_until_closed(upstream_reader, writer, is_silent),
            ]
            await asyncio.gather(*copies)

        async with (
            serve_handler(proxy) as url,
            follow_replica("vllm", KvEventAddress(endpoint=url.replace("http", "tcp"))) as replica,
        ):
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(1))
            await until(lambda: count_blocks(replica) == 1)
            is_silent.set()
            await until(lambda: count_blocks(replica) is None)
            is_silent.clear()
            await publisher.wait_for_subscriber()


async def copy_until_closed(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, is_silent: asyncio.Event
) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if not is_silent.is_set():
                    target.write(data)
    finally:
        target.close()


async def test_publisher_address_is_read_from_engine() -> None:
    server = Vllm()
    async with kv_event_publisher() as publisher, serve_backends(server):
        server.kv_event_sources = {"0": {"endpoint": f"tcp://*:{publisher.port}", "topic": ""}}
        async with follow_replica("vllm", None, server.url) as replica:
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(1))
            await until(lambda: count_blocks(replica) == 1)


async def test_engine_without_publisher_is_queried_again() -> None:
    server = Sglang()
    async with serve_backends(server), follow_replica("sglang", None, server.url) as replica:
        await until(lambda: server.fetched_paths.count("/server_info") > 1)
        assert isinstance(replica.prefix_index, EstimatedPrefixIndex)


async def test_subscription_starts_when_kind_is_detected() -> None:
    async with (
        kv_event_publisher() as publisher,
        follow_replica("auto", KvEventAddress(endpoint=publisher.endpoint)) as replica,
    ):
        replica.kind = "vllm"
        await publisher.wait_for_subscriber()
        await publisher.publish(make_block(1))
        await until(lambda: count_blocks(replica) == 1)


async def test_engine_without_events_has_no_subscription() -> None:
    replica = ReplicaEndpoint("r", "openai", "cat", Upstream(parse_endpoint("http://127.0.0.1:9")))
    await subscribe(replica, TextBlockMaps())


# --- routing ---------------------------------------------------------------------------------------

TEXT = ("Once upon a time there was a king who had a daughter. " * 30)[: 4 * BLOCK_BYTES - 2]
"""The text's JSON is four blocks of text."""
IDS = tuple(range(1000, 1256))


class PublishingFleet:
    """Two publishing backends behind a gateway with round-robin routing."""

    def __init__(
        self, publishers: list[KvEventPublisher], gateway: GatewayHarness, recorder: RecordingFilter
    ) -> None:
        self.publishers = publishers
        self.gateway = gateway
        self._recorder = recorder
        self._hashes = itertools.count(1)

    async def send(self, **extra: object) -> RoutedRequest:
        body = {"model": "big", "prompt": TEXT, "max_tokens": 2, "stream": True} | extra
        response = await self.gateway.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.text.endswith("data: [DONE]\n\n")
        assert 'prompt_token_ids":[' not in response.text
        return last_decision(self._recorder.completed[-1])

    async def needs_prefill(self, **extra: object) -> list[bool]:
        """Send a request, and return which replicas would have to compute part of the prompt according to the trace."""
        await self.send(**extra)
        trace = self.gateway.traces.find(self._recorder.completed[-1].trace.response_id)
        assert trace is not None
        candidates = trace.to_dict()["attempts"][0]["candidates"]
        candidates = {each["replica"]: each["prefill_s"] > 0 for each in candidates}
        return [candidates[replica.name] for replica in self.gateway.replicas]

    async def publish_prompt(self, number: int, **fields: object) -> list[int]:
        """Publish that a replica holds the prompt's blocks, and return their hashes."""
        hashes = [next(self._hashes) for _ in range(len(IDS) // SIZE)]
        await self.publishers[number].publish(blocks_stored(hashes, IDS, **fields))
        await self.wait_for_blocks(number, len(hashes))
        return hashes

    async def wait_for_blocks(self, number: int, count: int) -> None:
        await until(lambda: count_blocks(self.gateway.replicas[number]) == count)


@contextlib.asynccontextmanager
async def run_fleet() -> AsyncIterator[PublishingFleet]:
    servers = [Vllm(prompt_ids=IDS), Vllm(prompt_ids=IDS)]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serve_backends(*servers))
        publishers = [await stack.enter_async_context(kv_event_publisher()) for _ in servers]
        recorder = RecordingFilter()
        replica_configs = [
            ReplicaConfig(
                url=server.url, model="cat", kv_events=KvEventAddress(endpoint=publisher.endpoint)
            )
            for server, publisher in zip(servers, publishers, strict=True)
        ]
        gateway = await stack.enter_async_context(run_gateway([recorder], *replica_configs))
        fleet = PublishingFleet(publishers, gateway, recorder)
        for number, publisher in enumerate(publishers):
            await publisher.wait_for_subscriber()
            await publisher.publish(make_block(1000))  # makes the gateway aware of the block size
            await fleet.wait_for_blocks(number, 1)
            await publisher.publish(CLEARED)
            await fleet.wait_for_blocks(number, 0)
        yield fleet


async def test_prompt_computed_for_other_clients_is_found() -> None:
    async with run_fleet() as fleet:
        first = await fleet.send()
        warm = fleet.gateway.replicas.index(first.replica)
        hashes = await fleet.publish_prompt(warm)
        assert await fleet.needs_prefill() == [number != warm for number in range(2)]
        fleet.gateway.replicas[
            1 - warm
        ].prefix_index.clear()  # discards the estimate from the request just sent
        await fleet.publish_prompt(1 - warm)
        assert await fleet.needs_prefill() == [False, False]
        await fleet.publishers[warm].publish(blocks_removed(*hashes[4:]))
        await fleet.wait_for_blocks(warm, 4)
        assert await fleet.needs_prefill() == [number == warm for number in range(2)]


async def test_salted_prompts_match_only_their_salt() -> None:
    async with run_fleet() as fleet:
        for salt in ("mine", "yours", None):
            await fleet.send(cache_salt=salt)
            await fleet.send(cache_salt=salt)
        for replica in fleet.gateway.replicas:
            replica.prefix_index.clear()
        await fleet.publish_prompt(0, extra_keys=[["mine"], *[None] * 15])
        mine = compute_block_names("mine", array("I", IDS), SIZE)
        index = fleet.gateway.replicas[0].prefix_index
        assert isinstance(index, EventPrefixIndex)
        assert index.blocks == set(mine)
        assert await fleet.needs_prefill(cache_salt="yours") == [True, True]
        assert await fleet.needs_prefill(cache_salt=None) == [True, True]
        fleet.gateway.replicas[1].prefix_index.clear()
        assert await fleet.needs_prefill(cache_salt="mine") == [False, True]
