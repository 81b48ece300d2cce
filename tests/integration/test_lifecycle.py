"""Replica states from starting to stopped, their responses, listening addresses, and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import httpx2
import msgspec
import pytest
from structlog.testing import capture_logs
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.fake_replica import REPLY as PROCESS_REPLY
from tests.support.replica_servers import (
    CONFIG,
    MODEL,
    RunningReplica,
    chat,
    events,
    load_text_processing,
    replica_process,
    serve,
)
from tests.support.waiting import is_listening

from argosy.engine import EngineConfig, EngineFailedError, ReplicaServerConfig
from argosy.engine.engine_config import LOADING_WEIGHTS, WARMING_UP
from argosy.engine.serving.api_server.replica_server import ReplicaServer
from argosy.engine.serving.core_messages import LoadProgress
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.text import Tokenizer
from argosy.models import BUNDLED_MODEL


def make_server(engine: FakeEngine, config: ReplicaServerConfig, ready: list[str]) -> ReplicaServer:
    return ReplicaServer(
        config,
        EngineConfig(model=str(BUNDLED_MODEL)),
        engine=cast("EngineClient", engine),
        load_text_processing=load_text_processing,
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


async def test_replica_responds_by_state_from_starting_to_stopped(
    engine: FakeEngine, uds: ReplicaServerConfig, client: httpx2.AsyncClient
) -> None:
    engine.may_start.clear()
    ready: list[str] = []
    replica = make_server(engine, uds, ready)
    running = asyncio.create_task(replica.run())
    assert (await client.get("/health")).status_code == 200
    with capture_logs() as logs:
        starting = await client.get("/ready")
        assert starting.status_code == 503
        assert starting.headers["retry-after"] == "1"
        rejected = await client.post("/v1/chat/completions", json=chat())
        assert rejected.json()["error"]["code"] == "engine_unavailable"
        for progress, phase in (
            (None, "starting"),
            (LoadProgress("preparing the kernels", 0.0), "starting"),
            (LoadProgress(LOADING_WEIGHTS, 0.5), "loading"),
            (LoadProgress(WARMING_UP, 1.0), "warming"),
        ):
            engine.load_progress = progress
            load = (await client.get("/load")).json()
            assert (load["state"], load["phase"]) == ("starting", phase)
            expected = progress and {"activity": progress.activity, "fraction": progress.fraction}
            assert load["startup"] == expected
        assert (await client.get("/v1/models")).status_code == 503
    assert {line["log_level"] for line in logs} == {"debug"}, "one line for each would fill the log"
    assert not ready
    engine.may_start.set()
    while (await client.get("/ready")).status_code != 200:
        pass
    assert ready == [f"unix:{uds.uds}"]
    response = await client.post("/v1/chat/completions", json=chat())
    assert response.json()["choices"][0]["message"]["content"] == REPLY
    replica.stop()
    await running
    assert engine.state == "stopped"
    assert not is_listening(Path(uds.uds or ""))


async def test_engine_start_failure_ends_server(
    engine: FakeEngine, uds: ReplicaServerConfig
) -> None:
    engine.state = "failed"
    with pytest.raises(EngineFailedError, match="the model is broken"):
        await make_server(engine, uds, []).run()


async def test_permanent_engine_failure_ends_server(
    engine: FakeEngine, uds: ReplicaServerConfig, client: httpx2.AsyncClient
) -> None:
    running = asyncio.create_task(make_server(engine, uds, []).run())
    while (await client.get("/ready")).status_code != 200:
        pass
    engine.state = "failed"
    with pytest.raises(EngineFailedError):
        await running


async def test_address_in_use_suggests_another(
    engine: FakeEngine, uds: ReplicaServerConfig, client: httpx2.AsyncClient
) -> None:
    first = make_server(engine, uds, [])
    running = asyncio.create_task(first.run())
    assert (await client.get("/health")).status_code == 200
    with pytest.raises(OSError, match="choose another path"):
        await make_server(engine, uds, []).run()
    first.stop()
    await running
    async with serve(engine) as replica_server:
        port = int(replica_server.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="choose another --port"):
            await make_server(engine, ReplicaServerConfig(port=port), []).run()


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
async def test_foreign_host_address_suggests_another(engine: FakeEngine, host: str) -> None:
    with pytest.raises(OSError, match="choose another --host"):
        await make_server(engine, ReplicaServerConfig(host=host, port=0), []).run()


async def test_default_model_name_is_directory_name(engine: FakeEngine) -> None:
    async with serve(engine, ReplicaServerConfig(port=0)) as replica_server:
        listed = (await replica_server.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == [BUNDLED_MODEL.name]


async def test_all_served_model_names_are_accepted(engine: FakeEngine) -> None:
    config = msgspec.structs.replace(CONFIG, served_model_names=("first", MODEL))
    async with serve(engine, config) as replica_server:
        listed = (await replica_server.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["first", MODEL]
        response = await replica_server.client.post("/v1/chat/completions", json=chat())
        assert response.json()["model"] == MODEL


@pytest.mark.exhaustive
def test_replica_freezes_imported_objects() -> None:
    """Otherwise each full collection would pause every stream for 50 ms."""
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
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


def drain_config(deadline_s: float) -> ReplicaServerConfig:
    return msgspec.structs.replace(CONFIG, drain_deadline_s=deadline_s)


@contextlib.asynccontextmanager
async def open_stream(
    client: httpx2.AsyncClient, prompt: str
) -> AsyncIterator[Callable[[], Awaitable[list[bytes]]]]:
    """Start a stream and wait for its first bytes. Yield a function that reads the rest and returns all events."""
    body = chat(prompt, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = response.aiter_bytes()
        first = await anext(pieces)

        async def read_rest() -> list[bytes]:
            return events(first + b"".join([piece async for piece in pieces]))

        yield read_rest


async def wait_not_ready(client: httpx2.AsyncClient) -> None:
    while (await client.get("/ready")).status_code == 200:
        pass


async def test_sigterm_finishes_running_stream_and_exits_0() -> None:
    """The idle replica exits at once, long before the deadline."""
    async with replica_process(drain_config(600)) as (process, client):
        async with open_stream(client, "please wait") as read_rest:
            process.send_signal(signal.SIGTERM)
            await wait_not_ready(client)
            rejected = await client.post("/v1/chat/completions", json=chat())
            assert rejected.status_code == 503
            assert rejected.json()["error"]["code"] == "draining"
            assert rejected.headers["retry-after"] == "1"
            assert (await client.get("/health")).status_code == 200
            process.send_signal(signal.SIGUSR1)
            *chunks, last = await read_rest()
        assert last == b"[DONE]"
        texts = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == PROCESS_REPLY
        assert await process.wait() == 0


async def test_drain_deadline_ends_stream_with_error_event() -> None:
    async with replica_process(drain_config(0.2)) as (process, client):
        async with open_stream(client, "stay forever") as read_rest:
            process.send_signal(signal.SIGTERM)
            *_, last = await read_rest()
        assert json.loads(last)["error"]["code"] == "draining"
        assert await process.wait() == 0


async def test_second_signal_ends_stream_at_once(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    reply = reply_script(tokenizer, REPLY)
    reply.pause_after = 2
    engine.script = constant_script(reply)
    async with (
        serve(engine, drain_config(600)) as served,
        open_stream(served.client, "Hello") as read_rest,
    ):
        served.server.stop()
        await wait_not_ready(served.client)
        served.server.stop()
        *_, last = await read_rest()
    assert json.loads(last)["error"]["code"] == "draining"


@pytest.mark.parametrize("stream", [True, False])
async def test_drain_endpoint_rejects_new_and_finishes_running(
    replica_server: RunningReplica, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    reply = reply_script(tokenizer, REPLY)
    reply.pause_after = 2
    engine.script = constant_script(reply)
    body = chat(stream=stream)
    running = asyncio.create_task(replica_server.client.post("/v1/chat/completions", json=body))
    await engine.paused.wait()
    assert (await replica_server.client.post("/drain")).json() == {"status": "draining"}
    rejected = await replica_server.client.post("/v1/completions", json=chat())
    assert rejected.status_code == 503
    assert rejected.headers["retry-after-ms"] == "1000"
    assert (await replica_server.client.get("/ready")).json()["error"]["code"] == "draining"
    assert (await replica_server.client.get("/load")).json()["state"] == "draining"
    engine.may_continue.set()
    assert (await running).status_code == 200


async def test_undrain_accepts_requests_again(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    client = replica_server.client
    await client.post("/drain", json={"deadline_s": 600})
    assert (await client.post("/undrain")).json() == {"status": "ready"}
    assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
    assert not engine.aborted
    replica_server.replica.is_stopping = True
    await client.post("/drain")
    refused = await client.post("/undrain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize(
    ("path", "headers", "body", "expected"),
    [
        ("/drain", {"origin": "https://elsewhere.example"}, b"", (403, "origin_not_allowed")),
        ("/drain", {"origin": "http://localhost:3000"}, b"", (403, "origin_not_allowed")),
        ("/drain", {"sec-fetch-site": "cross-site"}, b"", (403, "origin_not_allowed")),
        ("/drain", {"content-type": "text/plain"}, b"{}", (415, "unsupported_media_type")),
        ("/drain", {}, b"{}", (415, "unsupported_media_type")),
        ("/undrain", {"origin": "http://localhost:3000"}, b"", (403, "origin_not_allowed")),
        ("/sleep", {"origin": "http://localhost:3000"}, b"", (403, "origin_not_allowed")),
        ("/sleep?level=3", {}, b"", (400, "invalid_type")),
        ("/wake_up", {"sec-fetch-site": "cross-site"}, b"", (403, "origin_not_allowed")),
        ("/wake_up?tags=weights&tags=scratch", {}, b"", (400, "invalid_value")),
    ],
)
async def test_state_changes_reject_web_pages(
    replica_server: RunningReplica,
    path: str,
    headers: dict[str, str],
    body: bytes,
    expected: tuple[int, str],
) -> None:
    rejected = await replica_server.client.post(path, headers=headers, content=body)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == expected
    assert (await replica_server.client.get("/ready")).status_code == 200


async def test_sleep_and_wake_up_as_vllm_has_them(replica_server: RunningReplica) -> None:
    client = replica_server.client
    for method, path, expected, status, level in (
        ("GET", "/is_sleeping", {"is_sleeping": False}, 200, 0),
        ("POST", "/sleep", {"status": "sleeping"}, 503, 1),
        ("POST", "/sleep?level=2&deadline_s=0", {"status": "sleeping"}, 503, 2),
        ("POST", "/sleep?level=1", {"status": "sleeping"}, 503, 2),
        ("GET", "/is_sleeping", {"is_sleeping": True}, 503, 2),
        ("POST", "/wake_up?tags=weights", {"status": "sleeping"}, 503, 1),
        ("POST", "/wake_up?tags=weights&tags=kv_cache", {"status": "ready"}, 200, 0),
        ("POST", "/sleep?level=2", {"status": "sleeping"}, 503, 2),
        ("POST", "/wake_up", {"status": "ready"}, 200, 0),
    ):
        assert (await client.request(method, path)).json() == expected
        ready = await client.get("/ready")
        chat_status = (await client.post("/v1/chat/completions", json=chat())).status_code
        assert (ready.status_code, chat_status) == (status, status)
        load = (await client.get("/load")).json()
        assert (load["state"], load["sleep_level"]) == (
            expected.get("status", load["state"]),
            level,
        )
        metrics = (await client.get("/metrics")).text
        assert "argosy_engine_state{" in metrics
    await client.post("/sleep?level=2")
    refused = await client.post("/wake_up?tags=kv_cache")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tags")
    await client.post("/wake_up")


async def test_drain_endpoint_deadline_ends_running_request(
    replica_server: RunningReplica, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    reply = reply_script(tokenizer, REPLY)
    reply.pause_after = 0
    engine.script = constant_script(reply)
    running = asyncio.create_task(replica_server.client.post("/v1/chat/completions", json=chat()))
    await engine.paused.wait()
    await replica_server.client.post("/drain", json={"deadline_s": 0})
    response = await running
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    await engine.wait_idle()
    assert engine.aborted
