"""Replicas that are half well: what they cost those who ask, and what those who ask may cost them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.support.gateway_harness import QUICK, Running, Watching, front, opened
from tests.support.replica_servers import completion, events
from tests.support.scripted_server import Answer, Asked, Rough, plain, rough_server
from tests.support.waiting import until

from argosy.gateway import ReplicaConfig, Timeouts
from argosy.gateway.backends import BackendKind
from argosy.gateway.request_context import RequestFilter
from argosy.policy import RetryBudget, poison_requests

PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def behind(
    *answers: Answer,
    kind: BackendKind = "openai",
    timeouts: Timeouts = QUICK,
    max_requests: int = 256,
    stages: Sequence[RequestFilter] = (),
) -> AsyncIterator[tuple[Running, Sequence[Rough]]]:
    """A gateway before servers that answer so."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(rough_server(answer)) for answer in answers]
        configs = [
            ReplicaConfig(url=one.url, kind=kind, model="rough", max_requests=max_requests)
            for one in servers
        ]
        running = await stack.enter_async_context(front(stages, *configs, timeouts=timeouts))
        yield running, servers


async def ask(running: Running, tokens: int = 3, prompt: str = "Once") -> tuple[int, bytes]:
    """Status and content of a streamed answer."""
    body = completion(prompt, model="big", max_tokens=tokens, stream=True)
    answer = await running.client.post(PATH, json=body)
    return answer.status_code, answer.content


async def fails(asked: Asked) -> None:
    asked.json(500, {"error": {"message": "out of order"}})


async def resets(asked: Asked) -> None:
    asked.writer.transport.abort()


async def is_silent(asked: Asked) -> None:
    del asked
    await asyncio.Event().wait()


async def test_one_that_works_gets_all_though_most_of_its_pool_fails() -> None:
    async with behind(fails, fails, plain) as (running, servers):
        for replica in running.replicas[:2]:
            opened(replica)
        for _ in range(12):
            assert (await ask(running))[0] == 200
        assert [len(server.asked) for server in servers] == [0, 0, 12]


async def test_those_that_fail_are_used_where_there_is_no_other_room() -> None:
    over = asyncio.Event()

    async def slow(asked: Asked) -> None:
        await over.wait()
        await plain(asked)

    async with behind(plain, plain, slow, max_requests=1) as (running, servers):
        for replica in running.replicas[:2]:
            opened(replica)
        waiting = asyncio.create_task(ask(running))
        await until(lambda: servers[2].asked)
        assert (await ask(running))[0] == 200
        over.set()
        assert (await waiting)[0] == 200
        assert len(servers[2].asked) == 1


class SpentBudget(RetryBudget):
    """Nothing is left of it the first times."""

    refusals = 3

    def try_acquire(self, now: float) -> bool:
        self.refusals -= 1
        return self.refusals < 0 and super().try_acquire(now)


async def test_what_a_failing_replica_loses_waits_for_the_budget_and_is_answered() -> None:
    answers = iter((resets, resets, plain))  # the first on a connection that was kept

    async def first_resets(asked: Asked) -> None:
        await (next(answers) if asked.path == PATH else plain)(asked)

    async with behind(first_resets, timeouts=Timeouts(failover_timeout_s=30.0)) as (running, _):
        (replica,) = running.replicas
        opened(replica)
        (pool,) = running.models.pools
        pool.retry_budget = SpentBudget()
        assert (await ask(running))[0] == 200


async def test_what_a_failing_replica_loses_goes_to_a_well_one_whatever_is_left_of_the_budget() -> (
    None
):
    async def leaves_it_to_the_other(asked: Asked) -> None:
        running.replicas[1].is_accepting = True
        await resets(asked)

    async with behind(leaves_it_to_the_other, plain) as (running, servers):
        failing, well = running.replicas
        opened(failing)
        well.is_accepting = False
        (pool,) = running.models.pools
        pool.retry_budget = RetryBudget(ratio=0.0, reserve=0.0)
        assert (await ask(running))[0] == 200
        assert len(servers[1].asked) == 1


