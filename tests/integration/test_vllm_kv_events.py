"""KV events of the vLLM server, if its CPU build is installed: the gateway follows them and routes by them."""

from __future__ import annotations

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
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.placed_requests import RoutedRequest, last_decision
from tests.support.vllm_server import PEER, PYTHON, VllmServer, run_vllm_servers
from tests.support.waiting import until

from argosy.deployment import KvEventAddress, ReplicaConfig
from argosy.policy import BLOCK_BYTES, EventPrefixIndex, compute_block_names

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
    """Prompt of this test alone. Its JSON form fills a whole number of text blocks."""
    return f"{request.node.name}: {STORY * 30}"[: 5 * BLOCK_BYTES - 2]


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


def publisher_options(endpoint: str, replay: str | None) -> tuple[str, ...]:
    """Return the command-line options with which a server publishes KV events."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    config = json.dumps(events | {"replay_endpoint": replay})
    sizes = ("--block-size", str(SIZE), "--num-gpu-blocks-override", str(BLOCKS))
    return (*sizes, "--enable-prompt-tokens-details", "--kv-events-config", config)


class VllmPair:
    """Two vLLM servers and a gateway that alternates between them. Only the first server announces its publisher."""

    def __init__(
        self, direct: list[httpx2.AsyncClient], running: GatewayHarness, recorder: RecordingFilter
    ) -> None:
        self.direct = direct
        self.running = running
        self._recorder = recorder

    async def send(self, path: str, prompt: str, **extra: object) -> RoutedRequest:
        """Send a request through the gateway and return its routing decision."""
        body = (
            {"model": "big", "max_tokens": 2, "stream": True} | prompt_fields(path, prompt) | extra
        )
        response = await self.running.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return last_decision(self._recorder.completed[-1])

    async def send_directly(
        self, number: int, path: str, prompt: str | list[int], **extra: object
    ) -> dict[str, Any]:
        """Send a request to one server directly and return the response."""
        body = {"model": "mini", "max_tokens": 2} | prompt_fields(path, prompt) | extra
        response = await self.direct[number].post(path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def index(self, number: int) -> EventPrefixIndex:
        index = self.running.replicas[number].prefix_index
        assert isinstance(index, EventPrefixIndex)
        return index

    async def needs_prefill(self, path: str, prompt: str, **extra: object) -> list[bool]:
        """Send a request. Return for each server whether, by the explanation, it would compute most of the prompt."""
        rates = [replica.load.prefill_tokens_per_s for replica in self.running.replicas]
        await self.send(path, prompt, **extra)
        context = self._recorder.completed[-1]
        trace = self.running.traces.find(context.trace.response_id)
        assert trace is not None
        candidates = trace.to_dict()["attempts"][0]["candidates"]
        seconds = {each["replica"]: each["prefill_s"] for each in candidates}
        return [
            seconds[replica.name] * rate > context.fields.estimated_prompt_tokens / 2
            for replica, rate in zip(self.running.replicas, rates, strict=True)
        ]


def prompt_fields(path: str, prompt: str | list[int]) -> dict[str, object]:
    return (
        {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    )


@pytest.fixture(name="servers", scope="module")
def two_servers() -> Iterator[tuple[list[VllmServer], KvEventAddress]]:
    """Start both servers. Yield them and the publisher address of the second one."""
    with TemporaryDirectory() as folder:  # the path of pytest's folder may be too long for a socket
        ports = [f"tcp://*:{port}" for port in _free_ports()]
        sockets = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        servers = [
            VllmServer(Path(folder) / f"{number}.sock", publisher_options(*addresses))
            for number, addresses in enumerate((ports, sockets))
        ]
        with run_vllm_servers(*servers):
            yield servers, KvEventAddress(endpoint=sockets[0], replay=sockets[1])


@pytest_asyncio.fixture(name="pair", loop_scope="module")
async def a_pair(servers: tuple[list[VllmServer], KvEventAddress]) -> AsyncIterator[VllmPair]:
    """Reset both prefix caches and start a new gateway."""
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
        replicas = [
            ReplicaConfig(url=urls[0], model="mini"),
            ReplicaConfig(url=urls[1], model="mini", kv_events=address),
        ]
        recorder = RecordingFilter()
        pair = VllmPair(
            direct, await stack.enter_async_context(run_gateway([recorder], *replicas)), recorder
        )
        for number, replica in enumerate(pair.running.replicas):
            assert (await direct[number].post("/reset_prefix_cache")).json() == {"success": True}
            await pair.send_directly(number, COMPLETION, STORY * 3)
            await until(lambda: isinstance(replica.prefix_index, EventPrefixIndex))  # noqa: B023
            await until(lambda: 0 < len(pair.index(number).blocks) < 3)  # noqa: B023
        yield pair


paths = pytest.mark.parametrize("path", [COMPLETION, CHAT])


@paths
async def test_blocks_of_direct_requests_are_known(pair: VllmPair, path: str, story: str) -> None:
    first = await pair.send(path, story)
    other = 1 - pair.running.replicas.index(first.replica)
    await pair.send_directly(other, path, story)
    await until(lambda: len(pair.index(other).match_prefix(first.block_keys)) >= 4)
    assert await pair.needs_prefill(path, story) == [False, False]


async def test_cache_reset_is_noticed_with_next_step(pair: VllmPair, story: str) -> None:
    first = await pair.send(COMPLETION, story)
    warm = pair.running.replicas.index(first.replica)
    await until(lambda: pair.index(warm).match_prefix(first.block_keys)[:4] == [0] * 4)
    assert (await pair.direct[warm].post("/reset_prefix_cache")).json() == {"success": True}
    await pair.send_directly(warm, COMPLETION, "Hello")
    await until(lambda: not pair.index(warm).blocks)
    assert await pair.needs_prefill(COMPLETION, story) == [True, True]


async def test_cache_salt_separates_prompts(pair: VllmPair, story: str) -> None:
    plain = [await pair.send(COMPLETION, story) for _ in range(2)]
    salted = await pair.send(COMPLETION, story, cache_salt="mine")
    mine = pair.running.replicas.index(salted.replica)
    await pair.send_directly(1 - mine, COMPLETION, story, cache_salt="yours")
    for number in range(2):
        await until(lambda: pair.index(number).match_prefix(plain[0].block_keys)[:4] == [0] * 4)  # noqa: B023
    await until(lambda: pair.index(mine).match_prefix(salted.block_keys)[:4] == [0] * 4)
    assert not pair.index(1 - mine).match_prefix(salted.block_keys)
    await pair.send_directly(1 - mine, COMPLETION, story, cache_salt="mine")
    await until(lambda: pair.index(1 - mine).match_prefix(salted.block_keys)[:4] == [0] * 4)
    assert await pair.needs_prefill(COMPLETION, story, cache_salt="others") == [True, True]


async def test_late_gateway_gets_replay(
    pair: VllmPair, servers: tuple[list[VllmServer], KvEventAddress], story: str
) -> None:
    await pair.send_directly(1, COMPLETION, story)
    await until(lambda: len(pair.index(1).blocks) > 5)
    late_replica = ReplicaConfig(
        url=f"unix:{servers[0][1].socket}", model="mini", kv_events=servers[1]
    )
    async with run_gateway([], late_replica) as running:
        (replica,) = running.replicas
        await until(lambda: isinstance(replica.prefix_index, EventPrefixIndex))
        index = replica.prefix_index
        assert isinstance(index, EventPrefixIndex)
        await until(lambda: index.blocks == pair.index(1).blocks)


async def test_index_predicts_cached_tokens(pair: VllmPair) -> None:
    """Prompts share prefixes, evict each other and repeat. The test predicts each hit before the request.

    vLLM always recomputes the last block of a prompt that ends with it, and then holds it twice.
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
        response = await pair.send_directly(0, COMPLETION, ids, max_tokens=1)
        predicted = min(held, (len(ids) - 1) // SIZE) * SIZE
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == predicted
        hits.add(predicted)
        await until(lambda: set(names) <= pair.index(0).blocks)  # noqa: B023
    assert {0, SIZE, 3 * SIZE} <= hits
