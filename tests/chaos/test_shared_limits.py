"""Three gateways on one Redis and one PostgreSQL, hammered; both die and come back, and so does a gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.gateway_processes import MODEL, GatewayProcess, Tenants, gateways, tenants
from tests.support.scripted_server import Asked, Rough, rough_server
from tests.support.services import PostgresServer, RedisServer, running_postgres, running_redis

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.auth import AuthConfig
from argosy.gateway.filters.limit_filter import LimitsConfig
from argosy.protocol import EventParser
from argosy.store import StoreConfig, UsageRecord

GATEWAYS = 3
CALLERS = 12
"""That ask at once, spread over the gateways."""
ANSWER = 40
"""Tokens of an answer, when nothing ends it."""
PIECE_S = 0.002
DEADLINE_S = 45.0


@dataclass
class Engine:
    """An engine whose answers begin and go on as the test wants, and which counts who runs."""

    at_once: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    """Requests at a time, by the first word of their prompts."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends the answers to prompts that say "hold", which wait after their fifth token."""

    async def __call__(self, asked: Asked) -> None:
        who, *how = str(asked.body["prompt"]).split()
        self.at_once[who] += 1
        self.most[who] = max(self.most[who], self.at_once[who])
        try:
            asked.stream()
            for place in range(ANSWER):
                if place == 5 and "hold" in how:
                    await self.go_on.wait()
                asked.say(f" {place}", "length" if place == ANSWER - 1 else None)
                await asked.writer.drain()
                await asyncio.sleep(PIECE_S)
            asked.end(tokens=ANSWER)
        finally:
            self.at_once[who] -= 1


@dataclass
class Got:
    """What one request got."""

    gateway: int
    status: int = 0
    code: str = ""
    tokens: int = 0
    finish: str | None = None


@dataclass
class Fleet:
    """Gateways before an engine, and who calls them."""

    running: list[GatewayProcess]
    people: Tenants
    engine: Engine
    rough: Rough
    client: httpx2.AsyncClient
    keys: dict[str, str] = field(default_factory=dict)

    async def ask(
        self, gateway: int, who: str, how: str = "", told: Callable[[], object] = lambda: None
    ) -> Got:
        """One streamed completion on behalf of a project; `told` is called for each token."""
        got = Got(gateway)
        body = {"model": MODEL, "prompt": f"{who} {how}", "stream": True}
        url = f"{self.running[gateway].url}/v1/completions"
        headers = {"authorization": f"Bearer {self.keys[who]}"}
        async with self.client.stream("POST", url, json=body, headers=headers) as response:
            got.status = response.status_code
            if got.status != 200:
                got.code = msgspec.json.decode(await response.aread())["error"]["code"]
                return got
            parser = EventParser()
            with contextlib.suppress(httpx2.TransportError):  # its gateway was killed
                async for data in response.aiter_raw():
                    for event in parser.feed(data):
                        take(got, event, told)
        return got

    async def hold(self, gateway: int, who: str, count: int) -> list[asyncio.Task[Got]]:
        """So many streams at once, each of which has told five tokens and waits."""
        told = asyncio.Semaphore(0)
        asks = [self.let_in(gateway, who, "hold", told.release) for _ in range(count)]
        streams = [asyncio.create_task(ask) for ask in asks]
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(5 * count):
                await told.acquire()
        return streams

    async def hammer(self, who: str, until: Callable[[Got], bool]) -> list[Got]:
        """All callers ask for a project again and again, each until it gets what it waits for."""
        found: list[Got] = []

        async def call(number: int) -> None:
            while True:
                found.append(await self.ask(number % GATEWAYS, who))
                if until(found[-1]):
                    return
                if found[-1].status != 200:
                    await asyncio.sleep(0.05)

        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(call(number) for number in range(CALLERS)))
        return found

    async def let_in(
        self, gateway: int, who: str, how: str = "", told: Callable[[], object] = lambda: None
    ) -> Got:
        """The answer that a project gets once its limits have room."""
        async with asyncio.timeout(DEADLINE_S):
            while (got := await self.ask(gateway, who, how, told)).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return got


def take(got: Got, event: bytes, told: Callable[[], object]) -> None:
    """Count what an event brings."""
    if event == b"[DONE]":
        return
    for choice in msgspec.json.decode(event)["choices"]:
        got.finish = choice["finish_reason"] or got.finish
        if choice["text"]:
            got.tokens += 1
            told()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """Ours, to kill."""
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    """Ours, to stop."""
    with running_postgres() as server:
        yield server


@contextlib.asynccontextmanager
async def fleet(
    redis: RedisServer,
    postgres: PostgresServer,
    folder: Path,
    projects: Mapping[str, tuple[Mapping[str, Any], tuple[Any, ...] | None]],
) -> AsyncIterator[Fleet]:
    """Gateways and projects: name -> settings, and unit, amount and window of its limit."""
    engine = Engine()
    with postgres.database() as url, tenants(url) as people:
        keys = {}
        for name, (settings, limit) in projects.items():
            project = people.project(name, **settings)
            keys[name] = people.key(project)
            if limit is not None:
                people.limit(project, *limit)
        people.price(1_000)
        async with rough_server(engine) as rough:
            config = GatewayConfig(
                port=0,
                models=[
                    ModelConfig(name=MODEL, replicas=[ReplicaConfig(url=rough.url, kind="openai")])
                ],
                store=StoreConfig(url=url),
                auth=AuthConfig(mode="required"),
                limits=LimitsConfig(redis=redis.url),
                drain_deadline_s=5.0,
            )
            async with (
                gateways(config, folder, GATEWAYS) as running,
                httpx2.AsyncClient(timeout=DEADLINE_S, limits=MANY) as client,
            ):
                yield Fleet(running, people, engine, rough, client, keys)