@pytest.mark.parametrize("answer", [resets, is_silent])
async def test_what_failing_replicas_lose_is_asked_again_within_the_budget(answer: Answer) -> None:
    count = 40
    timeouts = Timeouts(first_token_timeout_s=0.1, failover_timeout_s=1.0)
    async with behind(answer, answer, timeouts=timeouts) as (running, servers):
        for replica in running.replicas:
            opened(replica)
        told = await asyncio.gather(*(ask(running) for _ in range(count)))
        assert {status for status, _ in told} == {502}
        assert sum(len(server.asked) for server in servers) <= 1.1 * count + 6


async def test_requests_wait_for_replicas_that_take_fewer_than_anybody_knew() -> None:
    taken, count = 0, 24

    async def takes_three(asked: Asked) -> None:
        nonlocal taken
        if taken == 3:
            asked.json(429, {"error": {"message": "later"}})
            return
        taken += 1
        await asyncio.sleep(0.05)
        taken -= 1
        await plain(asked)

    timeouts = Timeouts(first_token_timeout_s=5.0, failover_timeout_s=20.0)
    async with behind(takes_three, timeouts=timeouts) as (running, servers):
        first = await asyncio.gather(*(ask(running) for _ in range(count)))
        before = len(servers[0].asked)
        then = await asyncio.gather(*(ask(running) for _ in range(count)))
        assert {status for status, _ in first + then} == {200}
        assert len(servers[0].asked) - before < 1.5 * count


async def test_where_none_is_reached_nothing_serves_the_model() -> None:
    with socket.socket() as deaf:  # its port is nobody else's, and it does not listen
        deaf.bind(("127.0.0.1", 0))
        nobody = ReplicaConfig(url=f"http://127.0.0.1:{deaf.getsockname()[1]}", kind="openai")
        async with front([], nobody) as running:
            status, content = await ask(running)
    assert (status, json.loads(content)["error"]["code"]) == (503, "no_replica")


@pytest.mark.parametrize(("each", "whole"), [(1, False), (5, True)])
async def test_a_request_that_gets_on_survives_any_number_of_deaths_and_costs_none_for_each_token(
    each: int, whole: bool
) -> None:
    """Each server gives so many tokens and dies."""

    async def dies(asked: Asked) -> None:
        asked.stream()
        left = asked.body["max_tokens"]
        assert isinstance(left, int)
        for _ in range(min(each, left)):
            asked.say(" more")
        if left <= each:
            asked.say("", "length")
            asked.end()
        await asked.writer.drain()
        asked.writer.close()

    async with behind(dies, dies, dies, kind="llama.cpp") as (running, servers):
        status, content = await ask(running, tokens=60)
        asked = sum(len(server.asked) for server in servers)
        assert status == 200
        if whole:
            assert events(content)[-1] == b"[DONE]"
            assert asked == 60 // each
        else:
            assert json.loads(events(content)[-1])["error"]["code"] == "upstream_failed"
            assert asked == 4


async def test_a_request_that_replicas_died_of_costs_fewer_when_it_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poison_requests, "REJECTION_S", 0.3)
    well = asyncio.Event()

    async def dies(asked: Asked) -> None:
        await (plain if well.is_set() or asked.body["prompt"] != "Once" else resets)(asked)

    watching = Watching()

    def tries() -> int:
        return sum(len(context.trace.attempts) for context in watching.entered)

    async with behind(*[dies] * 6, stages=[watching]) as (running, _):
        for _ in range(2):
            status, content = await ask(running)
            assert (status, tries()) == (502, 4)
            assert "Change it, or try again in" in json.loads(content)["error"]["message"]
        assert (await ask(running, prompt="Twice"))[0] == 200
        while tries() == 5:
            assert (await ask(running))[0] == 502
        assert tries() == 6
        well.set()
        while (await ask(running))[0] == 502:
            assert tries() == 6
        assert (await ask(running))[0] == 200
    assert len(watching.entered[-1].pool.poison_requests) == 0


@pytest.mark.parametrize("page", ["<h1>Back in a minute</h1>", ""])
async def test_a_page_is_no_answer_whatever_its_status(page: str) -> None:
    async def is_away(asked: Asked) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(page)}\r\n\r\n"
        asked.writer.write((head + page).encode())

    async def well(asked: Asked) -> None:
        asked.json(200, {"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}]})

    async with behind(is_away, well) as (running, servers):
        for _ in range(4):
            answer = await running.client.post(PATH, json=completion(model="big", max_tokens=3))
            assert answer.json()["choices"][0]["text"] == "yes"
        assert servers[0].asked
