"""Cores that fail on command, and clients in front of them."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from tests.support.scripted_core import CORE

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.engine_core.heartbeat_monitor import CoreRestartPolicy

ROOT = Path(__file__).parents[2]
QUICK = CoreRestartPolicy(backoff_s=0.01)

Serve = Callable[..., AbstractAsyncContextManager[EngineClient]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """What starts clients, as an asynchronous context manager."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)

    @asynccontextmanager
    async def started(
        stall_timeout_s: float = 60.0, restarts: CoreRestartPolicy = QUICK
    ) -> AsyncIterator[EngineClient]:
        config = EngineConfig(model=str(tmp_path), stall_timeout_s=stall_timeout_s)
        client = EngineClient(config, core_factory=CORE, restart_policy=restarts)
        try:
            await client.start()
            yield client
        finally:
            await client.close()

    return started
