"""What vLLM's own server publishes of its prefix cache, followed and routed by, where its CPU build is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from tests.support.gateway_client import CHAT, COMPLETION
from tests.support.gateway_harness import Running, Watching, front
from tests.support.vllm_server import PEER, PYTHON, VllmServer, started
from tests.support.waiting import until

from argosy.gateway import ReplicaConfig
from argosy.gateway.backends import KvEventAddress
from argosy.gateway.pool.pool import RoutingDecision
from argosy.policy import BLOCK_BYTES, EstimatedPrefixIndex, EventPrefixIndex, compute_block_names

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no vLLM at {PEER}: set ARGOSY_VLLM"),
    pytest.mark.timeout(400),  # it takes a minute to start
    pytest.mark.asyncio(loop_scope="module"),
]
SIZE = 32
BLOCKS = 40
STORY = "Once upon a time there was a king who had a daughter, and she had a cat. "


@pytest.fixture(name="story")
def a_story(request: pytest.FixtureRequest) -> str:
    """A prompt that no other test has; as JSON it is a whole number of blocks of text."""
    return f"{request.node.name}: {STORY * 30}"[: 5 * BLOCK_BYTES - 2]


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


def publishing(endpoint: str, replay: str | None) -> tuple[str, ...]:
    """The options of a server that publishes."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    told = json.dumps(events | {"replay_endpoint": replay})
    sizes = ("--block-size", str(SIZE), "--num-gpu-blocks-override", str(BLOCKS))
    return (*sizes, "--enable-prompt-tokens-details", "--kv-events-config", told)


class Pair:
    """Two servers, one of which says itself where it publishes, and a gateway that takes turns with them."""

    def __init__(self, direct: list[httpx2.AsyncClient], running: Running, watch: Watching) -> None:
        self.direct = direct
        self.running = running
        self._watch = watch

    async def ask(self, path: str, prompt: str, **extra: object) -> RoutingDecision:
        """Ask through the gateway; how that was routed."""
        body = {"model": "big", "max_tokens": 2, "stream": True} | asks(path, prompt) | extra
        answer = await self.running.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        picked = self._watch.left[-1].decision
        assert picked is not None
        return picked

    async def elsewhere(
        self, number: int, path: str, prompt: str | list[int], **extra: object
    ) -> dict[str, Any]:
        """Ask one server without the gateway; its answer."""
        body = {"model": "mini", "max_tokens": 2} | asks(path, prompt) | extra
        answer = await self.direct[number].post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def index(self, number: int) -> EventPrefixIndex:
        index = self.running.replicas[number].prefix_index
        assert isinstance(index, EventPrefixIndex)
        return index

    async def to_compute(self, path: str, prompt: str, **extra: object) -> list[bool]:
        """Which of them would have to compute most of the prompt, as the explanation has it; it is asked."""
        rates = [replica.load.prefill_tokens_per_s for replica in self.running.replicas]
        await self.ask(path, prompt, **extra)
        context = self._watch.left[-1]
        told = self.running.traces.find(context.trace.response_id)
        assert told is not None
        tried = told.to_dict()["attempts"][0]["candidates"]
        seconds = {each["replica"]: each["prefill_s"] for each in tried}
        return [
            seconds[replica.name] * rate > context.fields.estimated_prompt_tokens / 2
            for replica, rate in zip(self.running.replicas, rates, strict=True)
        ]


