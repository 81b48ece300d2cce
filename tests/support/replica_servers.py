"""Replica servers on a free port, in this event loop or in a process, with an engine chosen by the test."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
import msgspec

from argosy.engine import EngineConfig, ReplicaServerConfig
from argosy.engine.serving.api_server.replica_server import ReplicaServer
from argosy.engine.serving.api_server.replica_state import ReplicaState
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.models import BUNDLED_MODEL
from argosy.protocol import EventParser
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
MODEL = "test-model"
CONFIG = ReplicaServerConfig(port=0, served_model_names=(MODEL,), drain_deadline_s=5.0)


@dataclass(frozen=True, slots=True)
class RunningReplica:
    """Running replica server and an HTTP client for it."""

    url: str
    server: ReplicaServer
    client: httpx2.AsyncClient

    @property
    def replica(self) -> ReplicaState:
        return self.server.replica_state


@functools.cache
def load_text_processing() -> TextProcessing:
    """Load the bundled model's tokenizer and chat template."""
    return TextProcessing.load(BUNDLED_MODEL)


def bundled_model_engine(
    blocks: int = 512,
    max_seqs: int = 64,
    *,
    warmup: bool = False,
    enable_lora: bool = False,
    adapter_memory_bytes: int = 1 << 30,
) -> EngineClient:
    """Create an engine client for the bundled model, without starting it."""
    config = EngineConfig(
        model=str(BUNDLED_MODEL),
        threads=1,
        num_blocks=blocks,
        max_seqs=max_seqs,
        warmup=warmup,
        enable_lora=enable_lora,
        adapter_memory_bytes=adapter_memory_bytes,
    )
    return EngineClient(config)


@contextlib.asynccontextmanager
async def serve(
    engine: EngineClient | FakeEngine,
    config: ReplicaServerConfig = CONFIG,
    load_text: Callable[[], TextProcessing] = load_text_processing,
    *,
    enable_lora: bool = False,
) -> AsyncIterator[RunningReplica]:
    """Run a replica server and yield it when it is ready. At the end, stop it and its running requests."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = ReplicaServer(
        config,
        EngineConfig(model=str(BUNDLED_MODEL), enable_lora=enable_lora),
        engine=cast("EngineClient", engine),  # a `FakeEngine` has the same methods
        load_text_processing=load_text,
        on_ready=url.set_result,
    )
    running = asyncio.create_task(server.run())
    futures: set[asyncio.Future[Any]] = {running, url}
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    async with httpx2.AsyncClient(base_url=url.result(), timeout=30) as client:
        yield RunningReplica(url.result(), server, client)
    server.stop()
    server.stop()
    await running


@contextlib.asynccontextmanager
async def replica_process(
    config: ReplicaServerConfig = CONFIG,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx2.AsyncClient]]:
    """Run a `fake_replica` process, and yield it with an HTTP client. Kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fake_replica"),
        msgspec.json.encode(config).decode(),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def chat(content: str = "Hello", **extra: object) -> dict[str, object]:
    """Return a chat completion body."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, **extra}


def completion(prompt: object = "Once upon", **extra: object) -> dict[str, object]:
    """Return a completion body."""
    return {"model": MODEL, "prompt": prompt, **extra}


def events(body: bytes) -> list[bytes]:
    """Return the data of every event of a complete stream."""
    return EventParser().feed(body)
