"""Who gets a replica's free seat, and when: whose own has failed goes first, and nobody waits beside a free one."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import httpx2
from tests.support.gateway_harness import Running, Watching, front
from tests.support.scripted_server import Asked, Rough, plain, rough_server
from tests.support.waiting import until

from argosy.gateway import QueueConfig, ReplicaConfig, Timeouts
from argosy.policy import RetryBudget
from argosy.protocol import ApiError

PATIENT = Timeouts(first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=20.0)


class Script:
    """Answers when it is told to; who asks what is known."""

    def __init__(self, *, cuts: bool = False) -> None:
        self._cuts = cuts
        self.asked: list[str] = []
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, asked: Asked) -> None:
        prompt = str(asked.body["prompt"])
        self.asked.append(prompt)
        if prompt == "full":
            asked.json(429, {"error": {"message": "full"}})
            return
        await self.gates[prompt].wait()
        if prompt == "cut" and self._cuts:
            asked.stream()
            asked.writer.close()
            return
        await plain(asked)


def one(server: Rough, name: str, most: int) -> ReplicaConfig:
    return ReplicaConfig(url=server.url, name=name, kind="openai", max_requests=most)


def asks(running: Running, prompt: str) -> asyncio.Task[httpx2.Response]:
    body = {"model": "big", "prompt": prompt, "max_tokens": 3, "stream": True}
    return asyncio.create_task(running.client.post("/v1/completions", json=body))


def is_asked(script: Script, count: int) -> Callable[[], bool]:
    return lambda: len(script.asked) == count


async def test_who_was_placed_before_goes_before_all_that_wait() -> None:
    left, right = Script(cuts=True), Script()
    async with (
        rough_server(left) as a,
        rough_server(right) as b,
        front([], one(a, "a", 1), one(b, "b", 1), timeouts=PATIENT) as running,
    ):
        cut = asks(running, "cut")
        await until(is_asked(left, 1))
        other = asks(running, "other")
        await until(is_asked(right, 1))
        waiting = []
        for number in range(4):
            waiting.append(asks(running, f"waiting {number}"))
            await running.queued(number + 1)
        left.gates["cut"].set()  # its connection is cut: the seat goes to one that waits
        await until(is_asked(left, 2))
        right.gates["cut"].set()
        right.gates["other"].set()
        assert (await cut).status_code == 200
        for script in (left, right):
            for number in range(4):
                script.gates[f"waiting {number}"].set()
        answers = await asyncio.gather(other, *waiting)
        assert {answer.status_code for answer in answers} == {200}
        assert right.asked[:2] == ["other", "cut"]


async def test_a_replica_that_was_full_is_asked_again_though_nothing_ends_there() -> None:
    script = Script()
    impatient = Timeouts(
        first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=0.01
    )
    async with (
        rough_server(script) as server,
        front([], one(server, "a", 2), timeouts=impatient) as running,
    ):
        long = asks(running, "long")
        await until(is_asked(script, 1))
        assert (await asks(running, "full")).status_code == 429
        script.gates["quick"].set()
        quick = asks(running, "quick")
        await running.queued(1)
        async with asyncio.timeout(10.0):
            assert (await quick).status_code == 200
        assert not long.done()
        script.gates["long"].set()
        assert (await long).status_code == 200


async def test_who_waited_for_replicas_that_have_all_gone_is_told_so() -> None:
    script, soon = Script(), QueueConfig(timeout_s=0.3)
    async with (
        rough_server(script) as server,
        front([], one(server, "a", 1), queue=soon, timeouts=PATIENT) as running,
    ):
        long = asks(running, "long")
        await until(is_asked(script, 1))
        assert (await asks(running, "waiting")).json()["error"]["code"] == "overloaded"
        waiting = asks(running, "waiting")
        await running.queued(1)
        (replica,) = running.replicas
        replica.is_accepting = False
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        script.gates["long"].set()
        assert (await long).status_code == 200


async def test_requests_that_go_nowhere_allow_no_retries() -> None:
    refusing = Watching(refuses=ApiError(429, "rate_limit_exceeded", "Too many."))
    async with (
        rough_server() as server,
        front([refusing], one(server, "a", 2)) as running,
    ):
        for _ in range(100):
            assert (await asks(running, "quick")).status_code == 429
        (pool,) = running.models.pools
        budget, now = RetryBudget(), asyncio.get_running_loop().time()
        allowed = 0
        while budget.try_acquire(now):
            allowed += 1
        taken = 0
        while pool.retry_budget.try_acquire(now):
            taken += 1
        assert taken == allowed
