"""Engine clients whose core follows a fault script."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from tests.support.scripted_core import CORE

from argosy.engine import EngineConfig
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.engine_core.heartbeat_monitor import CoreRestartPolicy

ROOT = Path(__file__).parents[2]
QUICK = CoreRestartPolicy(backoff_s=0.01)

StartClient = Callable[..., AbstractAsyncContextManager[EngineClient]]


@pytest.fixture
def start_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartClient:
    """Return an asynchronous context manager that starts a client."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)

    @asynccontextmanager
    async def run_client(
        stall_timeout_s: float = 60.0, restarts: CoreRestartPolicy = QUICK
    ) -> AsyncIterator[EngineClient]:
        config = EngineConfig(model=str(tmp_path), stall_timeout_s=stall_timeout_s)
        client = EngineClient(config, core_factory=CORE, restart_policy=restarts)
        try:
            await client.start()
            yield client
        finally:
            await client.close()

    return run_client
