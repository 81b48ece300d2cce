"""Slots of replicas: the order in which waiting requests get them, and their division among several gateways."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

import httpx2
from tests.support.fake_engine import MAX_SEQS, FakeEngine, Script
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    fake_upstream,
    respond_with_tokens,
)
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import QueueConfig, ReplicaConfig, Timeouts
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.policy import RetryBudget
from argosy.protocol import ApiError

LONG_TIMEOUTS = Timeouts(
    first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=20.0
)


class GatedScript:
    """Script that responds to a prompt once the gate of that prompt is open.

    The prompt "full" is rejected with 429. With `cuts`, the connection of the prompt "cut" closes.
    """

    def __init__(self, *, cuts: bool = False) -> None:
        self._cuts = cuts
        self.prompts: list[str] = []
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, request: UpstreamRequest) -> None:
        prompt = str(request.body["prompt"])
        self.prompts.append(prompt)
        if prompt == "full":
            request.send_json(429, {"error": {"message": "full"}})
            return
        await self.gates[prompt].wait()
        if prompt == "cut" and self._cuts:
            request.start_stream()
            request.writer.close()
            return
        await respond_with_tokens(request)


def replica_config(server: FakeUpstream, name: str, max_requests: int) -> ReplicaConfig:
    return ReplicaConfig(url=server.url, name=name, kind="openai", max_requests=max_requests)


def post(gateway: GatewayHarness, prompt: str) -> asyncio.Task[httpx2.Response]:
    body = {"model": "big", "prompt": prompt, "max_tokens": 3, "stream": True}
    return asyncio.create_task(gateway.client.post("/v1/completions", json=body))


def has_received(script: GatedScript, count: int) -> Callable[[], bool]:
    return lambda: len(script.prompts) == count


async def test_failed_over_request_precedes_waiting_requests() -> None:
    left, right = GatedScript(cuts=True), GatedScript()
    async with (
        fake_upstream(left) as left_server,
        fake_upstream(right) as right_server,
        run_gateway(
            [],
            replica_config(left_server, "left", 1),
            replica_config(right_server, "right", 1),
            timeouts=LONG_TIMEOUTS,
        ) as gateway,
    ):
        cut = post(gateway, "cut")
        await until(has_received(left, 1))
        other = post(gateway, "other")
        await until(has_received(right, 1))
        waiting = []
        for number in range(4):
            waiting.append(post(gateway, f"waiting {number}"))
            await gateway.wait_for_queued(number + 1)
        left.gates["cut"].set()  # the slot of the cut connection goes to a waiting request
        await until(has_received(left, 2))
        right.gates["cut"].set()
        right.gates["other"].set()
        assert (await cut).status_code == 200
        for script in (left, right):
            for number in range(4):
                script.gates[f"waiting {number}"].set()
        responses = await asyncio.gather(other, *waiting)
        assert {response.status_code for response in responses} == {200}
        assert right.prompts[:2] == ["other", "cut"]


async def test_replica_gets_requests_again_after_429_while_others_still_run() -> None:
    script = GatedScript()
    timeouts = Timeouts(
        first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=0.01
    )
    async with (
        fake_upstream(script) as server,
        run_gateway([], replica_config(server, "a", 2), timeouts=timeouts) as gateway,
    ):
        long = post(gateway, "long")
        await until(has_received(script, 1))
        assert (await post(gateway, "full")).status_code == 429
        script.gates["quick"].set()
        quick = post(gateway, "quick")
        await gateway.wait_for_queued(1)
        async with asyncio.timeout(10.0):
            assert (await quick).status_code == 200
        assert not long.done()
        script.gates["long"].set()
        assert (await long).status_code == 200


async def test_waiting_request_fails_with_no_replica_after_all_replicas_leave() -> None:
    script, queue = GatedScript(), QueueConfig(timeout_s=0.3)
    async with (
        fake_upstream(script) as server,
        run_gateway(
            [], replica_config(server, "a", 1), queue=queue, timeouts=LONG_TIMEOUTS
        ) as gateway,
    ):
        long = post(gateway, "long")
        await until(has_received(script, 1))
        assert (await post(gateway, "waiting")).json()["error"]["code"] == "overloaded"
        waiting = post(gateway, "waiting")
        await gateway.wait_for_queued(1)
        (replica,) = gateway.replicas
        replica.health.on_report_required()
        response = await waiting
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        script.gates["long"].set()
        assert (await long).status_code == 200


async def test_rejected_requests_do_not_increase_retry_budget() -> None:
    rejecting = RecordingFilter(rejection=ApiError(429, "rate_limit_exceeded", "Too many."))
    async with (
        fake_upstream() as server,
        run_gateway([rejecting], replica_config(server, "a", 2)) as gateway,
    ):
        for _ in range(100):
            assert (await post(gateway, "quick")).status_code == 429
        (pool,) = gateway.models.pools
        now = asyncio.get_running_loop().time()

        def count_retries(budget: RetryBudget) -> int:
            count = 0
            while budget.try_acquire(now):
                count += 1
            return count

        assert count_retries(pool.retry_budget) == count_retries(RetryBudget())


# --- slots that gateways share --------------------------------------------------------------------


class Turnstile(asyncio.Event):
    """Event whose waiters are released one by one, in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)

    async def wait(self) -> Literal[True]:
        await self.permits.acquire()
        return True


