"""Three gateways on one Redis and one PostgreSQL, while one of them is killed: limits, usage and retries."""

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
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_processes import (
    MODEL,
    GatewayProcess,
    OrganisationAccounts,
    gateways,
    open_organisation,
)
from tests.support.idempotent_gateway import KEY_HEADER, REPLAYED, run_servers
from tests.support.services import PostgresServer, RedisServer, running_postgres, running_redis
from tests.support.waiting import until

from argosy.deployment import AuthConfig, GatewayConfig, LimitsConfig, ModelConfig, ReplicaConfig
from argosy.protocol import EventParser
from argosy.store import StoreConfig, UsageRecord

NUM_GATEWAYS = 3
NUM_CLIENTS = 12
"""Concurrent clients, spread over the gateways."""
RESPONSE_TOKENS = 40
"""Tokens of a complete response."""
TOKEN_INTERVAL_S = 0.002
TIMEOUT_S = 45.0
MANY_CONNECTIONS = httpx2.Limits(max_connections=None)
CLOSED = {"quota_failure_mode": "closed"}


@dataclass
class CountingEngine:
    """Counts concurrent responses by project, the first word of the prompt."""

    running: Counter[str] = field(default_factory=Counter)
    max_running: Counter[str] = field(default_factory=Counter)
    num_responses: Counter[str] = field(default_factory=Counter)
    """Responses that have begun, by prompt."""
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends the pause after the fifth token of responses to prompts with the word "pause"."""

    async def __call__(self, request: UpstreamRequest) -> None:
        prompt = str(request.body["prompt"])
        project, *options = prompt.split()
        self.num_responses[prompt] += 1
        self.running[project] += 1
        self.max_running[project] = max(self.max_running[project], self.running[project])
        try:
            request.start_stream()
            for position in range(RESPONSE_TOKENS):
                if position == 5 and "pause" in options:
                    await self.resume.wait()
                is_last = position == RESPONSE_TOKENS - 1
                request.send_text(f" {position}", "length" if is_last else None)
                await request.writer.drain()
                await asyncio.sleep(TOKEN_INTERVAL_S)
            request.end_stream(tokens=RESPONSE_TOKENS)
        finally:
            self.running[project] -= 1


@dataclass
class Result:
    """Response as a client received it."""

    gateway: int
    status: int = 0
    code: str = ""
    tokens: int = 0
    finish_reason: str | None = None

    @property
    def is_rejected(self) -> bool:
        return self.status == 429

    def add_event(self, event: bytes, on_token: Callable[[], object]) -> None:
        """Count the tokens of a stream event."""
        if event == b"[DONE]":
            return
        for choice in msgspec.json.decode(event)["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["text"]:
                self.tokens += 1
                on_token()


@dataclass
class Fleet:
    """Gateways in front of one engine, and the projects that call them."""

    processes: list[GatewayProcess]
    """Processes of the gateways. Empty if they run in this one, at `urls`."""
    urls: list[str]
    accounts: OrganisationAccounts
    engine: CountingEngine
    client: httpx2.AsyncClient
    api_keys: dict[str, str]

    async def post(
        self,
        gateway: int,
        project: str,
        option: str = "",
        on_token: Callable[[], object] = lambda: None,
    ) -> Result:
        """Send a streamed completion of a project. `on_token` is called for each token."""
        result = Result(gateway)
        body = {"model": MODEL, "prompt": f"{project} {option}", "stream": True}
        url, headers = self._endpoint(gateway, project)
        async with self.client.stream("POST", url, json=body, headers=headers) as response:
            result.status = response.status_code
            if result.status != 200:
                result.code = msgspec.json.decode(await response.aread())["error"]["code"]
                return result
            parser = EventParser()
            with contextlib.suppress(httpx2.TransportError):  # the gateway was killed
                async for data in response.aiter_raw():
                    for event in parser.feed(data):
                        result.add_event(event, on_token)
        return result

    def _endpoint(self, gateway: int, project: str) -> tuple[str, dict[str, str]]:
        """Return the URL of a gateway's completions, and the headers with a project's key."""
        base = self.processes[gateway].url if self.processes else self.urls[gateway]
        return f"{base}/v1/completions", {"authorization": f"Bearer {self.api_keys[project]}"}

    async def post_with_key(self, gateway: int, prompt: str) -> httpx2.Response:
        """Send a completion whose idempotency key is its prompt, again while the key is in use."""
        url, headers = self._endpoint(gateway, "unlimited")
        headers[KEY_HEADER] = prompt.replace(" ", "-")
        body = {"model": MODEL, "prompt": prompt, "stream": True}
        while True:
            response = await self.client.post(url, json=body, headers=headers)
            if response.status_code != 409:
                return response
            await asyncio.sleep(0.1)

    async def post_until_admitted(
        self,
        gateway: int,
        project: str,
        option: str = "",
        on_token: Callable[[], object] = lambda: None,
    ) -> Result:
        """Send a completion again until the project's limits admit it."""
        async with asyncio.timeout(TIMEOUT_S):
            while (result := await self.post(gateway, project, option, on_token)).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return result

    async def start_paused(
        self, gateway: int, project: str, count: int
    ) -> list[asyncio.Task[Result]]:
        """Start streams and return once each has delivered five tokens and is paused."""
        tokens = asyncio.Semaphore(0)
        posts = [
            self.post_until_admitted(gateway, project, "pause", tokens.release)
            for _ in range(count)
        ]
        streams = [asyncio.create_task(post) for post in posts]
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(5 * count):
                await tokens.acquire()
        return streams

    async def send_load(self, project: str, is_last: Callable[[Result], bool]) -> list[Result]:
        """Let every client send requests of a project until `is_last` accepts a result."""
        results: list[Result] = []

        async def run_client(number: int) -> None:
            while True:
                result = await self.post(number % NUM_GATEWAYS, project)
                results.append(result)
                if is_last(result):
                    return
                if result.status != 200:
                    await asyncio.sleep(0.05)

        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(run_client(number) for number in range(NUM_CLIENTS)))
        return results

    def records_of(self, records: list[UsageRecord], project: str) -> list[UsageRecord]:
        """Return the usage records of a project."""
        ids = {each.name: each.id for each in self.accounts.store.accounts.list_projects()}
        return [record for record in records if record.project == ids[project]]

    async def stop(self) -> None:
        """Stop all gateways, which must exit without an error."""
        await asyncio.gather(*(process.stop() for process in self.processes))


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """Redis of this module, which tests may kill."""
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    """PostgreSQL of this module, which tests may stop."""
    with running_postgres() as server:
        yield server


