"""Launcher of replicas as processes on this machine, each behind a Unix socket in a private folder."""

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
from argosy.process_monitor import count_oom_kills, own_cgroup

HEALTH_CHECK_INTERVAL_S = 1.0
HEALTH_CHECK_TIMEOUT_S = 5.0
SHUTDOWN_GRACE_S = 10.0
"""Time that a replica has after its drain deadline to close its engine."""
MAX_REPORT_BYTES = 1 << 20
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nhost: replica\r\nconnection: close\r\n\r\n"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class LocalLauncher:
    """`Launcher` of local processes.

    Not thread-safe: use it from one event loop. The thread of the loop must live as long as the replicas, because
    Linux kills them when their parent thread ends.

    Args:
        folder: Private folder for sockets and temporary files.
        on_progress: Called with the activity and its fraction (0 to 1) while any replica loads.
    """

    def __init__(self, folder: Path, on_progress: Callable[[str, float], None]) -> None:
        self._folder = folder
        self._on_progress = on_progress
        self._processes: dict[str, _ReplicaProcess] = {}
        self.changed = asyncio.Event()

    def socket_path(self, name: str) -> Path:
        """Return the socket path of the replica, which is the same for all its processes."""
        return self._folder / f"{name}.sock"

    def list_runs(self) -> Mapping[str, ProcessRun]:
        return {name: process.run for name, process in self._processes.items()}

    async def start(self, spec: ReplicaSpec) -> None:
        current = self._processes.get(spec.name)
        if current is not None and current.run.exited_at is None:
            return
        socket = self.socket_path(spec.name)
        ensure_folder(self._folder)
        subprocess = await _spawn_process(self._build_environment(spec))
        process = _ReplicaProcess(spec, socket, subprocess, self._on_progress, self.changed)
        self._processes[spec.name] = process
        log.info("replica_started", replica=spec.name, pid=process.pid)
        self.changed.set()

    async def drain(self, name: str) -> None:
        if name in self._processes:
            await self._processes[name].drain()

    async def stop(self, name: str) -> None:
        if name in self._processes:
            await self._processes[name].kill()

    def _build_environment(self, spec: ReplicaSpec) -> dict[str, str]:
        """Return this process's environment with the replica's GPU. Temporary files are removed with the folder."""
        visible_gpu = {} if spec.gpu is None else {VISIBLE_DEVICES_VARIABLE: spec.gpu}
        return os.environ | visible_gpu | {"TMPDIR": str(self._folder)}


class _ReplicaProcess:
    """Process of a replica, with its reports and its health."""

    def __init__(
        self,
        spec: ReplicaSpec,
        socket: Path,
        process: asyncio.subprocess.Process,
        on_progress: Callable[[str, float], None],
        changed: asyncio.Event,
    ) -> None:
        self.run = ProcessRun(time.monotonic())
        self._oom_kills = count_oom_kills(own_cgroup())
        self._name = spec.name
        self._drain_timeout_s = spec.server.drain_deadline_s + SHUTDOWN_GRACE_S
        self._socket = socket
        self._process = process
        self._on_progress = on_progress
        self._changed = changed
        self._exited = asyncio.Event()
        self._watch_task = asyncio.create_task(self._watch(), name=f"watch-{spec.name}")
        server = msgspec.structs.replace(spec.server, uds=str(socket), tls=None, log_name=spec.name)
        local_spec = msgspec.structs.replace(spec, server=server)
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(local_spec) + b"\n")

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
        """Handle the reports until the process exits."""
        health_task = asyncio.create_task(self._poll_health(), name=f"health-{self._name}")
        try:
            if self._process.stdout is not None:
                async for line in self._process.stdout:
                    self._on_report(line)
            status = await self._process.wait()
        finally:
            health_task.cancel()
        self.run = replace(
            self.run,
            exited_at=time.monotonic(),
            exit_status=status,
            ran_out_of_memory=count_oom_kills(own_cgroup()) > self._oom_kills,
        )
        log.info("replica_exited", replica=self._name, status=status, reason=self.run.exit_reason)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._exited.set()
        self._changed.set()

    def _on_report(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=ReplicaReport)
        except msgspec.DecodeError as error:
            log.warning("replica_report_invalid", replica=self._name, reason=str(error))
            return
        match report:
            case ReplicaLoading(activity, fraction):
                self._on_progress(activity, fraction)
            case ReplicaServing():
                self.run = replace(self.run, ready_at=time.monotonic())
                self._changed.set()
            case ReplicaRefused(message):
                self.run = replace(self.run, start_error=message)

    async def _poll_health(self) -> None:
        """Record the time of the latest response to a health check. Runs until it is cancelled."""
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
        start_new_session=True,  # keeps signals of the terminal from the replica; the controller handles them
    )


async def _is_responding(socket: Path) -> bool:
    """Return whether an HTTP server responds at the socket.

    Raises:
        OSError: No process listens at the socket.
    """
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(HEALTH_REQUEST)
        return (await reader.readline()).startswith(b"HTTP/1.1 ")
    finally:
        writer.close()