def asks(path: str, prompt: str | list[int]) -> dict[str, object]:
    return (
        {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    )


@pytest.fixture(name="servers", scope="module")
def two_servers() -> Iterator[tuple[list[VllmServer], KvEventAddress]]:
    """Both, and where the second one publishes."""
    with TemporaryDirectory() as folder:  # pytest's own may be too long for a socket
        ports = [f"tcp://*:{port}" for port in _free_ports()]
        sockets = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        servers = [
            VllmServer(Path(folder) / f"{number}.sock", publishing(*addresses))
            for number, addresses in enumerate((ports, sockets))
        ]
        with started(*servers):
            yield servers, KvEventAddress(endpoint=sockets[0], replay=sockets[1])


@pytest_asyncio.fixture(name="pair", loop_scope="module")
async def a_pair(servers: tuple[list[VllmServer], KvEventAddress]) -> AsyncIterator[Pair]:
    """With nothing cached, and a gateway that has just been started."""
    both, address = servers
    async with contextlib.AsyncExitStack() as stack:
        direct = [
            await stack.enter_async_context(
                httpx2.AsyncClient(
                    transport=httpx2.AsyncHTTPTransport(uds=str(server.socket)),
                    base_url="http://vllm",
                    timeout=30,
                )
            )
            for server in both
        ]
        urls = [f"unix:{server.socket}" for server in both]
        behind = [
            ReplicaConfig(url=urls[0], model="mini"),
            ReplicaConfig(url=urls[1], model="mini", kv_events=address),
        ]
        watch = Watching()
        pair = Pair(direct, await stack.enter_async_context(front([watch], *behind)), watch)
        for number, replica in enumerate(pair.running.replicas):
            assert (await direct[number].post("/reset_prefix_cache")).json() == {"success": True}
            await pair.elsewhere(number, COMPLETION, STORY * 3)
            await until(lambda: isinstance(replica.prefix_index, EventPrefixIndex))  # noqa: B023
            await until(lambda: 0 < len(pair.index(number).blocks) < 3)  # noqa: B023
        yield pair


paths = pytest.mark.parametrize("path", [COMPLETION, CHAT])


@paths
async def test_what_came_there_for_others_is_known(pair: Pair, path: str, story: str) -> None:
    first = await pair.ask(path, story)
    other = 1 - pair.running.replicas.index(first.replica)
    await pair.elsewhere(other, path, story)
    await until(lambda: len(pair.index(other).match_prefix(first.block_keys)) >= 4)
    assert await pair.to_compute(path, story) == [False, False]


async def test_what_was_evicted_is_known_to_be_gone(pair: Pair, story: str) -> None:
    first = await pair.ask(COMPLETION, story)
    warm = pair.running.replicas.index(first.replica)
    await until(lambda: pair.index(warm).match_prefix(first.block_keys)[:4] == [0] * 4)
    for number in range(6):
        await pair.elsewhere(warm, COMPLETION, f"{number}: " + "Something else was told. " * 60)
    await until(lambda: not pair.index(warm).match_prefix(first.block_keys))
    assert await pair.to_compute(COMPLETION, story) == [True, True]


async def test_a_reset_is_noticed_with_the_next_step(pair: Pair, story: str) -> None:
    first = await pair.ask(COMPLETION, story)
    warm = pair.running.replicas.index(first.replica)
    await until(lambda: pair.index(warm).match_prefix(first.block_keys)[:4] == [0] * 4)
    assert (await pair.direct[warm].post("/reset_prefix_cache")).json() == {"success": True}
    await pair.elsewhere(warm, COMPLETION, "Hello")
    await until(lambda: not pair.index(warm).blocks)
    assert await pair.to_compute(COMPLETION, story) == [True, True]


async def test_a_salt_keeps_prompts_apart(pair: Pair, story: str) -> None:
    plain = [await pair.ask(COMPLETION, story) for _ in range(2)]
    salted = await pair.ask(COMPLETION, story, cache_salt="mine")
    mine = pair.running.replicas.index(salted.replica)
    await pair.elsewhere(1 - mine, COMPLETION, story, cache_salt="yours")
    for number in range(2):
        await until(lambda: pair.index(number).match_prefix(plain[0].block_keys)[:4] == [0] * 4)  # noqa: B023
    await until(lambda: pair.index(mine).match_prefix(salted.block_keys)[:4] == [0] * 4)
    assert not pair.index(1 - mine).match_prefix(salted.block_keys)
    await pair.elsewhere(1 - mine, COMPLETION, story, cache_salt="mine")
    await until(lambda: pair.index(1 - mine).match_prefix(salted.block_keys)[:4] == [0] * 4)
    assert await pair.to_compute(COMPLETION, story, cache_salt="others") == [True, True]


async def test_a_gateway_that_comes_later_is_told_again(
    pair: Pair, servers: tuple[list[VllmServer], KvEventAddress], story: str
) -> None:
    await pair.elsewhere(1, COMPLETION, story)
    await until(lambda: len(pair.index(1).blocks) > 5)
    late = ReplicaConfig(url=f"unix:{servers[0][1].socket}", model="mini", kv_events=servers[1])
    async with front([], late) as running:
        (replica,) = running.replicas
        await until(lambda: isinstance(replica.prefix_index, EventPrefixIndex))
        index = replica.prefix_index
        assert isinstance(index, EventPrefixIndex)
        await until(lambda: index.blocks == pair.index(1).blocks)


async def test_what_is_known_is_what_the_server_then_finds(pair: Pair) -> None:
    """Prompts that begin alike, evict each other, and are computed twice: each is foreseen, then asked.

    The last block of a prompt that ends with it is computed again whenever it is asked, and then there twice.
    """
    draws = random.Random(7)
    beginnings = [[draws.randrange(100, 2000) for _ in range(3 * SIZE)] for _ in range(3)]
    prompts = [beginning[:length] for beginning in beginnings for length in (SIZE, 2 * SIZE)]
    prompts += [
        beginning + [draws.randrange(100, 2000) for _ in range(draws.choice([1, 31, 32, 200]))]
        for beginning in beginnings * 3
    ]
    hits = set[int]()
    for _ in range(150):
        ids = draws.choice(prompts)
        names = compute_block_names("", array("I", ids), SIZE)
        known = set(pair.index(0).blocks)
        held = next((n for n, name in enumerate(names) if name not in known), len(names))
        answer = await pair.elsewhere(0, COMPLETION, ids, max_tokens=1)
        foreseen = min(held, (len(ids) - 1) // SIZE) * SIZE
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == foreseen
        hits.add(foreseen)
        await until(lambda: set(names) <= pair.index(0).blocks)  # noqa: B023
    assert {0, SIZE, 3 * SIZE} <= hits


async def test_a_server_that_was_started_anew_is_known_to_be_cold(
    pair: Pair, servers: tuple[list[VllmServer], KvEventAddress], story: str
) -> None:
    told = await pair.elsewhere(0, COMPLETION, story, return_token_ids=True)
    names = set(compute_block_names("", array("I", told["choices"][0]["prompt_token_ids"]), SIZE))
    await until(lambda: names <= pair.index(0).blocks)
    replica, server = pair.running.replicas[0], servers[0][0]
    server.end()
    try:
        await until(lambda: isinstance(replica.prefix_index, EstimatedPrefixIndex))
    finally:
        server.start()
        await asyncio.to_thread(server.wait)
    await pair.elsewhere(0, COMPLETION, "Another story. " * 30)
    await until(lambda: isinstance(replica.prefix_index, EventPrefixIndex))
    await until(lambda: pair.index(0).blocks)
    assert not names & pair.index(0).blocks