@contextlib.asynccontextmanager
async def run_fleet(
    redis: RedisServer,
    postgres: PostgresServer,
    folder: Path,
    projects: Mapping[str, tuple[Mapping[str, Any], tuple[Any, ...] | None]],
    *,
    in_processes: bool = True,
) -> AsyncIterator[Fleet]:
    """Run gateways and create projects, given as settings and (unit, amount, window) of a limit by name."""
    engine = CountingEngine()
    with postgres.database() as url, open_organisation(url) as accounts:
        api_keys = {}
        for name, (settings, limit) in projects.items():
            project = accounts.project(name, **settings)
            api_keys[name] = accounts.key(project)
            if limit is not None:
                accounts.limit(project, *limit)
        accounts.price(1_000)
        async with fake_upstream(engine) as server:
            replica = ReplicaConfig(url=server.url, kind="openai")
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name=MODEL, replicas=[replica])],
                store=StoreConfig(url=url),
                auth=AuthConfig(mode="required"),
                limits=LimitsConfig(redis=redis.url),
                drain_deadline_s=5.0,
            )
            async with contextlib.AsyncExitStack() as stack:
                urls, processes = list[str](), list[GatewayProcess]()
                if in_processes:
                    running = gateways(config, folder, NUM_GATEWAYS)
                    processes = await stack.enter_async_context(running)
                else:
                    urls = await stack.enter_async_context(run_servers(config, NUM_GATEWAYS))
                client = httpx2.AsyncClient(timeout=TIMEOUT_S, limits=MANY_CONNECTIONS)
                await stack.enter_async_context(client)
                yield Fleet(processes, urls, accounts, engine, client, api_keys)


