"""The llama.cpp server as a replica, if it is built: detection, load, resume after a kill, and its errors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest
from tests.support.gateway_client import CHAT, COMPLETION, gateway, read_stream
from tests.support.vllm_server import ROOT, VllmServer, run_vllm_servers

from argosy.deployment import ReplicaConfig
from argosy.gateway import GatewayServer
from argosy.models import BUNDLED_MODEL

PEER = Path(os.environ.get("ARGOSY_LLAMA_CPP", ROOT / ".venv-peers" / "llama-cpp"))
SERVER = PEER / "build" / "bin" / "llama-server"
GREEDY: dict[str, object] = {
    "model": "big",
    "stream": True,
    "temperature": 0,
    "max_tokens": 40,
    "stream_options": {"include_usage": True},
}
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story about a cat."}]} | GREEDY,
    COMPLETION: {"prompt": "Once upon a time"} | GREEDY,
}

pytestmark = pytest.mark.skipif(
    not SERVER.exists(), reason=f"there is no llama.cpp at {PEER}: set ARGOSY_LLAMA_CPP"
)


class LlamaServer(VllmServer):
    """llama-server with the model of its first option, on a Unix socket."""

    def command(self) -> list[str | Path]:
        return [
            *(SERVER, "-m", self.options[0], "-a", "mini", "--host", self.socket),
            *("--threads", "1", "--parallel", "2", "--ctx-size", "1024"),
            *("--no-webui", "--log-disable"),
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model as GGUF."""
    path = tmp_path_factory.mktemp("gguf") / "mini.gguf"
    export: list[str | Path] = [
        PEER / "bin" / "python",
        "-m",
        "tests.support.export_gguf",
        str(BUNDLED_MODEL),
        path,
    ]
    subprocess.run(export, cwd=ROOT, check=True)
    return str(path)


@contextlib.asynccontextmanager
async def run_servers(
    model: str, count: int
) -> AsyncIterator[tuple[list[LlamaServer], GatewayServer, httpx2.AsyncClient]]:
    with TemporaryDirectory() as folder:  # the path of pytest's folder may be too long for a socket
        servers = [
            LlamaServer(Path(folder) / f"{number}.sock", (model,), {}) for number in range(count)
        ]
        with run_vllm_servers(*servers):
            replicas = [ReplicaConfig(url=f"unix:{each.socket}", model="mini") for each in servers]
            async with gateway(*replicas) as (running, client):
                yield servers, running, client


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("extra", [{}, {"stop": ["the cat", "and"]}], ids=["plain", "stop"])
async def test_stream_resumes_after_server_is_killed(
    model: str, path: str, extra: dict[str, object]
) -> None:
    async with run_servers(model, 2) as (servers, running, client):
        assert {replica.kind for replica in running.replicas} == {"llama.cpp"}
        assert {replica.load.max_seqs for replica in running.replicas} == {2}
        undisturbed = await read_stream(client, path, BODIES[path] | extra)
        assert (undisturbed.done_count, len(undisturbed.finish_reasons)) == (1, 1)
        # Routing alternates between the servers.
        second = await read_stream(client, path, BODIES[path] | extra, servers[1].kill)
        assert second.text == undisturbed.text
        assert second.finish_reasons == undisturbed.finish_reasons
        assert (second.done_count, second.errors) == (1, [])
        assert len({chunk["id"] for chunk in second.chunks}) == 1  # `created` differs
        assert second.token_counts == undisturbed.token_counts
        assert servers[1].process.returncode == -signal.SIGKILL


async def test_grammar_stream_ends_with_error_after_kill(model: str) -> None:
    async with run_servers(model, 2) as (servers, _, client):
        body = BODIES[CHAT] | {"grammar": "root ::= [a-z ]+"}
        assert (await read_stream(client, CHAT, body)).done_count == 1
        received = await read_stream(client, CHAT, body, servers[1].kill)
        assert [error["code"] for error in received.errors] == ["upstream_failed"]
        assert received.text
        assert not received.done_count


async def test_unreadable_message_is_400_and_keeps_breaker_closed(model: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,a"}}
    async with run_servers(model, 1) as (_, running, client):
        for message in ({"role": "user", "content": [picture]}, {"content": "whose is this?"}):
            for stream in (False, True, False, True):
                body = {"model": "big", "stream": stream, "messages": [message]}
                assert (await client.post(CHAT, json=body)).status_code == 400
        assert running.replicas[0].health.breaker.is_closed
