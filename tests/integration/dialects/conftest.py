"""Gateway with a store and two replicas of one scripted model, and the official clients of all dialects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx2
import ollama
import openai
import pytest
import pytest_asyncio
from tests.integration.test_parsed_output import text_processing
from tests.support.conversation import Sdks
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_client import run_gateway_server
from tests.support.gateway_processes import OrganisationAccounts, open_organisation
from tests.support.replica_servers import MODEL as REPLICA_MODEL
from tests.support.replica_servers import serve
from tests.support.waiting import until

from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine import EngineRequest
from argosy.store import StoreConfig, UsageRecord

if TYPE_CHECKING:
    import anthropic

MODEL = "big"


@dataclass
class DialectFleet:
    """Running fleet, whose engines generate the text `output`."""

    url: str
    client: httpx2.AsyncClient
    accounts: OrganisationAccounts
    key: str
    other_key: str
    """Key of another project."""
    engines: list[FakeEngine]
    config: GatewayConfig
    output: str = "Hello!"
    crash_after: int | None = None
    """Tokens after which the next request loses its replica."""
    pause_after: int | None = None
    """Tokens after which the next request waits for `FakeEngine.may_continue`."""
    requests: list[EngineRequest] = field(default_factory=list)

    def script(self, request: EngineRequest) -> Script:
        tokenizer = text_processing().tokenizer
        end = tokenizer.eos_token_ids[0]
        tokens = [*tokenizer.encode(self.output, add_special_tokens=False), end]
        if not request.tenant:  # the gateway tests a replica that it has ejected
            return Script(tokens, stop_token=end)
        self.requests.append(request)
        crash_after, self.crash_after = self.crash_after, None
        pause_after, self.pause_after = self.pause_after, None
        if crash_after is not None:
            return Script(tokens[:crash_after], crash=RuntimeError("gone"))
        return Script(tokens, stop_token=end, pause_after=pause_after)

    def reset(self) -> None:
        self.output, self.crash_after, self.pause_after = "Hello!", None, None
        self._reset_at = time.time()
        self.requests.clear()
        self.release()

    def hold(self, after: int) -> None:
        """Let the next request wait after some tokens, until `release`."""
        self.pause_after = after
        for engine in self.engines:
            engine.may_continue.clear()
            engine.paused.clear()

    async def wait_held(self) -> None:
        """Wait until a request waits for `release`."""
        await until(lambda: any(engine.paused.is_set() for engine in self.engines))

    def release(self) -> None:
        for engine in self.engines:
            engine.may_continue.set()

    def prompts(self) -> list[str]:
        """Return the rendered prompts of all requests so far, and forget them."""
        tokenizer = text_processing().tokenizer
        prompts = [tokenizer.decode(request.prompt) for request in self.requests]
        self.requests.clear()
        return prompts

    async def take_rows(self, count: int) -> list[UsageRecord]:
        """Wait until the ledger has `count` rows of requests since `reset`, and return them."""
        rows: list[UsageRecord] = []
        while len(rows) < count:
            await asyncio.sleep(0.05)
            rows = [row for row in self.accounts.rows() if row.started_at >= self._reset_at]
        return rows

    async def wait_for_key(self, key: str) -> None:
        """Wait until the gateway has read a new key."""
        status = 0
        while status != 200:
            await asyncio.sleep(0.05)
            status = (await self.client.get("/v1/models", headers={"api-key": key})).status_code

    async def find_row(self, response_id: str) -> UsageRecord:
        """Wait for the ledger's row of a response."""
        digits = response_id.partition("_")[2]
        while True:
            for row in self.accounts.rows():
                if row.request.endswith(digits):
                    return row
            await asyncio.sleep(0.05)

    _open_sdks: dict[str, Sdks] = field(default_factory=dict)
    _reset_at: float = 0.0

    async def close(self) -> None:
        for sdks in self._open_sdks.values():
            await sdks.aclose()

    def sdks(self, key: str = "") -> Sdks:
        """Return SDKs with this key, which are closed at the end."""
        if key not in self._open_sdks:
            self._open_sdks[key] = Sdks(self.url, key or self.key)
        return self._open_sdks[key]

    def openai(self, key: str = "") -> openai.AsyncOpenAI:
        return self.sdks(key).openai

    def anthropic(self, key: str = "") -> anthropic.AsyncAnthropic:
        return self.sdks(key).anthropic

    def ollama(self, key: str = "") -> ollama.AsyncClient:
        return self.sdks(key).ollama


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DialectFleet]:
    url = f"sqlite:///{tmp_path_factory.mktemp('dialects')}/store.db"
    text = text_processing()
    fleet: DialectFleet
    engines = [
        FakeEngine(text.tokenizer, lambda request: fleet.script(request), max_model_len=2048)  # noqa: PLW0108 - no fleet yet
        for _ in range(2)
    ]
    async with contextlib.AsyncExitStack() as stack:
        accounts = stack.enter_context(open_organisation(url))
        replicas = [
            await stack.enter_async_context(serve(engine, load_text=text_processing))
            for engine in engines
        ]
        config = GatewayConfig(
            port=0,
            models=[
                ModelConfig(
                    name=MODEL,
                    aliases=("claude-*",),
                    routing="round-robin",
                    replicas=[ReplicaConfig(url=one.url, model=REPLICA_MODEL) for one in replicas],
                )
            ],
            store=StoreConfig(url=url),
            auth=AuthConfig(mode="required"),
        )
        keys = [accounts.key(accounts.project(name)) for name in ("shop", "other")]
        _, client = await stack.enter_async_context(run_gateway_server(config))
        base = str(client.base_url).rstrip("/")
        fleet = DialectFleet(base, client, accounts, keys[0], keys[1], engines, config)
        yield fleet
        await fleet.close()


@pytest.fixture
def fleet(running_fleet: DialectFleet) -> DialectFleet:
    running_fleet.reset()
    return running_fleet
