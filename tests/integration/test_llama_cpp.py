"""llama.cpp's own server behind the gateway, where it has been built: found, read, and carried on when it is killed."""

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
from tests.support.gateway_client import CHAT, COMPLETION, Seen, gateway
from tests.support.waiting import until

from argosy.gateway import ReplicaConfig
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
    """One process, on a Unix socket."""

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
async def servers(model: Path, count: int) -> AsyncIterator[list[LlamaServer]]:
    started: list[LlamaServer] = []
    with TemporaryDirectory() as folder:  # pytest's own may be too long for a socket
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


async def story(
    client: httpx2.AsyncClient,
    path: str,
    killed: LlamaServer | None = None,
    asks: dict[str, object] | None = None,
) -> Seen:
    """A greedy stream; `killed` dies once a few words have come."""
    greedy = {"model": "big", "stream": True, "temperature": 0, "max_tokens": 40}
    body = BODIES[path] | greedy | {"stream_options": {"include_usage": True}} | (asks or {})
    seen = Seen()
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.take(line[6:])
            if killed is not None and len(seen.chunks) == 8:
                killed.process.kill()
                await killed.process.wait()
                killed = None
    return seen


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("asks", [{}, {"stop": ["the cat", "and"]}], ids=["plain", "stop"])
async def test_a_story_goes_on_when_its_server_is_killed(
    model: Path, path: str, asks: dict[str, object]
) -> None:
    async with servers(model, 2) as both:
        replicas = [ReplicaConfig(url=f"unix:{server.socket}", model="mini") for server in both]
        async with gateway(*replicas) as (running, client):
            assert {replica.kind for replica in running.replicas} == {"llama.cpp"}
            assert {replica.load.max_seqs for replica in running.replicas} == {2}
            whole = await story(client, path, asks=asks)
            assert (whole.done, len(whole.finish)) == (1, 1)
            second = await story(client, path, both[1], asks)  # they take turns
            assert second.text == whole.text
            assert second.finish == whole.finish
            assert (second.done, second.errors) == (1, [])
            assert len({chunk["id"] for chunk in second.chunks}) == 1  # each event has its own time
            assert second.usage[0]["prompt_tokens"] == whole.usage[0]["prompt_tokens"]
            assert second.usage[0]["completion_tokens"] == whole.usage[0]["completion_tokens"]
            assert both[1].process.returncode is not None


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_grammar_is_not_carried_on_from_its_middle(model: Path, path: str) -> None:
    async with servers(model, 2) as both:
        replicas = [ReplicaConfig(url=f"unix:{server.socket}", model="mini") for server in both]
        async with gateway(*replicas) as (_, client):
            asks: dict[str, object] = {"grammar": "root ::= [a-z ]+"}
            assert (await story(client, path, asks=asks)).done == 1
            seen = await story(client, path, both[1], asks)
            assert [error["code"] for error in seen.errors] == ["upstream_failed"]
            assert seen.text
            assert not seen.done


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]},
        {"content": "whose is this?"},
    ],
    ids=["picture", "nobody's"],
)
async def test_what_it_cannot_read_is_the_requests_own_fault(
    model: Path, message: dict[str, object], stream: bool
) -> None:
    async with servers(model, 1) as (one,):
        replica = ReplicaConfig(url=f"unix:{one.socket}", model="mini")
        async with gateway(replica) as (running, client):
            body = {"model": "big", "stream": stream, "messages": [message]}
            for _ in range(4):
                assert (await client.post(CHAT, json=body)).status_code == 400
            assert running.replicas[0].breaker.is_closed


async def test_a_whole_answer_comes_from_the_server_that_lives(model: Path) -> None:
    async with servers(model, 2) as both:
        replicas = [ReplicaConfig(url=f"unix:{server.socket}", model="mini") for server in both]
        async with gateway(*replicas) as (running, client):
            body = {"model": "big", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
            body |= BODIES[COMPLETION]
            whole = (await client.post(COMPLETION, json=body)).json()
            answer = asyncio.create_task(client.post(COMPLETION, json=body))
            await until(lambda: running.replicas[1].load.in_flight)
            both[1].process.kill()
            seen = (await answer).json()
            assert seen["choices"] == whole["choices"]
            assert seen["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 300
