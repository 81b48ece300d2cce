"""Many adapters of three tenants on two replicas with memory for a fifth of them, with kills and replaced versions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
import pytest
from tests.engine.adapter_files import write_adapter
from tests.support.adapter_folders import adapter_source
from tests.support.fake_upstream import Json
from tests.support.gateway_client import run_gateway_server
from tests.support.migrated_store import SQLITE, open_migrated_store
from tests.support.replica_servers import (
    CONFIG,
    MODEL,
    RunningReplica,
    bundled_model_engine,
    serve,
)
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine import ReplicaServerConfig
from argosy.models import BUNDLED_MODEL
from argosy.store import Store, StoreConfig

TENANTS, ADAPTERS, SPARE, RESIDENT, REQUESTS = 3, 200, 20, 40, 2000
KILL_INTERVAL, REPLACE_INTERVAL = 400, 100
BODY: Json = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0.0}


def write_adapters(root: Path) -> list[str]:
    """Write the adapters and some further versions, and return their digests."""
    digests = []
    for number in range(ADAPTERS + SPARE):
        folder = write_adapter(root / str(number), BUNDLED_MODEL, seed=number, rank=2)
        digests.append(adapter_source(folder).digest)
    return digests


async def compute_answers(
    config: ReplicaServerConfig, digests: list[str]
) -> tuple[dict[str, str], int]:
    """Return the answer of each adapter alone, and the memory of one."""
    async with serve(
        bundled_model_engine(256, 8, enable_lora=True), config, enable_lora=True
    ) as replica:
        answers = {}
        for digest in digests:
            answer = await replica.client.post("/v1/completions", json=BODY | {"model": digest})
            answers[digest] = answer.json()["choices"][0]["text"]
        report = (await replica.client.get("/load")).json()
        return answers, report["adapters"][0]["size_bytes"]


@contextlib.asynccontextmanager
async def run_replicas(
    config: ReplicaServerConfig, memory_bytes: int
) -> AsyncIterator[list[RunningReplica]]:
    """Run two replicas with this memory for adapters."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            bundled_model_engine(256, 8, enable_lora=True, adapter_memory_bytes=memory_bytes)
            for _ in range(2)
        ]
        yield [
            await stack.enter_async_context(serve(engine, config, enable_lora=True))
            for engine in engines
        ]


def add_tenants(store: Store, digests: list[str]) -> list[Json]:
    """Add the tenants, each with a third of the adapters, and return the headers of their keys."""
    headers = []
    for tenant in range(TENANTS):
        organisation = store.accounts.create_organisation(f"t{tenant}", actor="test").id
        project = store.accounts.create_project(organisation, "web", actor="test").id
        _, key = store.accounts.create_key(project, "k", role="admin", actor="test")
        headers.append({"authorization": f"Bearer {key}"})
        for number in range(tenant, ADAPTERS, TENANTS):
            name, digest = f"a{number}", digests[number]
            store.adapters.add_version(
                name, "base", digest, organisation=organisation, actor="test"
            )
    return headers


@dataclass
class Load:
    """Requests of all tenants for their adapters, and for some of others."""

    client: httpx2.AsyncClient
    replicas: list[RunningReplica]
    headers: list[Json]
    digests: list[str]
    expected: dict[str, str]
    source: random.Random
    versions: dict[int, set[str]] = field(default_factory=dict)
    """Versions that may answer, by adapter: two while one replaces the other."""
    answered: dict[str, str] = field(default_factory=dict)
    """Digest of the adapter that answered, by response."""
    foreign: int = 0

    async def run(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self.send(number % TENANTS)
            if number % KILL_INTERVAL == KILL_INTERVAL - 1:
                pid = self.replicas[number // KILL_INTERVAL % 2].replica.engine.core_pid
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            if number % REPLACE_INTERVAL == REPLACE_INTERVAL // 2:
                await self.replace(self.source.randrange(ADAPTERS))

    async def send(self, tenant: int) -> None:
        adapter = self.source.randrange(ADAPTERS)
        if self.source.random() < 0.9:
            adapter = (adapter - adapter % TENANTS + tenant) % ADAPTERS
        before = {*self.versions[adapter]}
        body = BODY | {"model": f"a{adapter}"}
        answer = await self.client.post("/v1/completions", json=body, headers=self.headers[tenant])
        if adapter % TENANTS != tenant:
            assert answer.status_code == 404, answer.text
            self.foreign += 1
            return
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        possible = {self.expected[each]: each for each in before | self.versions[adapter]}
        assert text in possible, (adapter, text, possible)
        self.answered[answer.json()["id"]] = possible[text]

    async def replace(self, adapter: int) -> None:
        """Replace the version of an adapter."""
        digest = self.source.choice(self.digests[ADAPTERS:])
        body = {"lora_name": f"a{adapter}", "lora_path": digest, "load_inplace": True}
        self.versions[adapter] = self.versions[adapter] | {digest}
        answer = await self.client.post(
            "/v1/load_lora_adapter", json=body, headers=self.headers[adapter % TENANTS]
        )
        assert answer.status_code == 200, answer.text
        self.versions[adapter] = {digest}


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
async def test_every_answer_is_that_of_its_own_adapter_and_version(tmp_path: Path) -> None:
    digests = write_adapters(tmp_path / "adapters")
    config = msgspec.structs.replace(CONFIG, adapter_root=str(tmp_path / "adapters"))
    expected, size_bytes = await compute_answers(config, digests)
    assert len({*expected.values()}) > 0.9 * len(expected)
    store_url = f"{SQLITE}{tmp_path / 'argosy.db'}"
    store = open_migrated_store(store_url)
    headers = add_tenants(store, digests)
    async with run_replicas(config, RESIDENT * size_bytes) as replicas:
        servers = [
            ReplicaConfig(url=each.url, model=MODEL, kind="argosy", name=f"r{index}")
            for index, each in enumerate(replicas)
        ]
        models = [ModelConfig(name="base", replicas=servers)]
        gateway = GatewayConfig(port=0, models=models, store=StoreConfig(url=store_url))
        async with run_gateway_server(gateway, client_timeout_s=120) as (_, client):
            load = Load(client, replicas, headers, digests, expected, random.Random(7))
            load.versions = {number: {digests[number]} for number in range(ADAPTERS)}
            numbers = iter(range(REQUESTS))
            await asyncio.gather(*(load.run(numbers) for _ in range(8)))
            for replica in replicas:
                report = (await replica.client.get("/load")).json()
                sizes = [each["size_bytes"] for each in report["adapters"]]
                assert sum(sizes) <= RESIDENT * size_bytes
    assert load.foreign > REQUESTS // 40
    assert len(load.answered) + load.foreign == REQUESTS
    rows: dict[str, str] = {}

    def has_all_rows() -> bool:
        found = itertools.chain(*store.ledger.iter_records())
        rows.update((row.request, row.digest) for row in found if row.status == "completed")
        return rows.keys() >= load.answered.keys()

    await until(has_all_rows)
    assert rows.items() >= load.answered.items()
    store.close()
