"""Streams through `argosy serve` while its replicas are killed, stopped, sent away and cut off.

    python -m benchmarks.chaos [--rounds 200] [--streams 32] [--replicas 2] [--seed 0] [--faults kill,stop,term,cut]

Each round runs the same streams, greedy and seeded ones, some of two choices, and does one fault to one replica at
a random moment. A stream is equal when its texts, finish reasons and token counts are those of a run that nobody
disturbed. Prints a JSON line for each fault, and one for the ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import errno
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
import psutil

from argosy.store import UsageSum, open_store

URL = re.compile(rb"http://127\.0\.0\.1:\d+")
REPLICA = "argosy.fleet.child"
MODEL = "argosy-mini"
_PIDFD_GETFD = 438
"""System call number, on every architecture (Linux 5.6)."""


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


# --- streams -------------------------------------------------------------------------------------


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


# --- faults --------------------------------------------------------------------------------------


def kill(replica: psutil.Process) -> None:
    """The process is gone from one moment to the next."""
    replica.send_signal(signal.SIGKILL)


def stop(replica: psutil.Process) -> None:
    """It stands still, its connections open."""
    replica.send_signal(signal.SIGSTOP)


def term(replica: psutil.Process) -> None:
    """It is told to leave."""
    replica.send_signal(signal.SIGTERM)


def cut(replica: psutil.Process) -> None:
    """Every connection to it is cut, and it lives on. Raises PermissionError where processes may not be traced."""
    for fd, _ in _served(replica):
        held = _borrowed(replica.pid, fd)
        if held is None:
            continue
        with held:
            if not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                held.shutdown(socket.SHUT_RDWR)


FAULTS = {"kill": kill, "stop": stop, "term": term, "cut": cut}


def _served(replica: psutil.Process) -> list[tuple[int, str]]:
    """File descriptor and path of the sockets that it serves requests on, the listening one included."""
    sockets = replica.net_connections(kind="unix")
    return [(s.fd, str(s.laddr)) for s in sockets if str(s.laddr).endswith(".sock")]


def _borrowed(pid: int, fd: int) -> socket.socket | None:
    """A socket of another process, held by this one too; None: it is closed by now."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        held = libc.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if held >= 0:
        return socket.socket(fileno=held)
    number = ctypes.get_errno()
    if number == errno.EBADF:
        return None
    raise OSError(number, os.strerror(number))


# --- rounds --------------------------------------------------------------------------------------


@dataclass
class Streams:
    """The same streams again and again."""

    running: Whole
    count: int
    tokens: int
    """Most of each choice."""
    expected: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """All that clients have been given."""

    async def undisturbed(self) -> None:
        """Learn what they give."""
        streams = (stream(self.running, n, self.tokens) for n in range(self.count))
        self.expected = list(await asyncio.gather(*streams))
        self.answers += self.expected

    async def disturbed(
        self, fault: Callable[[psutil.Process], None], draw: random.Random
    ) -> Outcome:
        """Run them, and do `fault` to a replica when a random part of the text has come, up to three quarters."""
        characters = sum(len(text) for answer in self.expected for text in answer.texts.values())
        told = _Counter(draw.randrange(characters * 3 // 4))
        striking = asyncio.create_task(self._strike(fault, told, draw))
        streams = (stream(self.running, n, self.tokens, told.count) for n in range(self.count))
        got = await asyncio.gather(*streams, return_exceptions=True)
        struck = striking.done()
        if struck:
            await striking
        striking.cancel()
        self.answers += [answer for answer in got if isinstance(answer, Answer)]
        different = 0
        for number, (answer, expected) in enumerate(zip(got, self.expected, strict=True)):
            if answer != expected:
                different += 1
                print(f"stream {number}: {answer!r}\n  expected {expected!r}", file=sys.stderr)
        return Outcome(different, struck)

    async def _strike(
        self, fault: Callable[[psutil.Process], None], told: _Counter, draw: random.Random
    ) -> None:
        replica = await self.running.answering(draw)
        await told.reached.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            fault(replica)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a round went."""

    different: int
    """Streams that gave something else than undisturbed."""
    struck: bool
    """The fault was done while streams ran."""


class _Counter:
    """Counts characters and tells when there were enough."""

    def __init__(self, enough: int = 0) -> None:
        self.reached = asyncio.Event()
        self._left = enough

    def count(self, text: str) -> None:
        self._left -= len(text)
        if self._left <= 0:
            self.reached.set()


def ledger(state: Path) -> UsageSum:
    """What the ledger of a server with this state folder says that all requests used."""
    store = open_store(f"sqlite:///{state / 'argosy' / 'argosy.db'}")
    try:
        return store.usage.report()[0]
    finally:
        store.close()


async def settled(state: Path, requests: int) -> UsageSum:
    """The ledger, once it has as many rows."""
    while (told := await asyncio.to_thread(ledger, state)).requests < requests:  # noqa: ASYNC110 - only asking tells
        await asyncio.sleep(0.1)
    return told


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
        for _, path in _served(replica)[:1]:
            transport = httpx2.AsyncHTTPTransport(uds=path)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://replica", timeout=1.0
            ) as client:
                told = (await client.get("/load")).json()
                return int(told["server_load"]) if told["state"] == "ready" else -1
    return -1


async def bench(options: argparse.Namespace, state: Path) -> None:
    """All rounds; prints a row for each fault."""
    draw = random.Random(options.seed)
    faults: Sequence[str] = options.faults.split(",")
    took: dict[str, list[float]] = {fault: [] for fault in faults}
    different, struck = dict.fromkeys(faults, 0), dict.fromkeys(faults, 0)
    async with whole("--replicas", str(options.replicas), state=state) as running:
        await all_back(running, options.replicas)
        streams = Streams(running, options.streams, options.tokens)
        await streams.undisturbed()
        begin = time.perf_counter()
        await streams.undisturbed()
        undisturbed_s = time.perf_counter() - begin
        for number in range(options.rounds):
            await all_back(running, options.replicas)
            fault = faults[number % len(faults)]
            begin = time.perf_counter()
            outcome = await streams.disturbed(FAULTS[fault], draw)
            different[fault] += outcome.different
            struck[fault] += outcome.struck
            took[fault].append(time.perf_counter() - begin)
            print(f"round {number + 1}: {fault}, {took[fault][-1]:.1f} s", file=sys.stderr)
        await all_back(running, options.replicas)
        told = await settled(state, len(streams.answers))
    for fault in faults:
        row = {
            "fault": fault,
            "rounds": len(took[fault]),
            "struck": struck[fault],
            "streams": len(took[fault]) * options.streams,
            "different": different[fault],
            "round_s_undisturbed": round(undisturbed_s, 2),
            "round_s_median": round(statistics.median(took[fault]), 2),
            "round_s_most": round(max(took[fault]), 2),
        }
        print(json.dumps(row), flush=True)
    row = {
        "requests": len(streams.answers),
        "rows": told.requests,
        "tokens_delivered": sum(answer.tokens for answer in streams.answers),
        "tokens_in_rows": told.output_tokens,
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Print one JSON line for each fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS))
    with tempfile.TemporaryDirectory() as state:
        asyncio.run(bench(parser.parse_args(), Path(state)))


if __name__ == "__main__":
    main()
