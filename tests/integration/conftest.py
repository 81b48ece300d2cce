"""Fixtures of the HTTP tests: the bundled tokenizer, a server around a scripted engine, a gateway with a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.organisations import AdminGateway, run_admin_gateway
from tests.support.replica_servers import RunningReplica, serve

from argosy.engine.serving.text import Tokenizer
from argosy.models import BUNDLED_MODEL

REPLY = "Hello there. How can I help you today?"


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways in this process check streams, read changed accounts and write usage often."""
    monkeypatch.setattr("argosy.gateway.accounting.ACCOUNT_POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr("argosy.gateway.filters.usage_recorder.FLUSH_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.gateway.proxy.handlers.STREAM_CHECK_INTERVAL_S", 0.05)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    """Engine that replies `REPLY` to every request, unless the test sets another script."""
    return FakeEngine(tokenizer, constant_script(reply_script(tokenizer, REPLY)))


@pytest.fixture
async def replica_server(engine: FakeEngine) -> AsyncIterator[RunningReplica]:
    async with serve(engine) as running:
        yield running


@pytest.fixture
async def admin_gateway(tmp_path: Path) -> AsyncIterator[AdminGateway]:
    async with run_admin_gateway(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdminGateway]:
    """Run a gateway for the tests of a file, which leave its replicas as they are and use accounts of their own."""
    async with run_admin_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running
