"""Gateway processes, and an organisation with projects, keys and limits for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import openai

from argosy.deployment import GatewayConfig
from argosy.store import Price, Store, UsageRecord
from tests.support.migrated_store import open_migrated_store

READY = "argosy gateway is ready at "
MODEL = "big"
DEADLINE_S = 60.0


@dataclass
class GatewayProcess:
    """`argosy gateway` with its own state folder, as on its own machine."""

    config: GatewayConfig
    folder: Path
    url: str = ""
    log: list[str] = field(default_factory=list)
    process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start or restart the gateway, and wait until it is ready."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "gateway.yaml"
        path.write_bytes(msgspec.json.encode(self.config))  # JSON is YAML
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", "gateway", "--config", str(path)),
            env=os.environ | {"XDG_STATE_HOME": str(self.folder)},
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        while not (line := (await self.process.stderr.readline()).decode()).startswith(READY):
            self.log.append(line)
            assert line, "".join(self.log)
        self.url = line.removeprefix(READY).strip().removesuffix("/v1")
        self._reading = asyncio.create_task(self._read(self.process.stderr))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.log.append(line.decode())

    async def kill(self) -> None:
        """Send SIGKILL."""
        assert self.process is not None
        assert self._reading is not None
        if self.process.returncode is None:
            self.process.kill()
        await self._reading
        await self.process.wait()

    async def stop(self) -> None:
        """Send SIGTERM, and check that the gateway finishes and exits with 0."""
        assert self.process is not None
        assert self._reading is not None
        self.process.terminate()
        await self._reading
        assert await self.process.wait() == 0, "".join(self.log)


@contextlib.asynccontextmanager
async def gateways(
    config: GatewayConfig, folder: Path, count: int = 1
) -> AsyncIterator[list[GatewayProcess]]:
    """Run `count` gateways with one configuration. Kill those that still run at the end."""
    running = [GatewayProcess(config, folder / f"gateway{number}") for number in range(count)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(gateway.start() for gateway in running))
        yield running
    finally:
        for gateway in running:
            if gateway.process is not None:
                await gateway.kill()


@dataclass(frozen=True)
class OrganisationAccounts:
    """An organisation in a store, with its projects, keys, limits and usage."""

    store: Store
    organisation: str

    def project(self, name: str, **settings: Any) -> str:  # noqa: ANN401 - a project's
        """Create a project and return its id."""
        accounts = self.store.accounts
        return accounts.create_project(self.organisation, name, actor="test", **settings).id

    def key(self, project: str, name: str = "first", **settings: Any) -> str:  # noqa: ANN401 - a key's
        """Create a key of a project and return its plain text."""
        return self.store.accounts.create_key(project, name, actor="test", **settings)[1]

    def limit(self, project: str, unit: Any, amount: int, window: Any = None) -> None:  # noqa: ANN401 - a limit's
        """Set a limit of a project."""
        self.store.limits_and_prices.set_limit(
            "project", project, unit, amount, window=window, actor="test"
        )

    def price(self, per_output_token: int) -> None:
        """Set the model's output price in nano-dollars per token. Prompts are free."""
        price = Price(model=MODEL, input=0, cached_input=0, output=per_output_token)
        self.store.limits_and_prices.set_price(price, actor="test")

    def rows(self) -> list[UsageRecord]:
        """Return all usage records of the ledger."""
        return [row for rows in self.store.ledger.iter_records() for row in rows]

    async def wait_for_rows(self, count: int) -> list[UsageRecord]:
        """Wait until the ledger has `count` rows, and return them."""
        async with asyncio.timeout(DEADLINE_S):
            while len(rows := await asyncio.to_thread(self.rows)) < count:  # noqa: ASYNC110 - the database has no event
                await asyncio.sleep(0.05)
        return rows


@contextlib.contextmanager
def open_organisation(url: str, organisation: str = "acme") -> Iterator[OrganisationAccounts]:
    """Open the store at `url`, and create an organisation in it."""
    store = open_migrated_store(url)
    try:
        yield OrganisationAccounts(
            store, store.accounts.create_organisation(organisation, actor="test").id
        )
    finally:
        store.close()


@contextlib.asynccontextmanager
async def open_sdk_client(url: str, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return an OpenAI SDK client with this key and without retries."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client