MANY = httpx2.Limits(max_connections=None)
CLOSED = {"quota_failure_mode": "closed"}


def refused(got: Got) -> bool:
    return got.status == 429


def of(rows: list[UsageRecord], people: Tenants, name: str) -> list[UsageRecord]:
    """A project's rows."""
    named = {one.name: one.id for one in people.store.accounts.list_projects()}
    return [row for row in rows if row.project == named[name]]


async def test_no_limit_is_passed_by_more_than_its_bound_and_the_ledger_is_what_was_delivered(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    projects = {
        "requests": (CLOSED, ("requests", 50, "hour")),
        "tokens": (CLOSED, ("tokens", 2_000, "hour")),
        "places": (CLOSED, ("concurrency", 5, None)),
        "budget": (CLOSED, ("nano_dollars", 2_000_000, "day")),
    }
    async with fleet(redis_server, postgres_server, tmp_path, projects) as world:
        wanted = Counter[int]()

        def served_often(got: Got) -> bool:
            wanted[got.gateway] += got.status == 200
            return wanted[got.gateway] >= 8

        found = dict(
            zip(
                projects,
                await asyncio.gather(
                    *(
                        world.hammer(name, served_often if name == "places" else refused)
                        for name in projects
                    )
                ),
                strict=True,
            )
        )
        served = {name: [got for got in all_ if got.status == 200] for name, all_ in found.items()}
        assert 25 <= len(served["requests"]) <= 50
        assert world.engine.most["places"] <= 5
        assert len(served["places"]) >= 3 * 8
        running = CALLERS * ANSWER
        for name in ("tokens", "budget"):
            assert 1_000 <= sum(got.tokens for got in served[name]) <= 2_000 + running, name
        assert {got.finish for got in served["tokens"]} <= {"length", "limit"}
        assert {got.finish for got in served["budget"]} <= {"length", "budget"}

        rows = await world.people.settled(sum(len(some) for some in served.values()))
        for name, some in served.items():
            told = of(rows, world.people, name)
            assert sorted(row.output_tokens for row in told) == sorted(g.tokens for g in some), name
            assert {row.status for row in told} <= {"completed", "stopped"}
            assert all(row.nano_dollars == 1_000 * row.output_tokens for row in told)
        await asyncio.gather(*(gateway.stop() for gateway in world.running))


async def test_redis_is_killed_and_postgres_stopped_and_both_come_back(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    limit = ("requests", 30, "hour")
    projects = {
        "open": ({}, limit),
        "closed": (CLOSED, limit),
        "free": (CLOSED, None),
    }
    async with fleet(redis_server, postgres_server, tmp_path, projects) as world:
        found = {
            name: [await world.ask(number, name) for number in range(GATEWAYS)]
            for name in ("open", "closed")
        }
        assert {got.status for some in found.values() for got in some} == {200}

        redis_server.process.kill()
        redis_server.process.wait()
        found["closed"] += await world.hammer("closed", lambda got: got.status == 503)
        assert "limits_unavailable" in {got.code for got in found["closed"]}
        found["open"] += await world.hammer("open", refused)
        admitted = {name: sum(got.status == 200 for got in some) for name, some in found.items()}
        assert 3 + GATEWAYS < admitted["open"] <= 2 * 30
        assert admitted["closed"] <= 30

        postgres_server.program.stop()
        found["free"] = await asyncio.gather(
            *(world.ask(number % GATEWAYS, "free") for number in range(CALLERS))
        )
        assert {got.status for got in found["free"]} == {200}
        postgres_server.program.start()
        redis_server.program.start()

        found["closed"] += await world.hammer("closed", lambda got: got.status != 503)
        for name, some in found.items():
            admitted[name] = sum(got.status == 200 for got in some)
        assert 3 < admitted["closed"] <= 30
        rows = await world.people.settled(sum(admitted.values()))
        assert {name: len(of(rows, world.people, name)) for name in projects} == admitted
        assert sum(row.output_tokens for row in rows) == ANSWER * len(rows)
        await asyncio.gather(*(gateway.stop() for gateway in world.running))


async def test_a_killed_gateway_leaves_its_rows_and_gives_its_places_back(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    projects: dict[str, Any] = {"held": (CLOSED, ("concurrency", 4, None)), "free": ({}, None)}
    async with fleet(redis_server, postgres_server, tmp_path, projects) as world:
        victim = world.running[0]
        streams = await world.hold(0, "held", 4)
        assert (await world.ask(1, "held")).code == "rate_limit_exceeded"
        assert (await world.ask(0, "free")).status == 200
        await world.client.get(
            f"{victim.url}/health"
        )  # what was told has been counted, and rows ended
        await victim.kill()
        assert [got.tokens for got in await asyncio.gather(*streams)] == [5] * 4
        assert (await world.let_in(1, "held")).tokens == ANSWER

        await victim.start()
        rows = await world.people.settled(4 + 2)
        interrupted = [row for row in rows if row.status == "interrupted"]
        assert [row.output_tokens for row in interrupted] == [5] * 4
        assert [row.nano_dollars for row in interrupted] == [5_000] * 4
        assert {row.status for row in rows} == {"interrupted", "completed"}
        assert len(rows) == 6
        again = await world.hold(0, "held", 4)
        world.engine.go_on.set()
        assert [got.tokens for got in await asyncio.gather(*again)] == [ANSWER] * 4
        await asyncio.gather(*(gateway.stop() for gateway in world.running))
