"""vLLM's own server behind the gateway, where its CPU build is installed: found, read, carried on however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import pytest
from tests.support.cutting_proxy import Knife, proxied
from tests.support.gateway_client import CHAT, COMPLETION, Seen, gateway, said
from tests.support.vllm_server import CONTEXT, PEER, PYTHON, VllmServer, started
from tests.support.waiting import until

from argosy.gateway import GatewayServer, ReplicaConfig, Timeouts

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story about a cat."}]},
    COMPLETION: {"prompt": "Once upon a time"},
}
BUSY = Timeouts(first_token_timeout_s=20.0, stream_idle_timeout_s=1.5, failover_timeout_s=5.0)
PATIENT = Timeouts(first_token_timeout_s=60.0, stream_idle_timeout_s=20.0, failover_timeout_s=60.0)
"""Nobody who lives is taken for stalled, however busy the machine is."""
GREEDY = {"temperature": 0, "max_tokens": 40, "stream_options": {"include_usage": True}}

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no vLLM at {PEER}: set ARGOSY_VLLM"),
    pytest.mark.timeout(400),  # it takes a minute to start
]
paths = pytest.mark.parametrize("path", [CHAT, COMPLETION])


@pytest.fixture(scope="module")
def servers() -> Iterator[list[VllmServer]]:
    with TemporaryDirectory() as folder:  # pytest's own may be too long for a socket
        both = [VllmServer(Path(folder) / f"{number}.sock") for number in range(2)]
        with started(*both):
            yield both


@contextlib.asynccontextmanager
async def behind(
    servers: list[VllmServer], timeouts: Timeouts = BUSY
) -> AsyncIterator[tuple[GatewayServer, httpx2.AsyncClient, Knife]]:
    """A gateway in front of them, and the knife between."""
    async with contextlib.AsyncExitStack() as stack:
        knife = Knife()
        urls = [await stack.enter_async_context(proxied(each.socket, knife)) for each in servers]
        replicas = [ReplicaConfig(url=url, model="mini") for url in urls]
        behind = gateway(*replicas, timeouts=timeouts, patience_s=None)
        yield *await stack.enter_async_context(behind), knife


async def story(
    client: httpx2.AsyncClient,
    path: str,
    asks: dict[str, object],
    hurt: tuple[VllmServer, signal.Signals] | None = None,
) -> Seen:
    """A stream; after a few words the signal is sent."""
    body = {"model": "big", "stream": True} | GREEDY | BODIES[path] | asks
    seen = Seen()
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.take(line[6:])
            if hurt is not None and len(seen.chunks) == 8:
                hurt[0].signal(hurt[1])
                hurt = None
    return seen


def same(seen: Seen, whole: Seen, asks: dict[str, object]) -> None:
    """What a client was told is one answer, the undisturbed one."""
    assert (seen.text, seen.finish) == (whole.text, whole.finish)
    ((prompt, tokens),), ((expected_prompt, expected),) = seen.counts, whole.counts
    past = 3 if "stop" in asks else 0  # tokens that came in one event with the end of a stop string
    assert prompt == expected_prompt
    assert 0 <= tokens - expected <= past
    assert (seen.done, seen.errors, len(seen.identities), seen.roles) == (1, [], 1, whole.roles)


async def test_it_is_found_and_read(servers: list[VllmServer]) -> None:
    async with behind(servers) as (running, _, _):
        for replica in running.replicas:
            assert (replica.kind, replica.max_model_len) == ("vllm", CONTEXT)
            assert (replica.load.running, replica.load.waiting, replica.load.kv_usage_ratio) == (
                0,
                0,
                0.0,
            )


@paths
@pytest.mark.parametrize(
    "asks",
    [
        {},
        {"stop": ["packed a bottle", "d old tree"]},
        {"stop": ["never"], "min_tokens": 20},
        {"repetition_penalty": 1.3, "ignore_eos": True},
        {"return_token_ids": True, "cache_salt": "a"},
        {"max_tokens": None},
    ],
    ids=lambda asks: "-".join(asks) or "plain",
)
async def test_a_greedy_answer_is_the_same_wherever_it_is_cut(
    servers: list[VllmServer], path: str, asks: dict[str, object]
) -> None:
    async with behind(servers) as (_, client, knife):
        whole = await story(client, path, asks)
        assert (whole.done, len(whole.finish)) == (1, 1)
        for events in (0, 1, 2, 7, 13):
            knife.after = events
            same(await story(client, path, asks), whole, asks)
            assert knife.after is None


@paths
async def test_nobody_sees_the_prompt_of_an_answer_that_is_cut_within_a_character(
    servers: list[VllmServer], path: str
) -> None:
    halves = [169, 240, 226, 357]  # of "é", a space, " said"
    told = {"messages": [{"role": "system", "content": "Zebra"}, {"role": "user", "content": "Hi"}]}
    said = told if path == CHAT else {"prompt": "Zebra"}
    async with behind(servers) as (_, client, knife):
        for cut in range(3, 15):
            knife.after = cut
            asks = said | {"temperature": 1.0, "seed": cut, "allowed_token_ids": halves}
            seen = await story(client, path, asks)
            assert knife.after is None
            assert "Zebra" not in seen.text
            assert (seen.done, seen.errors, seen.counts[0][1]) == (1, [], GREEDY["max_tokens"])


@paths
async def test_who_gave_a_seed_can_see_from_where_on_it_does_not_count(
    servers: list[VllmServer], path: str
) -> None:
    async with behind(servers) as (_, client, knife):
        asks: dict[str, object] = {"temperature": 0.9, "seed": 7}
        whole = await story(client, path, asks)
        assert (await story(client, path, asks)).text == whole.text
        knife.after = 9
        seen = await story(client, path, asks)
        marks = [chunk.get("system_fingerprint") for chunk in seen.chunks]
        first = marks.index("resumed")
        told = "".join(said(chunk["choices"][0]) for chunk in seen.chunks[:first])
        assert told
        assert whole.text.startswith(told)
        assert (seen.done, seen.errors, seen.counts) == (1, [], whole.counts)


@paths
@pytest.mark.parametrize(
    "asks",
    [
        {"logprobs": 1},
        {"n": 2, "temperature": 0.9},
        {"response_format": {"type": "json_object"}},
    ],
    ids="-".join,
)
async def test_what_is_more_than_text_ends_with_an_error(
    servers: list[VllmServer], path: str, asks: dict[str, object]
) -> None:
    async with behind(servers) as (_, client, knife):
        knife.after = 6
        seen = await story(client, path, asks)
        assert [error["code"] for error in seen.errors] == ["upstream_failed"]
        assert seen.text
        assert not seen.done


@paths
@pytest.mark.parametrize(
    "asks",
    [{"logit_bias": {"999999": 1}}, {"structured_outputs": {"regex": "(("}}],
    ids="-".join,
)
async def test_what_it_refuses_in_a_stream_is_the_requests_own_fault(
    servers: list[VllmServer], path: str, asks: dict[str, object]
) -> None:
    async with behind(servers) as (running, client, _):
        for _ in range(8):
            seen = await story(client, path, asks)
            assert [error["code"] for error in seen.errors] == ["refused_by_replica"]
            assert (seen.text, seen.done) == ("", 0)
        assert all(replica.breaker.is_closed for replica in running.replicas)


@paths
async def test_a_stopped_server_is_left_for_another(servers: list[VllmServer], path: str) -> None:
    async with behind(servers) as (_, client, _):
        whole = await story(client, path, {})
        try:
            seen = await story(client, path, {}, (servers[1], signal.SIGSTOP))  # they take turns
        finally:
            servers[1].signal(signal.SIGCONT)
        same(seen, whole, {})


async def keep_busy(
    running: GatewayServer, client: httpx2.AsyncClient, body: dict[str, Any]
) -> list[asyncio.Task[httpx2.Response]]:
    """Whole answers on their way: at the end each server is making one."""
    replicas, asked = running.replicas, list[asyncio.Task[httpx2.Response]]()

    def placed() -> bool:
        done = sum(task.done() for task in asked)
        return sum(replica.load.in_flight for replica in replicas) + done == len(asked)

    while not all(replica.load.in_flight for replica in replicas):
        await until(lambda: all(replica.breaker.is_closed for replica in replicas))
        asked.append(asyncio.create_task(client.post(COMPLETION, json=body)))
        await until(placed)
    return asked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_ended_server_is_missed_by_nobody(
    servers: list[VllmServer], number: signal.Signals
) -> None:
    asks: dict[str, object] = {"max_tokens": 300, "ignore_eos": True}
    body = {"model": "big", "temperature": 0} | asks | BODIES[COMPLETION]
    async with behind(servers, PATIENT) as (running, client, _):
        whole = await story(client, COMPLETION, asks)
        undisturbed = (await client.post(COMPLETION, json=body)).json()
        at_once = await keep_busy(running, client, body)
        try:
            hurt = (servers[1], number)
            streams = (story(client, COMPLETION, asks, each) for each in (hurt, None))
            for stream in await asyncio.gather(*streams):
                same(stream, whole, asks)
            servers[1].end()  # told to leave it may hang, so who tells it ends it at last
            for answer in await asyncio.gather(*at_once):
                assert answer.json()["choices"] == undisturbed["choices"]
                assert answer.json()["usage"] == undisturbed["usage"]
        finally:
            servers[1].end()
            servers[1].start()
            await asyncio.to_thread(servers[1].wait)


async def test_a_higher_tier_goes_first_in_it_too() -> None:
    """Where it says that it computes by priority: it runs four at a time, which nobody here knows."""
    begun: list[int] = []

    async def ask(client: httpx2.AsyncClient, number: int, priority: int) -> None:
        body = {"model": "big", "stream": True, "priority": priority, "max_tokens": 60}
        body |= BODIES[COMPLETION] | {"ignore_eos": True}
        async with client.stream("POST", COMPLETION, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and number not in begun:
                    begun.append(number)

    with TemporaryDirectory() as folder:
        server = VllmServer(Path(folder) / "v.sock", ("--scheduling-policy", "priority"))
        replica = ReplicaConfig(
            url=f"unix:{server.socket}", model="mini", kind="vllm", priority_scheduling=True
        )
        with started(server):
            async with (
                gateway(replica, timeouts=PATIENT, patience_s=None) as (running, client),
                asyncio.TaskGroup() as asking,
            ):
                (only,) = running.replicas
                for number in range(16):
                    asking.create_task(ask(client, number, 1))
                await until(lambda: len(begun) >= 4 and only.load.in_flight == 16)
                asking.create_task(ask(client, 16, 0))
    assert begun.index(16) < 12, "else it would have been the last"
