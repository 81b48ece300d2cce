"""What vLLM and SGLang publish of their prefix caches is followed through gaps and nonsense, and routed by."""

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
from tests.support.fake_backend import running
from tests.support.gateway_harness import Running, Watching, front
from tests.support.kv_event_publisher import (
    CLEARED,
    Event,
    Publisher,
    as_array,
    batch,
    publishing,
    removed,
    stored,
)
from tests.support.waiting import until

from argosy.gateway import ReplicaConfig, load_config
from argosy.gateway.backends import BackendKind, KvEventAddress
from argosy.gateway.kv_events.subscription import subscribe
from argosy.gateway.kv_events.text_block_maps import TextBlockMaps
from argosy.gateway.pool.pool import RoutingDecision
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import BLOCK_BYTES, EstimatedPrefixIndex, EventPrefixIndex, compute_block_names
from argosy.protocol import parse_endpoint

SIZE = 16
SHAPES = pytest.mark.parametrize("shape", [dict, as_array], ids=["maps", "arrays"])
Shape = Callable[[Event], Any]


def one(number: int, parent: int | None = None, **more: object) -> Event:
    """A block of the same token throughout, with that for its hash."""
    return stored([number], [number] * SIZE, parent, **more)


DEEP = batch(one(1, extra_keys=[["*"]])).replace(b"\xa1*", b"\x91" * 100_000 + b"\xc0")


@contextlib.asynccontextmanager
async def followed(
    kind: BackendKind, address: KvEventAddress | None, url: str = "http://127.0.0.1:9"
) -> AsyncIterator[ReplicaEndpoint]:
    """A replica with this address, followed."""
    replica = ReplicaEndpoint("r", kind, "cat", Upstream(parse_endpoint(url)), kv_events=address)
    task = asyncio.create_task(subscribe(replica, TextBlockMaps()))
    try:
        yield replica
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})
        replica.upstream.close()


def blocks(replica: ReplicaEndpoint) -> int | None:
    """How many it tells of; None: it does not tell."""
    index = replica.prefix_index
    return len(index.blocks) if isinstance(index, EventPrefixIndex) else None


