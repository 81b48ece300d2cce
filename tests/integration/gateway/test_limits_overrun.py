"""What requests hold of limits that generate nothing or are refused, in one gateway and in several; and no limit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.integration.gateway.test_limits import Clock, in_force
from tests.integration.gateway.test_shared_limits import gateways
from tests.support.backend_formats import Vllm
from tests.support.fake_backend import Asked, running
from tests.support.gateway_client import gateway
from tests.support.gateway_processes import tenants
from tests.support.idempotent_gateway import fleet
from tests.support.limit_harness import CALLER, limit, refusal, request
from tests.support.scripted_server import Asked as RoughlyAsked
from tests.support.scripted_server import rough_server
from tests.support.services import RedisServer, running_redis
from tests.support.waiting import until

from argosy.gateway import ReplicaConfig
from argosy.gateway.utility_handlers import MAX_CONCURRENT_PER_TENANT
from argosy.protocol import ApiError
from argosy.store import StoreConfig


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


async def test_what_generates_nothing_holds_a_place_while_it_lasts_and_counts_if_it_succeeds(
    clock: Clock,
) -> None:
    limits = in_force(clock, limit("concurrency", 1), limit("requests", 2))

    async def passes() -> str:
        try:
            async with limits.reserve_request(CALLER, "big", []):
                pass
        except ApiError as error:
            return error.message
        return ""

    with pytest.raises(RuntimeError):
        async with limits.reserve_request(CALLER, "big", []):
            raise RuntimeError
    async with limits.reserve_request(CALLER, "big", []):
        assert "at a time" in await passes()
    assert await passes() == ""
    assert "2 requests per minute" in await passes()


async def test_what_generates_nothing_asks_for_its_room_too(server: RedisServer) -> None:
    async with gateways(server, limit("requests", 2, "hour"), count=1) as [stage]:
        for _ in range(2):
            async with stage.reserve_request(CALLER, "big", []):
                pass
        with pytest.raises(ApiError, match="2 requests per hour"):
            async with stage.reserve_request(CALLER, "big", []):
                pass


class Slow(Vllm):
    """Tokenizes once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.most = 0

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.may.wait()
        self.running -= 1
        return await super()._answer(asked, writer)


@pytest.mark.parametrize(
    ("status", "second"), [(400, 429), (413, 429), (422, 429), (404, 404), (500, 502)]
)
async def test_a_request_that_a_replica_finds_fault_with_is_one(
    tmp_path: Path, status: int, second: int
) -> None:
    """Else nothing bounds how many somebody sends; what is the fleet's own fault counts for nothing."""

    async def script(asked: RoughlyAsked) -> None:
        asked.json(status, {"error": {"message": "no"}})

    async with (
        rough_server(script) as rough,
        fleet(tmp_path, ReplicaConfig(url=rough.url, kind="openai"), requests=1) as made,
    ):
        principal = await made.principal()
        assert (await principal.ask("a")).status_code in {status, second}
        assert (await principal.ask("b")).status_code == second


async def test_one_tenants_texts_are_tokenized_a_few_at_a_time(tmp_path: Path) -> None:
    """Sixty long ones at once kept everybody else's prompts waiting for seconds."""
    double, url = Slow(), f"sqlite:///{tmp_path / 'argosy.db'}"
    with tenants(url) as people:
        shop, other = (people.key(people.project(name)) for name in ("shop", "other"))
        async with running(double):
            replica = ReplicaConfig(url=double.url, kind="vllm", model=double.model)
            async with gateway(replica, store=StoreConfig(url=url)) as (_, client):

                async def ask(key: str) -> int:
                    headers = {"authorization": f"Bearer {key}"}
                    body = {"model": "big", "prompt": "Tell me"}
                    return (await client.post("/tokenize", json=body, headers=headers)).status_code

                asking = [
                    asyncio.create_task(ask(shop)) for _ in range(3 * MAX_CONCURRENT_PER_TENANT)
                ]
                await until(lambda: double.running >= MAX_CONCURRENT_PER_TENANT)
                asking.append(asyncio.create_task(ask(other)))
                await until(lambda: double.running > MAX_CONCURRENT_PER_TENANT)
                double.may.set()
                assert await asyncio.gather(*asking) == [200] * len(asking)
                assert double.most == MAX_CONCURRENT_PER_TENANT + 1


async def test_a_limit_that_cannot_be_counted_takes_none_of_the_others_out_of_force(
    clock: Clock,
) -> None:
    """It has no window, or one that a newer gateway knows."""
    strange = limit("tokens", 5, None), limit("tokens", 5, "fortnight")  # type: ignore[arg-type]
    with capture_logs() as logs:
        limits = in_force(clock, *strange, limit("requests", 1))
    told = [(line["event"], line["limit"]) for line in logs]
    assert told == [("limit_not_enforced", each.id) for each in strange]
    assert await refusal(limits, request()) is None
    assert await refusal(limits, request()) is not None
