"""Replicas as processes on this machine, each behind a Unix socket in a private folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

from argosy.fleet.device_assignment import VISIBLE
from argosy.fleet.launch_messages import Loading, Refused, ReplicaSpec, Report, Serving
from argosy.fleet.runtime_folder import keep_folder
from argosy.policy import Life

ASK_EACH_S = 1.0
ASK_TIMEOUT_S = 5.0
GOODBYE_S = 10.0
"""How long after its drain deadline a replica may take to close its engine."""
LONGEST_REPORT_BYTES = 1 << 20
HEALTH = b"GET /health HTTP/1.1\r\nhost: replica\r\nconnection: close\r\n\r\n"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class LocalLauncher:
    """A `Launcher`. Belongs to one event loop, whose thread must live as long as the replicas shall.

    `progress` is told what is being loaded and how much of it is done (0 to 1), of whichever replica.
    """

    def __init__(self, folder: Path, progress: Callable[[str, float], None]) -> None:
        self._folder = folder
        self._progress = progress
        self._children: dict[str, _Child] = {}
        self.changed = asyncio.Event()

    def socket(self, name: str) -> Path:
        """Where the replica of this name listens, in each of its lives."""
        return self._folder / f"{name}.sock"

    def list(self) -> Mapping[str, Life]:
        """See `Launcher`."""
        return {name: child.life for name, child in self._children.items()}

    async def start(self, spec: ReplicaSpec) -> None:
        """See `Launcher`."""
        child = self._children.get(spec.name)
        if child is not None and child.life.ended_at is None:
            return
        socket = self.socket(spec.name)
        keep_folder(self._folder)
        process = await _spawn(self._environment(spec))
        child = _Child(spec, socket, process, self._progress, self.changed)
        self._children[spec.name] = child
        log.info("replica_started", replica=spec.name, pid=child.pid)
        self.changed.set()

    async def drain(self, name: str) -> None:
        """See `Launcher`."""
        if name in self._children:
            await self._children[name].drain()

    async def stop(self, name: str) -> None:
        """See `Launcher`."""
        if name in self._children:
            await self._children[name].kill()

    def _environment(self, spec: ReplicaSpec) -> dict[str, str]:
        """Ours, with what it may see; what it leaves behind when it is killed goes with the folder."""
        shown = {} if spec.gpu is None else {VISIBLE: spec.gpu}
        return os.environ | shown | {"TMPDIR": str(self._folder)}


class _Child:
    """One life of a replica: its process, what it reports, and whether it answers."""

    def __init__(
        self,
        spec: ReplicaSpec,
        socket: Path,
        process: asyncio.subprocess.Process,
        progress: Callable[[str, float], None],
        changed: asyncio.Event,
    ) -> None:
        self.life = Life(time.monotonic())
        self._name = spec.name
        self._patience_s = spec.server.drain_deadline_s + GOODBYE_S
        self._socket = socket
        self._process = process
        self._progress = progress
        self._changed = changed
        self._ended = asyncio.Event()
        self._following = asyncio.create_task(self._follow(), name=f"follow-{spec.name}")
        where = msgspec.structs.replace(spec.server, uds=str(socket), tls=None, log_name=spec.name)
        told = msgspec.structs.replace(spec, server=where)
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(told) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    async def drain(self) -> None:
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._patience_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("replica_left_too_slowly", replica=self._name)

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await self._ended.wait()

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _follow(self) -> None:
        """From the first report to the end of the process."""
        asking = asyncio.create_task(self._ask(), name=f"ask-{self._name}")
        try:
            if self._process.stdout is not None:
                async for line in self._process.stdout:
                    self._hear(line)
            status = await self._process.wait()
        finally:
            asking.cancel()
        log.info("replica_ended", replica=self._name, status=status)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.life = replace(self.life, ended_at=time.monotonic())
        self._ended.set()
        self._changed.set()

    def _hear(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError as error:
            log.warning("report_not_read", replica=self._name, reason=str(error))
            return
        match report:
            case Loading(what, done):
                self._progress(what, done)
            case Serving():
                self.life = replace(self.life, ready_at=time.monotonic())
                self._changed.set()
            case Refused(message):
                self.life = replace(self.life, refusal=message)

    async def _ask(self) -> None:
        """Note when it answers, again and again."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    if await _answers(self._socket):
                        self.life = replace(self.life, heard_at=time.monotonic())
            await asyncio.sleep(ASK_EACH_S)


async def _spawn(environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "argosy.fleet.replica_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_REPORT_BYTES,
        env=environment,
        start_new_session=True,  # signals from the terminal are ours to act on
    )


async def _answers(socket: Path) -> bool:
    """Whether anybody answers there as a replica does. Raises OSError when nobody listens."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(HEALTH)
        return (await reader.readline()).startswith(b"HTTP/1.1 ")
    finally:
        writer.close()
