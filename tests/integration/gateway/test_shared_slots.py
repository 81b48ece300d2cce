"""Several gateways in front of one replica share its slots, keep its queue short and send higher tiers first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from tests.support.fake_engine import MAX_SEQS, FakeEngine, Script
from tests.support.gateway_harness import GatewayHarness, run_gateway
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig, Timeouts
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer


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
