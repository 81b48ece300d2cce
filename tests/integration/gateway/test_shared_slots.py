"""Several gateways before one replica: its seats are shared, its own queue stays short, and higher tiers go first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from tests.support.fake_engine import SEATS, FakeEngine, Script
from tests.support.gateway_harness import Running, front
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.engine.serving.core_messages import EngineRequest
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig
from argosy.gateway.config import Timeouts


class Turnstile(asyncio.Event):
    """Lets through as many as are let: requests that have come to wait there, first come first served."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Semaphore(0)

    async def wait(self) -> Literal[True]:
        await self.let.acquire()
        return True


@dataclass
class Fleet:
    """Gateways before one replica whose answers end one by one."""

    gateways: list[Running]
    engine: FakeEngine
    turnstile: Turnstile
    asked: list[list[asyncio.Task[int]]] = field(default_factory=list)
    """By gateway."""

    async def ask(self, gateway: int, count: int, priority: int = 0) -> None:
        """Have so many requests come, whose prompts name the gateway and the priority."""
        for _ in range(count):
            asking = asyncio.create_task(self._ask(gateway, priority))
            self.asked[gateway].append(asking)
        await self._settled()

    async def _ask(self, gateway: int, priority: int) -> int:
        body = {
            "model": "big",
            "messages": [{"role": "user", "content": f"gateway{gateway} rank{priority}"}],
            "priority": priority,
            "max_tokens": 4,
        }
        client = self.gateways[gateway].client
        return (await client.post("/v1/chat/completions", json=body)).status_code

    def there(self, words: str = "") -> int:
        """Requests at the replica now, those whose prompt has these words."""
        live = self.engine.live
        prompts = [one.prompt for one in self.engine.requests if one.id in live]
        return sum(words in self.engine.tokenizer.decode(prompt) for prompt in prompts)

    async def turn(self, ended: int = 1) -> None:
        """Have the so many oldest answers end, and every gateway hear how the replica is then."""
        over = self._waited_for()
        for _ in range(ended):
            self.turnstile.let.release()
        await until(lambda: self._waited_for() == over - ended)
        for gateway in self.gateways:
            await self._settled()
            await gateway.probe()
        await self._settled()

    async def finish(self) -> None:
        """Have all answered."""
        for _ in range(1000):
            self.turnstile.let.release()
        while self._waited_for():
            for gateway in self.gateways:
                await gateway.probe()
        assert {one.result() for asked in self.asked for one in asked} == {200}

    def leave(self, gateway: int) -> None:
        """Nobody waits for this gateway's answers any more."""
        for asking in self.asked[gateway]:
            asking.cancel()
        self.asked[gateway].clear()

    async def _settled(self) -> None:
        """Wait until every request is where it goes for now: in its gateway's queue, or at the replica."""
        await until(lambda: all(map(self._is_settled, range(len(self.gateways)))))

    def _is_settled(self, number: int) -> bool:
        gateway = self.gateways[number]
        sent = gateway.replicas[0].load.in_flight
        open_ = sum(not asking.done() for asking in self.asked[number])
        at_replica = self.there(f"gateway{number}") == sent
        return at_replica and sent + gateway.serving.queued_requests["big"] == open_

    def _waited_for(self) -> int:
        return sum(not asking.done() for asked in self.asked for asking in asked)


@contextlib.asynccontextmanager
async def fleet(tokenizer: Tokenizer, count: int) -> AsyncIterator[Fleet]:
    """So many gateways, which ask the replica how it is when they are told to."""

    def script(_: EngineRequest) -> Script:
        return Script([100, 101, 102, 103], finish="length", pause_after=1)

    turnstile = Turnstile()
    engine = FakeEngine(tokenizer, script, go_on=turnstile)
    async with serve(engine) as served, contextlib.AsyncExitStack() as stack:
        behind = ReplicaConfig(url=served.url, model=MODEL)
        timeouts = Timeouts(first_token_timeout_s=30.0)
        fronts = [front([], behind, timeouts=timeouts) for _ in range(count)]
        running = [await stack.enter_async_context(one) for one in fronts]
        await stack.enter_async_context(asyncio.timeout(60))
        yield Fleet(running, engine, turnstile, [[] for _ in running])


async def test_seats_are_shared_by_those_who_want_them(tokenizer: Tokenizer) -> None:
    async with fleet(tokenizer, 2) as those:
        await those.ask(0, 40)
        assert those.there() == SEATS
        await those.turn(0)
        await those.ask(1, 40)
        assert those.there("gateway1") == SEATS // 4  # it need not wait for an answer to end
        for _ in range(2 * SEATS):
            await those.turn()
            assert SEATS <= those.there() <= SEATS + SEATS // 4
        assert those.there("gateway0") == those.there("gateway1") == SEATS // 2
        await those.finish()


async def test_a_higher_tier_of_another_gateway_goes_before(tokenizer: Tokenizer) -> None:
    async with fleet(tokenizer, 2) as those:
        await those.ask(0, 40, priority=1)
        await those.turn(0)
        await those.ask(1, 40)
        assert those.there("rank0") == SEATS // 4
        for _ in range(2 * SEATS):
            await those.turn()
        assert those.there("rank0") == SEATS
        assert those.there() <= SEATS + SEATS // 4
        await those.finish()


async def test_the_seats_of_a_gateway_that_leaves_are_for_the_others(tokenizer: Tokenizer) -> None:
    async with fleet(tokenizer, 2) as those:
        await those.ask(0, 40)
        await those.turn(0)
        await those.ask(1, 40)
        those.leave(0)
        await until(lambda: not those.there("gateway0"))
        await those.turn(0)
        assert those.there("gateway1") == SEATS
        await those.finish()


async def test_nobody_is_refused_for_what_another_gateway_sent(tokenizer: Tokenizer) -> None:
    async with fleet(tokenizer, 3) as those:
        for gateway in range(3):  # before any has heard of the others
            await those.ask(gateway, 12)
        assert those.there() == 3 * SEATS
        await those.turn(0)
        for gateway in range(3):
            await those.ask(gateway, 12, priority=1)
        await those.turn(2 * SEATS)
        assert those.there() <= SEATS + SEATS // 4
        await those.finish()
