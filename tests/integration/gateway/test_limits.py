"""Limits with a usage table, and limits on requests that a replica rejects or that generate no tokens."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.support.fake_clock import FakeClock
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, fake_upstream, listening
from tests.support.gateway_client import gateway
from tests.support.gateway_processes import open_organisation
from tests.support.idempotent_gateway import run_gateways
from tests.support.limit_harness import (
    complete,
    make_context,
    make_limit,
    make_snapshot,
)
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig
from argosy.gateway.accounting import AccountingService
from argosy.gateway.filters import LimitFilter
from argosy.gateway.utility_handlers import MAX_CONCURRENT_PER_TENANT
from argosy.protocol import TokenUsage
from argosy.store import (
    LocalQuotaBackend,
    StoreConfig,
    UsageLog,
    UsageRecord,
    usage_log_folder,
)

NOW = 1_795_262_400.0


def make_record(number: int, ended_at: float) -> UsageRecord:
    return UsageRecord(
        request=f"r{number}",
        organisation="org",
        project="shop",
        key="k1",
        user="ann",
        model="big",
        started_at=ended_at - 1.0,
        ended_at=ended_at,
        status="completed",
        input_tokens=100,
        output_tokens=10,
        nano_dollars=7,
    )


async def test_restarted_gateway_seeds_limits_from_usage_table(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    store = open_migrated_store(f"sqlite:///{tmp_path}/argosy.db")
    store.ledger.add_records(
        [make_record(number, NOW - age) for number, age in enumerate((30, 3000, 4000, 90_000))]
    )
    limits = LimitFilter(LocalQuotaBackend(), clock)
    limits.apply_snapshot(
        make_snapshot(
            make_limit("requests", 100, "hour"),
            make_limit("tokens", 10_000, "month", "project"),
            make_limit("nano_dollars", 10**6, "day", "organisation"),
            make_limit("requests", 100, "month", "user", "big"),
            make_limit("requests", 100, "month", "user", "small"),
            make_limit("requests", 100, "second"),
        )
    )
    await limits.seed_usage(store.ledger.sum_by_owner)
    await limits.on_request(context := make_context())
    used = [(decision.unit, decision.window, decision.used) for decision in context.trace.limits]
    assert used == [
        ("requests", "hour", 2),
        ("requests", "second", 0),
        ("requests", "month", 4),
        ("tokens", "month", 4 * 110),
        ("nano_dollars", "day", 3 * 7),
    ]
    complete(limits, context)
    clock.now += 1300.0
    await limits.seed_usage(store.ledger.sum_by_owner)
    await limits.on_request(context := make_context())
    assert context.trace.limits[0].used == 2, "the request of 3000 s ago has left the window"
    store.close()


async def test_unsettled_usage_of_killed_gateway_counts_after_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    usage_log = UsageLog(usage_log_folder(url))
    usage_log.allocate_slot(make_record(1, time.time())).set_counts(TokenUsage(100, 0, 23))
    usage_log.close()
    accounting = await AccountingService.open(StoreConfig(url=url))
    limits = LimitFilter(LocalQuotaBackend())
    limits.apply_snapshot(make_snapshot(make_limit("tokens", 10_000, "month")))
    await limits.seed_usage(accounting.store.ledger.sum_by_owner)
    await limits.on_request(context := make_context())
    assert context.trace.limits[0].used == 123
    await accounting.close()


@pytest.mark.parametrize(
    ("replica_status", "first", "second"),
    [(400, 400, 429), (413, 413, 429), (422, 422, 429), (404, 404, 404), (500, 502, 502)],
)
async def test_only_client_errors_of_replica_count_as_requests(
    tmp_path: Path, replica_status: int, first: int, second: int
) -> None:
    """Otherwise invalid requests would have no limit. Failures of the fleet cost nothing."""

    async def script(request: UpstreamRequest) -> None:
        request.send_json(replica_status, {"error": {"message": "no"}})

    async with (
        fake_upstream(script) as server,
        run_gateways(tmp_path, ReplicaConfig(url=server.url, kind="openai"), requests=1) as fleet,
    ):
        client = await fleet.client()
        assert (await client.post("a")).status_code == first
        assert (await client.post("b")).status_code == second


class BlockedTokenizer(FakeUpstream):
    """Server whose responses wait until `unblocked` is set."""

    def __init__(self) -> None:
        super().__init__(token_ids=[1, 2])
        self.unblocked = asyncio.Event()
        self.num_running = 0
        self.max_running = 0

    async def _respond(self, request: UpstreamRequest) -> None:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await self.unblocked.wait()
        self.num_running -= 1
        await super()._respond(request)


async def test_tokenize_concurrency_is_limited_per_tenant(tmp_path: Path) -> None:
    """Sixty long texts of one tenant would delay the prompts of all other tenants by seconds."""
    backend, url = BlockedTokenizer(), f"sqlite:///{tmp_path / 'argosy.db'}"
    with open_organisation(url) as accounts:
        shop, other = (accounts.key(accounts.project(name)) for name in ("shop", "other"))
        async with listening(backend):
            replica = ReplicaConfig(url=backend.url, kind="openai", model="rough")
            async with gateway(replica, store=StoreConfig(url=url)) as (_, client):

                async def tokenize(key: str) -> int:
                    headers = {"authorization": f"Bearer {key}"}
                    body = {"model": "big", "prompt": "Tell me"}
                    return (await client.post("/tokenize", json=body, headers=headers)).status_code

                calls = [
                    asyncio.create_task(tokenize(shop))
                    for _ in range(3 * MAX_CONCURRENT_PER_TENANT)
                ]
                await until(lambda: backend.num_running >= MAX_CONCURRENT_PER_TENANT)
                calls.append(asyncio.create_task(tokenize(other)))
                await until(lambda: backend.num_running > MAX_CONCURRENT_PER_TENANT)
                backend.unblocked.set()
                assert await asyncio.gather(*calls) == [200] * len(calls)
                assert backend.max_running == MAX_CONCURRENT_PER_TENANT + 1
