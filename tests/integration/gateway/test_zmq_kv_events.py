"""KV events of vLLM and SGLang over ZeroMQ: subscription, gaps, invalid messages and routing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import Sglang, Vllm
from tests.support.fake_backend import serve_backends
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.kv_event_publisher import (
    CLEARED,
    Event,
    KvEventPublisher,
    blocks_removed,
    blocks_stored,
    encode_batch,
    kv_event_publisher,
    to_array,
)
from tests.support.placed_requests import RoutedRequest, last_decision
from tests.support.waiting import until

from argosy.deployment import BackendKind, KvEventAddress, ReplicaConfig
from argosy.gateway.kv_events.subscription import subscribe
from argosy.gateway.kv_events.text_block_maps import TextBlockMaps
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import BLOCK_BYTES, EstimatedPrefixIndex, EventPrefixIndex, compute_block_names
from argosy.protocol import parse_endpoint

SIZE = 16
ENCODINGS = pytest.mark.parametrize("encode", [dict, to_array], ids=["maps", "arrays"])
Encoder = Callable[[Event], Any]


def make_block(number: int, parent: int | None = None, **fields: object) -> Event:
    """Return an event for a block of equal tokens, whose hash is the token."""
    return blocks_stored([number], [number] * SIZE, parent, **fields)


DEEPLY_NESTED_BATCH = encode_batch(make_block(1, extra_keys=[["*"]])).replace(
    b"\xa1*", b"\x91" * 100_000 + b"\xc0"
)


@contextlib.asynccontextmanager
async def follow_replica(
    kind: BackendKind, address: KvEventAddress | None, url: str = "http://127.0.0.1:9"
) -> AsyncIterator[ReplicaEndpoint]:
    """Subscribe to the events of a replica with this address."""
    replica = ReplicaEndpoint("r", kind, "cat", Upstream(parse_endpoint(url)), kv_events=address)
    task = asyncio.create_task(subscribe(replica, TextBlockMaps()))
    try:
        yield replica
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})
        replica.upstream.close()


def count_blocks(replica: ReplicaEndpoint) -> int | None:
    """Return the number of indexed blocks, or None without events."""
    index = replica.prefix_index
    return len(index.blocks) if isinstance(index, EventPrefixIndex) else None


@pytest.fixture(name="soon", autouse=True)
def make_retries_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "argosy.gateway.kv_events.zmq_subscriber.UNSUPPORTED_RETRY_INTERVAL_S", 0.01
    )


@contextlib.asynccontextmanager
async def serve_connections(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> AsyncIterator[KvEventAddress]:
    """Run a server of another protocol, and wait for its connections at the end."""
    tasks: list[asyncio.Task[None]] = []

    def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(answer(reader, writer)))

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    try:
        yield KvEventAddress(endpoint=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        await asyncio.gather(*tasks)


# --- subscription ----------------------------------------------------------------------------------


@ENCODINGS
async def test_changes_add_up(encode: Encoder) -> None:
    async with (
        kv_event_publisher() as publisher,
        follow_replica("sglang", KvEventAddress(endpoint=publisher.endpoint)) as replica,
    ):
        await publisher.wait_for_subscriber()
        assert count_blocks(replica) is None
        await publisher.publish(
            encode(make_block(1)), encode(blocks_stored([2, 3], [2] * 2 * SIZE, 1))
        )
        await until(lambda: count_blocks(replica) == 3)
        await publisher.publish(encode(make_block(2, 1)), encode(blocks_removed(3, 9)))
        await until(lambda: count_blocks(replica) == 2)
        await publisher.publish(encode(blocks_removed(2)))  # removes one of two copies
        await publisher.publish(encode(make_block(4, 2)))
        await until(lambda: count_blocks(replica) == 3)
        replica.prefix_index.on_prompt_sent([b"key"])
        await publisher.publish(encode(CLEARED))
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

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.release()
        await copy_until_closed(reader, writer, is_silent)

    is_silent = asyncio.Event()
    is_silent.set()
    async with (
        serve_connections(stay_silent) as endpoint,
        follow_replica("sglang", endpoint) as replica,
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
            serve_connections(proxy) as endpoint,
            follow_replica("vllm", endpoint) as replica,
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
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            if not is_silent.is_set():
                target.write(data)
    target.close()
    with contextlib.suppress(ConnectionError):
        await target.wait_closed()


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
async def run_fleet(backend_class: type[Vllm | Sglang]) -> AsyncIterator[PublishingFleet]:
    servers = [backend_class(prompt_ids=IDS), backend_class(prompt_ids=IDS)]
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


KINDS = pytest.mark.parametrize("backend_class", [Vllm, Sglang])


@KINDS
async def test_prompt_computed_for_other_clients_is_found(backend_class: type[Vllm]) -> None:
    async with run_fleet(backend_class) as fleet:
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


@KINDS
async def test_salted_prompts_match_only_their_salt(backend_class: type[Vllm]) -> None:
    async with run_fleet(backend_class) as fleet:
        for salt in ("mine", "yours", None):
            await fleet.send(cache_salt=salt)
            await fleet.send(cache_salt=salt)
        for replica in fleet.gateway.replicas:
            replica.prefix_index.clear()
        salted: Event = {"extra_keys": [["mine"], *[None] * 15]}
        await fleet.publish_prompt(
            0, **(salted if backend_class is Vllm else {"cache_salt": "mine"})
        )
        mine = compute_block_names("mine", array("I", IDS), SIZE)
        index = fleet.gateway.replicas[0].prefix_index
        assert isinstance(index, EventPrefixIndex)
        assert index.blocks == set(mine)
        assert await fleet.needs_prefill(cache_salt="yours") == [True, True]
        assert await fleet.needs_prefill(cache_salt=None) == [True, True]
        fleet.gateway.replicas[1].prefix_index.clear()
        assert await fleet.needs_prefill(cache_salt="mine") == [False, True]