@pytest.fixture(name="soon", autouse=True)
def later_is_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "argosy.gateway.kv_events.zmq_subscriber.UNSUPPORTED_RETRY_INTERVAL_S", 0.01
    )


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> AsyncIterator[KvEventAddress]:
    """A server of something else; its connections are over when it is."""
    tasks: list[asyncio.Task[None]] = []

    def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(answer(reader, writer)))

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield KvEventAddress(endpoint=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        await asyncio.gather(*tasks)


# --- following -------------------------------------------------------------------------------------


@SHAPES
async def test_changes_add_up(shape: Shape) -> None:
    async with (
        publishing() as publisher,
        followed("sglang", KvEventAddress(endpoint=publisher.endpoint)) as replica,
    ):
        await publisher.subscribed()
        assert blocks(replica) is None
        await publisher.publish(shape(one(1)), shape(stored([2, 3], [2] * 2 * SIZE, 1)))
        await until(lambda: blocks(replica) == 3)
        await publisher.publish(shape(one(2, 1)), shape(removed(3, 9)))
        await until(lambda: blocks(replica) == 2)
        await publisher.publish(shape(removed(2)))  # one of two copies
        await publisher.publish(shape(one(4, 2)))
        await until(lambda: blocks(replica) == 3)
        replica.prefix_index.on_prompt_sent([b"key"])
        await publisher.publish(shape(CLEARED))
        await until(lambda: blocks(replica) == 0)
        assert replica.prefix_index.match_prefix([b"key"]) == []


async def test_what_was_stored_before_is_known_if_it_is_told_again() -> None:
    async with publishing(topics=False) as publisher:
        for number in (1, 2, 3):
            publisher.miss(batch(one(number)))
        for replay, expected in ((publisher.replay, 4), (None, 1)):
            address = KvEventAddress(endpoint=publisher.endpoint, replay=replay)
            async with followed("vllm", address) as replica:
                await publisher.subscribed()
                await until(lambda: replay is None or blocks(replica) == 3)  # noqa: B023
                await publisher.publish(one(4))
                await until(lambda: blocks(replica) == expected)  # noqa: B023
            publisher.miss(batch(removed(4)))


@pytest.mark.parametrize("replays", [True, False])
async def test_what_was_missed_is_told_again_or_all_is_forgotten(replays: bool) -> None:
    async with publishing() as publisher:
        replay = publisher.replay if replays else None
        async with followed(
            "vllm", KvEventAddress(endpoint=publisher.endpoint, replay=replay)
        ) as replica:
            await publisher.subscribed()
            await publisher.publish(one(1), one(2))
            await until(lambda: blocks(replica) == 2)
            replica.prefix_index.on_prompt_sent([b"key"])
            publisher.miss(batch(removed(1), one(3)))
            publisher.miss(batch(one(4)))
            await publisher.publish(one(5))
            await until(lambda: blocks(replica) == (4 if replays else 1))
            assert len(replica.prefix_index.match_prefix([b"key"])) == replays


async def test_what_can_no_longer_be_told_again_is_forgotten_too() -> None:
    async with publishing() as publisher:
        address = KvEventAddress(endpoint=publisher.endpoint, replay=publisher.replay)
        async with followed("vllm", address) as replica:
            await publisher.subscribed()
            await publisher.publish(one(1), one(2))
            await until(lambda: blocks(replica) == 2)
            for number in range(200):
                publisher.miss(batch(one(100 + number)))
            await publisher.publish(one(5))
            await until(lambda: blocks(replica) == 100)


async def test_a_replay_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.REPLAY_TIMEOUT_S", 0.05)
    async with publishing() as publisher:
        address = KvEventAddress(endpoint=publisher.endpoint, replay="tcp://127.0.0.1:9")
        async with followed("vllm", address) as replica:
            await publisher.subscribed()
            await publisher.publish(one(1))
            await until(lambda: blocks(replica) == 1)


async def test_a_server_that_was_started_anew_is_followed_anew(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    async with followed("vllm", KvEventAddress(endpoint=endpoint)) as replica:
        async with publishing(endpoint) as publisher:
            await publisher.subscribed()
            await publisher.publish(one(1), one(2))
            await until(lambda: blocks(replica) == 2)
        await until(lambda: blocks(replica) is None)
        replica.prefix_index.on_prompt_sent([b"key"])
        assert len(replica.prefix_index.match_prefix([b"key"])) == 1
        async with publishing(endpoint) as publisher:
            await publisher.subscribed()
            await publisher.publish(one(3))
            await until(lambda: blocks(replica) == 1)


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param([b"kv"], id="one frame"),
        pytest.param([b"kv", b"1", batch()], id="no number"),
        pytest.param([b"kv", bytes(8), b"so it is"], id="no batch"),
        pytest.param([b"kv", bytes(8), batch(stored([1], [-1] * SIZE))], id="no token"),
        pytest.param([b"kv", bytes(8), batch(*map(one, range(5)))], id="too much"),
        pytest.param([b"kv", bytes(8), batch(stored([1], [1]))], id="too small"),
        pytest.param([b"kv", bytes(8), DEEP], id="too deep"),
    ],
)
async def test_what_cannot_be_followed_is_left_and_tried_again(
    nonsense: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscriber.MAX_NAMED_BLOCKS", 4)
    async with (
        publishing() as publisher,
        followed("vllm", KvEventAddress(endpoint=publisher.endpoint)) as replica,
    ):
        await publisher.subscribed()
        with capture_logs() as logs:
            await publisher.raw(*nonsense)
            await publisher.subscribed()
        assert [each["event"] for each in logs if each["log_level"] == "warning"] == [
            "kv_events_subscription_failed"
        ]
        assert blocks(replica) is None
        await publisher.publish(one(1))
        await until(lambda: blocks(replica) == 1)


async def test_where_nobody_publishes_is_said() -> None:
    with capture_logs() as logs:
        async with followed("vllm", KvEventAddress(endpoint="tcp://127.0.0.1:9")):
            await until(lambda: len(logs) > 1)
    reason = (
        "no KV event publisher at tcp://127.0.0.1:9. "
        "Start the engine with KV events, or correct `kv_events` of this replica."
    )
    assert {(each["event"], each["reason"]) for each in logs} == {
        ("kv_events_subscription_failed", reason)
    }


async def test_who_does_not_speak_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.HANDSHAKE_TIMEOUT_S", 0.05)
    met = asyncio.Semaphore(0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.release()
        await _copy(reader, writer, gone)

    gone = asyncio.Event()
    gone.set()
    async with serving(silent) as endpoint, followed("sglang", endpoint) as replica:
        for _ in range(2):
            await met.acquire()
        assert blocks(replica) is None


async def test_who_falls_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher whose machine is gone: nothing is said, and nothing answers."""
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.HEARTBEAT_INTERVAL_MS", 50)
    monkeypatch.setattr("argosy.gateway.kv_events.zmq_subscription.HEARTBEAT_TIMEOUT_MS", 100)
    gone = asyncio.Event()
    async with publishing() as publisher:

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", publisher.port)
            copies = [_copy(reader, back, asyncio.Event()), _copy(there, writer, gone)]
            await asyncio.gather(*copies)

        async with serving(between) as endpoint, followed("vllm", endpoint) as replica:
            await publisher.subscribed()
            await publisher.publish(one(1))
            await until(lambda: blocks(replica) == 1)
            gone.set()
            await until(lambda: blocks(replica) is None)
            gone.clear()
            await publisher.subscribed()


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, gone: asyncio.Event
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            if not gone.is_set():
                target.write(data)
    target.close()
    with contextlib.suppress(ConnectionError):
        await target.wait_closed()


async def test_a_server_says_where_it_publishes() -> None:
    server = Vllm()
    async with publishing() as publisher, running(server):
        server.kv_sources = {"0": {"endpoint": f"tcp://*:{publisher.port}", "topic": ""}}
        async with followed("vllm", None, server.url) as replica:
            await publisher.subscribed()
            await publisher.publish(one(1))
            await until(lambda: blocks(replica) == 1)


async def test_who_publishes_nothing_is_asked_again() -> None:
    server = Sglang()
    async with running(server), followed("sglang", None, server.url) as replica:
        await until(lambda: server.got.count("/server_info") > 1)
        assert isinstance(replica.prefix_index, EstimatedPrefixIndex)


async def test_who_is_known_later_is_followed_from_then_on() -> None:
    async with (
        publishing() as publisher,
        followed("auto", KvEventAddress(endpoint=publisher.endpoint)) as replica,
    ):
        replica.kind = "vllm"
        await publisher.subscribed()
        await publisher.publish(one(1))
        await until(lambda: blocks(replica) == 1)


async def test_who_tells_nothing_is_followed_by_nobody() -> None:
    replica = ReplicaEndpoint("r", "openai", "cat", Upstream(parse_endpoint("http://127.0.0.1:9")))
    await subscribe(replica, TextBlockMaps())


@pytest.mark.parametrize("kind", ["vllm", "auto", "openai"])
def test_only_who_publishes_is_followed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    replica = f"{{url: 'http://a:1', kind: {kind}, kv_events: {{endpoint: 'tcp://a:5557'}}}}"
    path.write_text(f"models: [{{name: m, replicas: [{replica}]}}]")
    if kind == "openai":
        with pytest.raises(
            ValueError, match=r"kv_events is only supported for kind vllm or sglang\. Remove it"
        ):
            load_config(path)
    else:
        (told,) = load_config(path).models[0].replicas
        assert told.kv_events == KvEventAddress(endpoint="tcp://a:5557")


# --- routing ---------------------------------------------------------------------------------------

TEXT = ("Once upon a time there was a king who had a daughter. " * 30)[: 4 * BLOCK_BYTES - 2]
"""As JSON it is four blocks of text."""
IDS = tuple(range(1000, 1256))


class Fleet:
    """Two servers that publish, and a gateway that takes turns with them."""

    def __init__(self, publishers: list[Publisher], running: Running, watch: Watching) -> None:
        self.publishers = publishers
        self.running = running
        self._watch = watch
        self._numbers = itertools.count(1)

    async def ask(self, **extra: object) -> RoutingDecision:
        body = {"model": "big", "prompt": TEXT, "max_tokens": 2, "stream": True} | extra
        answer = await self.running.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert 'prompt_token_ids":[' not in answer.text
        picked = self._watch.left[-1].decision
        assert picked is not None
        return picked

    async def to_compute(self, **extra: object) -> list[bool]:
        """Which of the replicas would have to compute some of the prompt, as the explanation has it; it is asked."""
        await self.ask(**extra)
        told = self.running.traces.find(self._watch.left[-1].trace.response_id)
        assert told is not None
        tried = told.to_dict()["attempts"][0]["candidates"]
        candidates = {each["replica"]: each["prefill_s"] > 0 for each in tried}
        return [candidates[replica.name] for replica in self.running.replicas]

    async def store(self, number: int, **more: object) -> list[int]:
        """A replica tells that it has the prompt's blocks; their hashes."""
        hashes = [next(self._numbers) for _ in range(len(IDS) // SIZE)]
        await self.publishers[number].publish(stored(hashes, IDS, **more))
        await self.known(number, len(hashes))
        return hashes

    async def known(self, number: int, count: int) -> None:
        await until(lambda: blocks(self.running.replicas[number]) == count)


@contextlib.asynccontextmanager
async def fleet(kind: type[Vllm | Sglang]) -> AsyncIterator[Fleet]:
    servers = [kind(prompt_ids=IDS), kind(prompt_ids=IDS)]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running(*servers))
        publishers = [await stack.enter_async_context(publishing()) for _ in servers]
        watch = Watching()
        behind = [
            ReplicaConfig(
                url=server.url, model="cat", kv_events=KvEventAddress(endpoint=publisher.endpoint)
            )
            for server, publisher in zip(servers, publishers, strict=True)
        ]
        told = await stack.enter_async_context(front([watch], *behind))
        world = Fleet(publishers, told, watch)
        for number, publisher in enumerate(publishers):
            await publisher.subscribed()
            await publisher.publish(one(1000))  # until then nothing is known of its blocks
            await world.known(number, 1)
            await publisher.publish(CLEARED)
            await world.known(number, 0)
        yield world


KINDS = pytest.mark.parametrize("kind", [Vllm, Sglang])


@KINDS
async def test_a_prompt_is_found_where_it_was_computed_for_others(kind: type[Vllm]) -> None:
    async with fleet(kind) as world:
        first = await world.ask()
        warm = world.running.replicas.index(first.replica)
        hashes = await world.store(warm)
        assert await world.to_compute() == [number != warm for number in range(2)]
        world.running.replicas[1 - warm].prefix_index.clear()  # it was asked just now
        await world.store(1 - warm)
        assert await world.to_compute() == [False, False]
        await world.publishers[warm].publish(removed(*hashes[4:]))
        await world.known(warm, 4)
        assert await world.to_compute() == [number == warm for number in range(2)]


@KINDS
async def test_salted_prompts_are_found_by_nobody_else(kind: type[Vllm]) -> None:
    async with fleet(kind) as world:
        for salt in ("mine", "yours", None):
            await world.ask(cache_salt=salt)
            await world.ask(cache_salt=salt)
        for replica in world.running.replicas:
            replica.prefix_index.clear()
        salted: Event = {"extra_keys": [["mine"], *[None] * 15]}
        await world.store(0, **(salted if kind is Vllm else {"cache_salt": "mine"}))
        mine = compute_block_names("mine", array("I", IDS), SIZE)
        index = world.running.replicas[0].prefix_index
        assert isinstance(index, EventPrefixIndex)
        assert index.blocks == set(mine)
        assert await world.to_compute(cache_salt="yours") == [True, True]
        assert await world.to_compute(cache_salt=None) == [True, True]
        world.running.replicas[1].prefix_index.clear()
        assert await world.to_compute(cache_salt="mine") == [False, True]