@pytest.mark.soak
async def test_limits_hold_under_load_and_usage_equals_delivered_tokens(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    projects = {
        "requests": (CLOSED, ("requests", 50, "hour")),
        "tokens": (CLOSED, ("tokens", 2_000, "hour")),
        "concurrency": (CLOSED, ("concurrency", 5, None)),
        "budget": (CLOSED, ("nano_dollars", 2_000_000, "day")),
    }
    async with run_fleet(redis_server, postgres_server, tmp_path, projects) as fleet:
        completed = Counter[int]()

        def has_eight_per_gateway(result: Result) -> bool:
            completed[result.gateway] += result.status == 200
            return completed[result.gateway] >= 8

        async def load(project: str) -> list[Result]:
            is_concurrency = project == "concurrency"
            return await fleet.send_load(
                project, has_eight_per_gateway if is_concurrency else lambda each: each.is_rejected
            )

        results = await asyncio.gather(*map(load, projects))
        served = {
            project: [each for each in of_project if each.status == 200]
            for project, of_project in zip(projects, results, strict=True)
        }
        assert 25 <= len(served["requests"]) <= 50
        assert fleet.engine.max_running["concurrency"] <= 5
        assert len(served["concurrency"]) >= 3 * 8
        max_overdraft = NUM_CLIENTS * RESPONSE_TOKENS
        for project in ("tokens", "budget"):
            tokens = sum(each.tokens for each in served[project])
            assert 1_000 <= tokens <= 2_000 + max_overdraft, project
        assert {each.finish_reason for each in served["tokens"]} <= {"length"}
        assert {each.finish_reason for each in served["budget"]} <= {"length"}

        all_records = await fleet.accounts.wait_for_rows(sum(map(len, served.values())))
        for project, of_project in served.items():
            records = fleet.records_of(all_records, project)
            delivered = sorted(each.tokens for each in of_project)
            assert sorted(record.output_tokens for record in records) == delivered, project
            assert {record.status for record in records} <= {"completed", "stopped"}
            assert all(each.nano_dollars == 1_000 * each.output_tokens for each in records)
        await fleet.stop()


async def test_limits_and_usage_survive_outages_of_redis_and_postgres(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    limit = ("requests", 30, "hour")
    projects = {"open": ({}, limit), "closed": (CLOSED, limit), "unlimited": (CLOSED, None)}
    async with run_fleet(
        redis_server, postgres_server, tmp_path, projects, in_processes=False
    ) as fleet:
        results = {
            project: [await fleet.post(number, project) for number in range(NUM_GATEWAYS)]
            for project in ("open", "closed")
        }

        def num_admitted() -> dict[str, int]:
            return {
                project: sum(each.status == 200 for each in of_project)
                for project, of_project in results.items()
            }

        assert num_admitted() == {"open": NUM_GATEWAYS, "closed": NUM_GATEWAYS}

        redis_server.process.kill()
        redis_server.process.wait()
        results["closed"] += await fleet.send_load("closed", lambda each: each.status == 503)
        assert "limits_unavailable" in {each.code for each in results["closed"]}
        results["open"] += await fleet.send_load("open", lambda each: each.is_rejected)
        assert 2 * NUM_GATEWAYS < num_admitted()["open"] <= 2 * 30
        assert num_admitted()["closed"] <= 30

        postgres_server.program.stop()
        results["unlimited"] = await asyncio.gather(
            *(fleet.post(number % NUM_GATEWAYS, "unlimited") for number in range(NUM_CLIENTS))
        )
        assert num_admitted()["unlimited"] == NUM_CLIENTS
        postgres_server.program.start()
        redis_server.program.start()

        results["closed"] += await fleet.send_load("closed", lambda each: each.status != 503)
        admitted = num_admitted()
        assert NUM_GATEWAYS < admitted["closed"] <= 30
        records = await fleet.accounts.wait_for_rows(sum(admitted.values()))
        recorded = {project: len(fleet.records_of(records, project)) for project in projects}
        assert recorded == admitted
        assert sum(record.output_tokens for record in records) == RESPONSE_TOKENS * len(records)
        await fleet.stop()


@pytest.mark.soak
async def test_killed_gateway_keeps_its_usage_and_frees_its_concurrency_slots(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    projects: dict[str, Any] = {
        "limited": (CLOSED, ("concurrency", 4, None)),
        "unlimited": ({}, None),
    }
    async with run_fleet(redis_server, postgres_server, tmp_path, projects) as fleet:
        victim = fleet.processes[0]
        streams = await fleet.start_paused(0, "limited", 4)
        assert (await fleet.post(1, "limited")).code == "rate_limit_exceeded"
        assert (await fleet.post(0, "unlimited")).status == 200
        # A response shows that the gateway has counted all delivered tokens.
        await fleet.client.get(f"{victim.url}/health")
        await victim.kill()
        assert [each.tokens for each in await asyncio.gather(*streams)] == [5] * 4
        assert (await fleet.post_until_admitted(1, "limited")).tokens == RESPONSE_TOKENS

        await victim.start()
        records = await fleet.accounts.wait_for_rows(4 + 2)
        interrupted = [record for record in records if record.status == "interrupted"]
        assert [record.output_tokens for record in interrupted] == [5] * 4
        assert [record.nano_dollars for record in interrupted] == [5_000] * 4
        assert {record.status for record in records} == {"interrupted", "completed"}
        assert len(records) == 6
        streams = await fleet.start_paused(0, "limited", 4)
        fleet.engine.resume.set()
        assert [each.tokens for each in await asyncio.gather(*streams)] == [RESPONSE_TOKENS] * 4
        await fleet.stop()


@pytest.mark.parametrize("redis_killed", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_concurrent_retries_generate_one_response_per_key(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path, redis_killed: bool
) -> None:
    """Without Redis each gateway may generate one response per key."""
    projects: dict[str, Any] = {"unlimited": ({}, None)}
    async with run_fleet(
        redis_server, postgres_server, tmp_path, projects, in_processes=False
    ) as fleet:
        prompts = [f"unlimited {number}" for number in range(10)]
        posts = [
            asyncio.create_task(fleet.post_with_key(retry % NUM_GATEWAYS, prompt))
            for retry in range(2 * NUM_GATEWAYS)
            for prompt in prompts
        ]
        if redis_killed:
            await posts[0]
            redis_server.program.stop()
        responses = await asyncio.gather(*posts)
        max_generated = NUM_GATEWAYS if redis_killed else 1
        for number in range(len(prompts)):
            of_key = responses[number :: len(prompts)]
            assert {response.status_code for response in of_key} == {200}
            generated = [each.content for each in of_key if REPLAYED not in each.headers]
            assert 1 <= len(generated) <= max_generated
            assert {response.content for response in of_key} == set(generated)
        assert max(fleet.engine.num_responses.values()) <= max_generated
        num_responses = fleet.engine.num_responses.total()
        records = await fleet.accounts.wait_for_rows(num_responses)
        assert sum(each.output_tokens for each in records) == num_responses * RESPONSE_TOKENS
    if redis_killed:
        redis_server.program.start()


@pytest.mark.soak
async def test_idempotency_key_of_killed_gateway_becomes_free(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    projects: dict[str, Any] = {"unlimited": ({}, None)}
    async with run_fleet(redis_server, postgres_server, tmp_path, projects) as fleet:
        post = asyncio.create_task(fleet.post_with_key(0, "unlimited pause"))
        await until(lambda: fleet.engine.running["unlimited"])
        await fleet.processes[0].kill()
        with pytest.raises(httpx2.TransportError):
            await post
        fleet.engine.resume.set()
        response = await fleet.post_with_key(1, "unlimited pause")
        assert (response.status_code, REPLAYED in response.headers) == (200, False)
        assert fleet.engine.num_responses["unlimited pause"] == 2
        second = await fleet.post_with_key(1, "unlimited pause")
        assert (second.content, second.headers[REPLAYED]) == (response.content, "true")