@dataclass
class SharedReplica:
    """Gateways in front of one replica whose responses end one by one."""

    gateways: list[GatewayHarness]
    engine: FakeEngine
    turnstile: Turnstile
    requests: list[list[asyncio.Task[int]]] = field(default_factory=list)
    """Requests of each gateway that were not cancelled."""

    async def post(self, gateway: int, count: int, priority: int = 0) -> None:
        """Send requests whose prompts name the gateway and the priority, and wait until they are queued or sent."""
        for _ in range(count):
            request = asyncio.create_task(self._post(gateway, priority))
            self.requests[gateway].append(request)
        await self._settled()

    async def _post(self, gateway: int, priority: int) -> int:
        body = {
            "model": "big",
            "messages": [{"role": "user", "content": f"gateway{gateway} rank{priority}"}],
            "priority": priority,
            "max_tokens": 4,
        }
        client = self.gateways[gateway].client
        return (await client.post("/v1/chat/completions", json=body)).status_code

    def at_replica(self, words: str = "") -> int:
        """Return the number of running requests at the replica whose prompt contains these words."""
        live = self.engine.live
        prompts = [request.prompt for request in self.engine.requests if request.id in live]
        return sum(words in self.engine.tokenizer.decode(prompt) for prompt in prompts)

    async def end_responses(self, count: int = 1) -> None:
        """End the oldest responses, and let every gateway probe the replica afterwards."""
        before = self._num_open()
        for _ in range(count):
            self.turnstile.permits.release()
        await until(lambda: self._num_open() == before - count)
        for gateway in self.gateways:
            await self._settled()
            await gateway.probe()
        await self._settled()

    async def finish(self) -> None:
        """End all responses, and check that every request has succeeded."""
        for _ in range(1000):
            self.turnstile.permits.release()
        while self._num_open():
            for gateway in self.gateways:
                await gateway.probe()
        results = {request.result() for requests in self.requests for request in requests}
        assert results == {200}

    async def _settled(self) -> None:
        """Wait until every request is in its gateway's queue or at the replica."""
        await until(lambda: all(map(self._is_settled, range(len(self.gateways)))))

    def _is_settled(self, number: int) -> bool:
        gateway = self.gateways[number]
        sent = gateway.replicas[0].load.in_flight
        num_open = sum(not request.done() for request in self.requests[number])
        has_arrived = self.at_replica(f"gateway{number}") == sent
        return has_arrived and sent + gateway.handlers.queued_requests["big"] == num_open

    def _num_open(self) -> int:
        return sum(not request.done() for requests in self.requests for request in requests)


@contextlib.asynccontextmanager
async def shared_replica(tokenizer: Tokenizer, num_gateways: int) -> AsyncIterator[SharedReplica]:
    """Run gateways that probe the replica only when the test says so."""

    def script(_: EngineRequest) -> Script:
        return Script([100, 101, 102, 103], finish="length", pause_after=1)

    turnstile = Turnstile()
    engine = FakeEngine(tokenizer, script, may_continue=turnstile)
    async with serve(engine) as served, contextlib.AsyncExitStack() as stack:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        timeouts = Timeouts(first_token_timeout_s=30.0)
        gateways = [
            await stack.enter_async_context(run_gateway([], replica, timeouts=timeouts))
            for _ in range(num_gateways)
        ]
        await stack.enter_async_context(asyncio.timeout(60))
        yield SharedReplica(gateways, engine, turnstile, [[] for _ in gateways])


async def test_slots_are_shared_evenly_by_busy_gateways(tokenizer: Tokenizer) -> None:
    async with shared_replica(tokenizer, 2) as replica:
        await replica.post(0, 40)
        assert replica.at_replica() == MAX_SEQS
        await replica.end_responses(0)
        await replica.post(1, 40)
        assert (
            replica.at_replica("gateway1") == MAX_SEQS // 4
        )  # without waiting for the end of a response
        for _ in range(2 * MAX_SEQS):
            await replica.end_responses()
            assert MAX_SEQS <= replica.at_replica() <= MAX_SEQS + MAX_SEQS // 4
        assert replica.at_replica("gateway0") == replica.at_replica("gateway1") == MAX_SEQS // 2
        await replica.finish()


async def test_higher_tier_of_other_gateway_is_served_first(tokenizer: Tokenizer) -> None:
    async with shared_replica(tokenizer, 2) as replica:
        await replica.post(0, 40, priority=1)
        await replica.end_responses(0)
        await replica.post(1, 40)
        assert replica.at_replica("rank0") == MAX_SEQS // 4
        for _ in range(2 * MAX_SEQS):
            await replica.end_responses()
        assert replica.at_replica("rank0") == MAX_SEQS
        assert replica.at_replica() <= MAX_SEQS + MAX_SEQS // 4
        await replica.finish()


async def test_requests_beyond_slots_of_unknown_gateways_are_not_rejected(
    tokenizer: Tokenizer,
) -> None:
    async with shared_replica(tokenizer, 3) as replica:
        for gateway in range(3):  # before the gateways know of each other
            await replica.post(gateway, 12)
        assert replica.at_replica() == 3 * MAX_SEQS
        await replica.end_responses(0)
        for gateway in range(3):
            await replica.post(gateway, 12, priority=1)
        await replica.end_responses(2 * MAX_SEQS)
        assert replica.at_replica() <= MAX_SEQS + MAX_SEQS // 4
        await replica.finish()
