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

from argosy.fleet.device_assignment import VISIBLE_DEVICES_VARIABLE
from argosy.fleet.launch_messages import (
    ReplicaLoading,
    ReplicaRefused,
    ReplicaReport,
    ReplicaServing,
    ReplicaSpec,
)
from argosy.fleet.runtime_folder import ensure_folder
from argosy.policy import ProcessRun

HEALTH_CHECK_INTERVAL_S = 1.0
HEALTH_CHECK_TIMEOUT_S = 5.0
SHUTDOWN_GRACE_S = 10.0
"""How long after its drain deadline a replica may take to close its engine."""
MAX_REPORT_BYTES = 1 << 20
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nhost: replica\r\nconnection: close\r\n\r\n"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class LocalLauncher:
    """A `Launcher`. Belongs to one event loop, whose thread must live as long as the replicas shall.

    `progress` is told what is being loaded and how much of it is done (0 to 1), of whichever replica.
    """

    def __init__(self, folder: Path, progress: Callable[[str, float], None]) -> None:
        self._folder = folder
        self._progress = progress
        self._processes: dict[str, _ReplicaProcess] = {}
        self.changed = asyncio.Event()

    def socket_path(self, name: str) -> Path:
        """Where the replica of this name listens, in each of its lives."""
        return self._folder / f"{name}.sock"

    def list_runs(self) -> Mapping[str, ProcessRun]:
        """See `Launcher`."""
        return {name: child.run for name, child in self._processes.items()}

    async def start(self, spec: ReplicaSpec) -> None:
        """See `Launcher`."""
        child = self._processes.get(spec.name)
        if child is not None and child.run.exited_at is None:
            return
        socket = self.socket_path(spec.name)
        ensure_folder(self._folder)
        process = await _spawn_process(self._build_environment(spec))
        child = _ReplicaProcess(spec, socket, process, self._progress, self.changed)
        self._processes[spec.name] = child
        log.info("replica_started", replica=spec.name, pid=child.pid)
        self.changed.set()

    async def drain(self, name: str) -> None:
        """See `Launcher`."""
        if name in self._processes:
            await self._processes[name].drain()

    async def stop(self, name: str) -> None:
        """See `Launcher`."""
        if name in self._processes:
            await self._processes[name].kill()

    def _build_environment(self, spec: ReplicaSpec) -> dict[str, str]:
        """Ours, with what it may see; what it leaves behind when it is killed goes with the folder."""
        shown = {} if spec.gpu is None else {VISIBLE_DEVICES_VARIABLE: spec.gpu}
        return os.environ | shown | {"TMPDIR": str(self._folder)}


class _ReplicaProcess:
    """One life of a replica: its process, what it reports, and whether it answers."""

    def __init__(
        self,
        spec: ReplicaSpec,
        socket: Path,
        process: asyncio.subprocess.Process,
        progress: Callable[[str, float], None],
        changed: asyncio.Event,
    ) -> None:
        self.run = ProcessRun(time.monotonic())
        self._name = spec.name
        self._drain_timeout_s = spec.server.drain_deadline_s + SHUTDOWN_GRACE_S
        self._socket = socket
        self._process = process
        self._progress = progress
        self._changed = changed
        self._exited = asyncio.Event()
        self._watch_task = asyncio.create_task(self._watch(), name=f"follow-{spec.name}")
        where = msgspec.structs.replace(spec.server, uds=str(socket), tls=None, log_name=spec.name)
        told = msgspec.structs.replace(spec, server=where)
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(told) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    async def drain(self) -> None:
        self._send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._exited.wait()
        except TimeoutError:
            log.warning("replica_drain_timeout", replica=self._name)

    async def kill(self) -> None:
        self._send_signal(signal.SIGKILL)
        await self._exited.wait()

    def _send_signal(self, number: signal.Signals) -> None:
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _watch(self) -> None:
        """From the first report to the end of the process."""
        asking = asyncio.create_task(self._poll_health(), name=f"ask-{self._name}")
        try:
            if self._process.stdout is not None:
                async for line in self._process.stdout:
                    self._on_report(line)
            status = await self._process.wait()
        finally:
            asking.cancel()
        log.info("replica_exited", replica=self._name, status=status)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.run = replace(self.run, exited_at=time.monotonic())
        self._exited.set()
        self._changed.set()

    def _on_report(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=ReplicaReport)
        except msgspec.DecodeError as error:
            log.warning("replica_report_invalid", replica=self._name, reason=str(error))
            return
        match report:
            case ReplicaLoading(what, done):
                self._progress(what, done)
            case ReplicaServing():
                self.run = replace(self.run, ready_at=time.monotonic())
                self._changed.set()
            case ReplicaRefused(message):
                self.run = replace(self.run, start_error=message)

    async def _poll_health(self) -> None:
        """Note when it answers, again and again."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(HEALTH_CHECK_TIMEOUT_S):
                    if await _is_responding(self._socket):
                        self.run = replace(self.run, last_response_at=time.monotonic())
            await asyncio.sleep(HEALTH_CHECK_INTERVAL_S)


async def _spawn_process(environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "argosy.fleet.replica_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_REPORT_BYTES,
        env=environment,
        start_new_session=True,  # signals from the terminal are ours to act on
    )


async def _is_responding(socket: Path) -> bool:
    """Whether anybody answers there as a replica does. Raises OSError when nobody listens."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(HEALTH_REQUEST)
        return (await reader.readline()).startswith(b"HTTP/1.1 ")
    finally:
        writer.close()
