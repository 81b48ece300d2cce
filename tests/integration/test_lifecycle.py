"""The replica's way from starting to stopped, and what it answers on it; also on a Unix domain socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine
from tests.support.replica_servers import CONFIG, MODEL, chat, serve, text_tools

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.api_server.replica_server import ReplicaServer
from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.engine.serving.engine_core.engine_client import EngineFailedError
from argosy.models import BUNDLED_MODEL


def server(engine: FakeEngine, config: ReplicaServerConfig, ready: list[str]) -> ReplicaServer:
    return ReplicaServer(
        config,
        EngineConfig(model=str(BUNDLED_MODEL)),
        engine=engine,
        load_text_processing=text_tools,
        on_ready=ready.append,
    )


@pytest.fixture
def uds(tmp_path: Path) -> ReplicaServerConfig:
    return msgspec.structs.replace(CONFIG, uds=str(tmp_path / "replica.sock"))


@pytest.fixture
async def client(uds: ReplicaServerConfig) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.AsyncHTTPTransport(uds=uds.uds, retries=5)
    async with httpx2.AsyncClient(transport=transport, base_url="http://replica") as client:
        yield client


async def test_from_starting_to_stopped(
    engine: FakeEngine, uds: ReplicaServerConfig, client: httpx2.AsyncClient
) -> None:
    engine.may_start.clear()
    ready: list[str] = []
    replica = server(engine, uds, ready)
    running = asyncio.create_task(replica.run())
    assert (await client.get("/health")).status_code == 200
    starting = await client.get("/ready")
    assert starting.status_code == 503
    assert starting.headers["retry-after"] == "1"
    refused = await client.post("/v1/chat/completions", json=chat())
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert (await client.get("/load")).json()["state"] == "starting"
    assert (await client.get("/v1/models")).status_code == 503
    assert not ready
    engine.may_start.set()
    while (await client.get("/ready")).status_code != 200:
        pass
    assert ready == [f"unix:{uds.uds}"]
    answer = await client.post("/v1/chat/completions", json=chat())
    assert answer.json()["choices"][0]["message"]["content"] == REPLY
    replica.stop()
    await running
    assert engine.state == "stopped"
    with pytest.raises(httpx2.ConnectError):
        await client.get("/health")


async def test_engine_that_cannot_start_ends_the_server(
    engine: FakeEngine, uds: ReplicaServerConfig
) -> None:
    engine.state = "failed"
    with pytest.raises(EngineFailedError, match="the model is broken"):
        await server(engine, uds, []).run()


async def test_engine_that_fails_for_good_ends_the_server(
    engine: FakeEngine, uds: ReplicaServerConfig, client: httpx2.AsyncClient
) -> None:
    running = asyncio.create_task(server(engine, uds, []).run())
    while (await client.get("/ready")).status_code != 200:
        pass
    engine.state = "failed"
    with pytest.raises(EngineFailedError):
        await running


async def test_an_address_in_use_is_refused_with_a_remedy(
    engine: FakeEngine, uds: ReplicaServerConfig, client: httpx2.AsyncClient
) -> None:
    first = server(engine, uds, [])
    running = asyncio.create_task(first.run())
    assert (await client.get("/health")).status_code == 200
    with pytest.raises(OSError, match="choose another path"):
        await server(engine, uds, []).run()
    first.stop()
    await running
    async with serve(engine) as served:
        port = int(served.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="choose another --port"):
            await server(engine, ReplicaServerConfig(port=port), []).run()


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
async def test_an_address_of_another_machine_is_refused_with_a_remedy(
    engine: FakeEngine, host: str
) -> None:
    with pytest.raises(OSError, match="choose another --host"):
        await server(engine, ReplicaServerConfig(host=host, port=0), []).run()


async def test_the_model_is_named_by_its_directory(engine: FakeEngine) -> None:
    async with serve(engine, ReplicaServerConfig(port=0)) as served:
        listed = (await served.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == [BUNDLED_MODEL.name]


async def test_several_names(engine: FakeEngine) -> None:
    config = msgspec.structs.replace(CONFIG, served_model_names=("first", MODEL))
    async with serve(engine, config) as served:
        listed = (await served.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["first", MODEL]
        answer = await served.client.post("/v1/chat/completions", json=chat())
        assert answer.json()["model"] == MODEL


def test_a_replica_leaves_what_it_imported_to_itself() -> None:
    """The collector would stop every stream for 50 ms to look through it."""
    program = """
import gc, os, signal
from argosy.engine import EngineConfig, ReplicaServerConfig, serve_replica
from argosy.models import BUNDLED_MODEL

def ready(url):
    print(gc.get_freeze_count() > 10_000)
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    engine = EngineConfig(model=str(BUNDLED_MODEL), max_seqs=2)
    serve_replica(ReplicaServerConfig(port=0), engine, on_ready=ready)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr
