"""The llama.cpp server as a replica, if it is built: detection, load, resume after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest
from tests.support.gateway_client import CHAT, COMPLETION, StreamResult, gateway
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig
from argosy.models import BUNDLED_MODEL

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("ARGOSY_LLAMA_CPP", ROOT / ".venv-peers" / "llama-cpp"))
SERVER = PEER / "build" / "bin" / "llama-server"
EXPORT = "tests.support.export_gguf"
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story about a cat."}]},
    COMPLETION: {"prompt": "Once upon a time"},
}

pytestmark = pytest.mark.skipif(
    not SERVER.exists(), reason=f"there is no llama.cpp at {PEER}: set ARGOSY_LLAMA_CPP"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as GGUF."""
    path = tmp_path_factory.mktemp("gguf") / "mini.gguf"
    subprocess.run(
        [PEER / "bin" / "python", "-m", EXPORT, BUNDLED_MODEL, path], cwd=ROOT, check=True
    )
    return path


@dataclass
class LlamaServer:
    """llama-server process on a Unix socket."""

    socket: Path
    process: asyncio.subprocess.Process

    async def ready(self) -> None:
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket))
        async with httpx2.AsyncClient(transport=transport, base_url="http://llama") as client:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        return
                assert self.process.returncode is None
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def run_servers(model: Path, count: int) -> AsyncIterator[list[LlamaServer]]:
    started: list[LlamaServer] = []
    with TemporaryDirectory() as folder:  # the path of pytest's folder may be too long for a socket
        try:
            for number in range(count):
                socket = Path(folder) / f"{number}.sock"
                process = await asyncio.create_subprocess_exec(
                    *(
                        str(SERVER),
                        "-m",
                        str(model),
                        "-a",
                        "mini",
                        "--host",
                        str(socket),
                        "--threads",
                        "1",
                    ),
                    *("--parallel", "2", "--ctx-size", "1024", "--no-webui", "--log-disable"),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                started.append(LlamaServer(socket, process))
            await asyncio.gather(*(server.ready() for server in started))
            yield started
        finally:
            for server in started:
                if server.process.returncode is None:
                    server.process.kill()
                await server.process.wait()


async def read_stream(
    client: httpx2.AsyncClient,
    path: str,
    killed: LlamaServer | None = None,
    extra: dict[str, object] | None = None,
) -> StreamResult:
    """Read a greedy stream. Kill the server `killed` after the eighth chunk."""
    greedy = {"model": "big", "stream": True, "temperature": 0, "max_tokens": 40}
    body = BODIES[path] | greedy | {"stream_options": {"include_usage": True}} | (extra or {})
    received = StreamResult()
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                received.add_event(line[6:])
            if killed is not None and len(received.chunks) == 8:
                killed.process.kill()
                await killed.process.wait()
                killed = None
    return received


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("extra", [{}, {"stop": ["the cat", "and"]}], ids=["plain", "stop"])
async def test_stream_resumes_after_server_is_killed(
    model: Path, path: str, extra: dict[str, object]
) -> None:
    async with run_servers(model, 2) as pair:
        replicas = [ReplicaConfig(url=f"unix:{server.socket}", model="mini") for server in pair]
        async with gateway(*replicas) as (running, client):
            assert {replica.kind for replica in running.replicas} == {"llama.cpp"}
            assert {replica.load.max_seqs for replica in running.replicas} == {2}
            undisturbed = await read_stream(client, path, extra=extra)
            assert (undisturbed.done_count, len(undisturbed.finish_reasons)) == (1, 1)
            second = await read_stream(
                client, path, pair[1], extra
            )  # routing alternates between the run_servers
            assert second.text == undisturbed.text
            assert second.finish_reasons == undisturbed.finish_reasons
            assert (second.done_count, second.errors) == (1, [])
            assert (
                len({chunk["id"] for chunk in second.chunks}) == 1
            )  # `created` differs between events
            assert second.usage[0]["prompt_tokens"] == undisturbed.usage[0]["prompt_tokens"]
            assert second.usage[0]["completion_tokens"] == undisturbed.usage[0]["completion_tokens"]
            assert pair[1].process.returncode is not None


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_grammar_stream_ends_with_error_after_kill(model: Path, path: str) -> None:
    async with run_servers(model, 2) as pair:
        replicas = [ReplicaConfig(url=f"unix:{server.socket}", model="mini") for server in pair]
        async with gateway(*replicas) as (_, client):
            extra: dict[str, object] = {"grammar": "root ::= [a-z ]+"}
            assert (await read_stream(client, path, extra=extra)).done_count == 1
            received = await read_stream(client, path, pair[1], extra)
            assert [error["code"] for error in received.errors] == ["upstream_failed"]
            assert received.text
            assert not received.done_count


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]},
        {"content": "whose is this?"},
    ],
    ids=["picture", "unknown-role"],
)
async def test_unreadable_message_is_400_and_keeps_breaker_closed(
    model: Path, message: dict[str, object], stream: bool
) -> None:
    async with run_servers(model, 1) as (server,):
        replica = ReplicaConfig(url=f"unix:{server.socket}", model="mini")
        async with gateway(replica) as (running, client):
            body = {"model": "big", "stream": stream, "messages": [message]}
            for _ in range(4):
                assert (await client.post(CHAT, json=body)).status_code == 400
            assert running.replicas[0].health.breaker.is_closed


async def test_non_streamed_response_fails_over_after_kill(model: Path) -> None:
    async with run_servers(model, 2) as pair:
        replicas = [ReplicaConfig(url=f"unix:{server.socket}", model="mini") for server in pair]
        async with gateway(*replicas) as (running, client):
            body = {"model": "big", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
            body |= BODIES[COMPLETION]
            undisturbed = (await client.post(COMPLETION, json=body)).json()
            response = asyncio.create_task(client.post(COMPLETION, json=body))
            await until(lambda: running.replicas[1].load.in_flight)
            pair[1].process.kill()
            received = (await response).json()
            assert received["choices"] == undisturbed["choices"]
            assert (
                received["usage"]["completion_tokens"]
                == undisturbed["usage"]["completion_tokens"]
                == 300
            )
