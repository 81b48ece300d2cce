"""Requests that come while what serves their model is away: they wait while it may be back soon, and not longer."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, State, always, says
from tests.support.gateway_harness import Running, front, opened
from tests.support.replica_servers import MODEL, serve
from tests.support.scripted_server import Asked, plain, rough_server
from tests.support.waiting import until

from argosy.engine import EngineFailedError
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import QueueConfig, ReplicaConfig, Timeouts

PATIENT = Timeouts(
    first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=1000.0
)
SHORT = QueueConfig(max_requests=10)
BRIEF = Timeouts(first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=1.0)


def asks(running: Running, prompt: str = "Once") -> asyncio.Task[httpx2.Response]:
    body = {"model": "big", "prompt": prompt, "max_tokens": 3, "stream": True}
    return asyncio.create_task(running.client.post("/v1/completions", json=body))


def gone(answer: httpx2.Response) -> bool:
    """Whether it says that there is nothing, and not for a while."""
    told = answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]
    return told == (503, "no_replica", "10")


async def ready(running: Running) -> int:
    return (await running.client.get("/ready")).status_code


def queued(running: Running, answer: httpx2.Response) -> bool:
    """Whether its explanation tells that it waited."""
    trace = running.traces.find(answer.headers["x-argosy-request"])
    assert trace is not None
    return trace.queued_at is not None


def at(port: int) -> ReplicaConfig:
    url = f"http://127.0.0.1:{port}"
    return ReplicaConfig(url=url, name="a", kind="openai", model="rough", max_requests=1)


@asynccontextmanager
async def lost(
    timeouts: Timeouts, queue: QueueConfig = SHORT
) -> AsyncIterator[tuple[Running, int]]:
    """A gateway whose only replica, a server that has one seat, has just gone; and the port that it was at."""
    async with AsyncExitStack() as later:
        async with rough_server() as server:
            gateway = front([], at(server.port), timeouts=timeouts, queue=queue)
            running = await later.enter_async_context(gateway)
        opened(running.replicas[0])
        yield running, server.port


async def finds_out(running: Running) -> asyncio.Task[httpx2.Response]:
    """The request that notices that the replica has gone."""
    asking = asks(running, "finds out")
    await until(lambda: running.replicas[0].outage.is_down)
    return asking


async def test_requests_wait_in_their_order_for_a_server_that_is_started_again() -> None:
    order: list[str] = []

    async def notes(asked: Asked) -> None:
        order.append(str(asked.body["prompt"]))
        await plain(asked)

    async with lost(PATIENT) as (running, port):
        waiting = [await finds_out(running)]
        assert await ready(running) == 503
        for number in range(4):
            waiting.append(asks(running, str(number)))
            await running.queued(number + 1)
        async with rough_server(notes, port=port) as server:
            answers = await asyncio.gather(*waiting)
            assert {answer.status_code for answer in answers} == {200}
            assert server.most_at_once == 1
            assert await ready(running) == 200
    assert [name for name in order if name != "finds out"] == ["0", "1", "2", "3"]


async def test_no_more_wait_for_one_that_is_away_than_for_one_that_is_full() -> None:
    async with lost(PATIENT, QueueConfig(max_requests=2)) as (running, port):
        waiting = [await finds_out(running)]
        for number in range(2):
            waiting.append(asks(running))
            await running.queued(number + 1)
        assert (await asks(running)).json()["error"]["code"] == "overloaded"
        async with rough_server(port=port):
            answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}


async def test_to_tokenize_waits_for_it_too() -> None:
    async with lost(PATIENT) as (running, port):
        first = await finds_out(running)
        told = asyncio.create_task(running.client.post("/tokenize", json={"prompt": "Once"}))
        async with rough_server(port=port) as server:
            server.tokenize = [7]
            assert (await first).status_code == 200
            assert (await told).json() == {"tokens": [7]}
    async with lost(BRIEF) as (running, _):
        first = await finds_out(running)
        assert gone(await running.client.post("/tokenize", json={"prompt": "Once"}))
        assert gone(await first)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_one_does_not_tokenize_another_may(status: int) -> None:
    async with rough_server() as ill, rough_server() as well:
        behind = [ReplicaConfig(url=server.url, kind="openai") for server in (ill, well)]
        ill.tokenize, ill.tokenizes_with, well.tokenize = [], status, [7]
        async with front([], *behind) as running:
            for _ in range(5):
                told = await running.client.post("/tokenize", json={"prompt": "Once"})
                assert (told.status_code, told.json()) == (200, {"tokens": [7]})
            assert (await running.client.get("/openapi.json")).status_code == 503  # not theirs
            well.tokenizes_with = status
            told = await running.client.post("/tokenize", json={"prompt": "Once"})
            assert (told.status_code, told.json()["error"]["code"]) == (503, "no_replica")


async def test_what_only_a_replica_can_tell_is_not_told_while_it_is_away() -> None:
    async with lost(BRIEF) as (running, _):
        first = await finds_out(running)
        for path, of in (
            ("/openapi.json", "No replica is available"),
            ("/replicas/a/metrics", "The replica 'a'"),
        ):
            told = await running.client.get(path)
            assert (told.status_code, told.json()["error"]["code"]) == (503, "no_replica")
            assert told.json()["error"]["message"].startswith(of)
        assert gone(await first)


async def test_nobody_waits_for_one_that_does_not_come_back() -> None:
    async with lost(BRIEF) as (running, _):
        first = await finds_out(running)
        waiting = asks(running)
        await running.queued(1)
        answer = await waiting
        assert gone(answer)
        assert queued(running, answer)
        late = await asks(running)
        assert gone(late)
        assert not queued(running, late)
        assert (await first).status_code == 503


async def test_nobody_waits_for_one_that_never_was_there() -> None:
    with socket.socket() as deaf:  # its port is nobody else's, and it does not listen
        deaf.bind(("127.0.0.1", 0))
        async with front([], at(deaf.getsockname()[1]), timeouts=PATIENT) as running:
            for _ in range(3):
                answer = await asks(running)
                assert gone(answer)
                assert not queued(running, answer)


async def test_one_that_never_said_that_it_was_well_may_be_so_all_the_same() -> None:
    async with AsyncExitStack() as later:
        async with rough_server() as server:
            port = server.port
        running = await later.enter_async_context(front([], at(port), timeouts=PATIENT))
        assert await ready(running) == 503
        async with rough_server(port=port):
            assert (await asks(running)).status_code == 200
            assert await ready(running) == 200


@pytest.mark.parametrize("state", ["starting", "restarting", "failed"])
async def test_one_that_says_that_it_will_be_back_is_waited_for(
    tokenizer: Tokenizer, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that has failed says so until its server sees it, and leaves: here that is after the test.
    monkeypatch.setattr(
        "argosy.engine.serving.api_server.replica_server.ENGINE_POLL_INTERVAL_S", 3600.0
    )
    engine = FakeEngine(tokenizer, always(says(tokenizer, "Yes.")))
    at_once = Timeouts(failover_timeout_s=1e-6)
    with suppress(EngineFailedError):  # one that has failed ends soon after
        async with (
            serve(engine) as served,
            front(
                [],
                ReplicaConfig(url=served.url, kind="argosy", model=MODEL),
                timeouts=at_once,
            ) as running,
        ):
            engine.state = state
            await running.probe()
            assert await ready(running) == 503
            if state == "failed":
                assert gone(await asks(running))
                return
            waiting = asks(running)
            await running.queued(1)
            engine.state = "ready"
            await running.probe()
            assert (await waiting).status_code == 200


async def test_one_that_works_and_was_missed_is_found_again_before_what_runs_there_ends() -> None:
    more = asyncio.Event()

    async def slow(asked: Asked) -> None:
        if asked.body["prompt"] == "long":
            await more.wait()
        await plain(asked)

    async with rough_server(slow) as server:
        config = ReplicaConfig(url=server.url, kind="openai", model="rough", max_requests=4)
        async with front([], config, timeouts=PATIENT) as running:
            long = asks(running, "long")
            await until(lambda: server.asked)
            (replica,) = running.replicas
            opened(replica)
            replica.on_unreachable(time.monotonic())
            assert await ready(running) == 503
            assert (await asks(running)).status_code == 200
            assert await ready(running) == 200
            more.set()
            assert (await long).status_code == 200


async def test_what_is_lacking_here_is_held_against_no_replica() -> None:
    async with (
        rough_server() as server,
        front([], at(server.port), timeouts=PATIENT) as running,
    ):
        (replica,), soft = running.replicas, resource.getrlimit(resource.RLIMIT_NOFILE)
        assert await ready(running) == 200  # on a connection that is kept
        while (kept := replica.upstream.take_idle_connection()) is not None:
            kept.abort()
        with capture_logs() as logs:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, soft[1]))
            try:
                answer = asks(running)
                await until(lambda: "attempt_failed" in [line["event"] for line in logs])
                for _ in range(5):
                    await running.probe()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, soft)
            assert replica.breaker.is_closed
            assert (await answer).status_code == 200
        assert (await asks(running)).status_code == 200
