"""Running `argosy serve` process, and client streams that detect broken output."""

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
REPLICA_COMMAND = ["argosy.cli", "replica"]
MODEL = "argosy-mini"


@dataclass(frozen=True, slots=True)
class Answer:
    """Output that a client received. The dictionaries are by choice."""

    texts: dict[int, str]
    finishes: dict[int, str]
    tokens: int
    """Output tokens by `usage`."""


class _CallPart(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int
    id: str | None = None
    function: _CallPart | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] = []

    @property
    def text(self) -> str:
        """Everything that the delta adds: reasoning, content, the place of a call's id, its name and its arguments."""
        parts = [self.reasoning, self.content]
        for call in self.tool_calls:
            part = call.function or _CallPart()
            parts += [call.id and f"<call {call.index}>", part.name, part.arguments]
        return "".join(part for part in parts if part)


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
    """Raised if a stream does not end correctly. The message contains the reason."""


@dataclass
class RunningServer:
    """Running `argosy serve` process with a client."""

    url: str
    process: psutil.Process
    client: httpx2.AsyncClient

    def replicas(self) -> list[psutil.Process]:
        """Return the processes of the running replicas."""
        return list(filter(_is_replica, self.process.children(recursive=True)))

    async def find_busy_replica(self, draw: random.Random) -> psutil.Process:
        """Return a random replica that is serving a request, and wait until one is."""
        while True:
            busy = [replica for replica in self.replicas() if await fetch_load(replica) > 0]
            if busy:
                return draw.choice(sorted(busy, key=lambda replica: replica.pid))
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run_server(*arguments: str, state: Path | None = None) -> AsyncIterator[RunningServer]:
    """Run `argosy serve` with the bundled model, and yield it when it is ready. It is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "argosy.cli", "serve", "--port", "0"),
        *("--threads", "1", "--kv-memory", "64MiB", "--drain-deadline", "0", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | ({} if state is None else {"XDG_STATE_HOME": str(state)}),
    )
    drain_task = None
    try:
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        url = await _url(process.stderr)
        drain_task = asyncio.create_task(
            process.stderr.read()
        )  # so that a full pipe cannot block it
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
            yield RunningServer(url, psutil.Process(process.pid), client)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if drain_task is not None:
            await drain_task


async def _url(stderr: asyncio.StreamReader) -> str:
    output = b""
    async for line in stderr:
        output += line
        if found := URL.search(line):
            return found.group().decode()
    raise SystemExit(f"argosy serve ended before it was ready: {output.decode()}")


def _is_replica(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        is_running = process.status() != psutil.STATUS_ZOMBIE
        return process.cmdline()[3:5] == REPLICA_COMMAND and is_running
    return False


async def wait_for_replicas(running: RunningServer, replicas: int) -> None:
    """Wait until there are `replicas` replicas and all are ready."""
    while True:
        loads = [await fetch_load(replica) for replica in running.replicas()]
        if len(loads) == replicas and min(loads) >= 0:
            return
        await asyncio.sleep(0.05)


async def fetch_load(replica: psutil.Process) -> int:
    """Return the number of requests that the replica is serving, or -1 if it is not ready."""
    with contextlib.suppress(psutil.NoSuchProcess, httpx2.TransportError):
        for _, path in served_sockets(replica)[:1]:
            transport = httpx2.AsyncHTTPTransport(uds=path)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://replica", timeout=1.0
            ) as client:
                report = (await client.get("/load")).json()
                return int(report["server_load"]) if report["state"] == "ready" else -1
    return -1


PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}[.]org$"},
    },
    "required": ["name", "age", "email"],
    "additionalProperties": False,
}
PEOPLE: dict[str, object] = {"type": "array", "items": PERSON, "minItems": 6, "maxItems": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "add_people",
        "description": "Add people to the list.",
        "parameters": {"type": "object", "properties": {"people": PEOPLE}, "required": ["people"]},
    },
}
OUTPUT_KINDS: tuple[dict[str, object], ...] = (
    {},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "people", "schema": PEOPLE},
        }
    },
    {"tools": [TOOL], "tool_choice": "required"},
    {"chat_template_kwargs": {"enable_thinking": True}},
)
"""Fields for plain text, a JSON answer, a tool call, and an answer with reasoning."""


def build_body(number: int, tokens: int) -> dict[str, object]:
    """Return the body of stream `number`.

    Every second one is sampled, every third one has two choices. Groups of four differ in the kind of output.
    """
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
        **OUTPUT_KINDS[number // 4 % len(OUTPUT_KINDS)],
    }


async def run_stream(
    running: RunningServer, number: int, tokens: int, on_text: Callable[[str], object] = len
) -> Answer:
    """Run a stream to its end, and call `on_text` with each piece of text.

    Raises:
        BrokenStreamError: The output is not a complete stream.
        httpx2.TransportError: The connection failed.
    """
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    ids: set[str] = set()
    usage_tokens = 0
    body = build_body(number, tokens)
    async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx2.codes.OK:
            raise BrokenStreamError((await response.aread()).decode())
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                if len(ids) != 1 or not usage_tokens:
                    raise BrokenStreamError(f"{len(ids)} ids, {usage_tokens} tokens")
                return Answer(texts, finishes, usage_tokens)
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
                text = choice.delta.text
                texts[choice.index] = texts.get(choice.index, "") + text
                on_text(text)
                if choice.finish_reason:
                    finishes[choice.index] = choice.finish_reason
            usage_tokens = chunk.usage.completion_tokens if chunk.usage else usage_tokens
    raise BrokenStreamError("the stream ended without [DONE]")
