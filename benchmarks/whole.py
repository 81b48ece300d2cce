"""A running `argosy serve`, and streams through it that say when they are broken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec
import psutil

from benchmarks.faults import served_sockets

URL = re.compile(rb"http://127\.0\.0\.1:\d+")
REPLICA = "argosy.fleet.replica_process"
MODEL = "argosy-mini"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client was given; the dictionaries are by choice."""

    texts: dict[int, str]
    finishes: dict[int, str]
    tokens: int
    """Of the output, as `usage` says."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    id: str
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class BrokenStreamError(Exception):
    """A stream did not end as streams end; the message says how it did."""


@dataclass
class Whole:
    """A running `argosy serve`."""

    url: str
    process: psutil.Process
    client: httpx2.AsyncClient

    def replicas(self) -> list[psutil.Process]:
        """The replicas' processes that live now."""
        return [child for child in self.process.children() if _is_replica(child)]

    async def answering(self, draw: random.Random) -> psutil.Process:
        """A random one of those that answer requests now."""
        while True:
            busy = [replica for replica in self.replicas() if await load(replica) > 0]
            if busy:
                return draw.choice(sorted(busy, key=lambda replica: replica.pid))
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def whole(*arguments: str, state: Path | None = None) -> AsyncIterator[Whole]:
    """`argosy serve` with the bundled model, from ready on; killed at the end if it is still there."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "argosy.cli", "serve", "--port", "0"),
        *("--threads", "1", "--kv-memory", "64MiB", "--drain-deadline", "0", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | ({} if state is None else {"XDG_STATE_HOME": str(state)}),
    )
    reading = None
    try:
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        url = await _url(process.stderr)
        reading = asyncio.create_task(process.stderr.read())  # so that the log never blocks it
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
            yield Whole(url, psutil.Process(process.pid), client)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if reading is not None:
            await reading


async def _url(stderr: asyncio.StreamReader) -> str:
    said = b""
    async for line in stderr:
        said += line
        if found := URL.search(line):
            return found.group().decode()
    raise SystemExit(f"argosy serve ended before it was ready: {said.decode()}")


def _is_replica(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return REPLICA in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def all_back(running: Whole, replicas: int) -> None:
    """Wait until there are as many replicas as there should be, and all take requests."""
    while True:
        loads = [await load(replica) for replica in running.replicas()]
        if len(loads) == replicas and min(loads) >= 0:
            return
        await asyncio.sleep(0.05)


async def load(replica: psutil.Process) -> int:
    """Requests that it answers; -1: it does not take any."""
    with contextlib.suppress(psutil.NoSuchProcess, httpx2.TransportError):
        for _, path in served_sockets(replica)[:1]:
            transport = httpx2.AsyncHTTPTransport(uds=path)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://replica", timeout=1.0
            ) as client:
                told = (await client.get("/load")).json()
                return int(told["server_load"]) if told["state"] == "ready" else -1
    return -1


def asked(number: int, tokens: int) -> dict[str, object]:
    """The body of stream `number`: every second one sampled, every third one of two choices."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me a story about {number}."}],
        "temperature": 0.9 if number % 2 else 0.0,
        "seed": number,
        "n": 1 + (number % 3 == 1),
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": number % 4 > 0,
    }


async def stream(
    running: Whole, number: int, tokens: int, told: Callable[[str], object] = len
) -> Answer:
    """One stream to its end; `told` hears its text as it comes. Raises BrokenStreamError or TransportError."""
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    ids: set[str] = set()
    used = 0
    body = asked(number, tokens)
    async with running.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != httpx2.codes.OK:
            raise BrokenStreamError((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                if len(ids) != 1 or not used:
                    raise BrokenStreamError(f"{len(ids)} ids, {used} tokens")
                return Answer(texts, finishes, used)
            if not data or data.startswith(":"):
                continue
            try:
                chunk = _decode(data)
            except msgspec.DecodeError as error:
                raise BrokenStreamError(data) from error
            ids.add(chunk.id)
            for choice in chunk.choices:
                if choice.index in finishes:
                    raise BrokenStreamError(f"more after the end of choice {choice.index}: {data}")
                said = choice.delta.content or ""
                texts[choice.index] = texts.get(choice.index, "") + said
                told(said)
                if choice.finish_reason:
                    finishes[choice.index] = choice.finish_reason
            used = chunk.usage.completion_tokens if chunk.usage else used
    raise BrokenStreamError("it ended without [DONE]")
