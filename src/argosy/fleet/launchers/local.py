"""Launcher of replicas as processes on this machine that outlive the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import msgspec
import psutil
import structlog

from argosy.child_environment import replica_variables
from argosy.fleet.device_assignment import (
    VISIBLE_DEVICES_VARIABLE,
    count_installed_gpus,
    visible_gpus,
)
from argosy.fleet.launchers.gpu_reservations import GpuReservations
from argosy.fleet.launchers.launcher import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    StaleEpochError,
)
from argosy.fleet.launchers.local_start import LOCAL_HOST, check_spec, fill_command, plan_attempt
from argosy.fleet.launchers.monitor_processes import MonitorProcesses
from argosy.fleet.launchers.replica_folder import LaunchRecord, ReplicaFolder, describe_replica
from argosy.policy.reconciliation import LaunchState
from argosy.process import format_os_error, run_in_daemon_thread
from argosy.process_monitor import (
    DRAIN_SIGNAL,
    STOP_SIGNAL,
    MonitorSettings,
    read_log_end,
)

SHUTDOWN_GRACE_S = 10.0
MAX_LOG_BYTES = 16 * 1024 * 1024
START_POLL_INTERVAL_S = 0.1
"""Interval at which the reports of starting replicas are read."""
FIRST_REPORT_TIMEOUT_S = 30.0
"""Time after which a replica without a report counts as one that reports nothing."""
POLL_INTERVAL_S = 1.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


@dataclass(frozen=True, slots=True)
class _WaitingStart:
    """Start that waits for a GPU. Only in memory, because nothing was started that could be lost."""

    spec: LaunchSpec
    epoch: int
    reason: str


class LocalProcessLauncher:
    """`Launcher` of processes on this machine. Not thread-safe: use it from one event loop.

    Each replica is the child of a monitor (`argosy.process_monitor`) in a session of its own. Both outlive this
    launcher, and any launcher of the same folder continues to control them.

    Args:
        folder: Private folder for the state of the replicas, their sockets and their logs.
        host: Address at which replicas with a port listen.
        die_with_launcher: Whether replicas are killed when this launcher is closed or its process ends.
        forwards_output: Whether the output of replicas also goes to this process's standard error.
        shutdown_grace_s: Time that a replica has after its drain deadline to close its engine.
        max_log_bytes: Size at which a log is rotated. One older file is kept.
        gpu_reservations: GPUs that replicas of all fleets on this machine share. None for those of this machine.
        has_credentials: Whether replicas get the credentials of model sources from this process's environment.

    Raises:
        LaunchError: The folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = LOCAL_HOST,
        die_with_launcher: bool = False,
        forwards_output: bool = False,
        shutdown_grace_s: float = SHUTDOWN_GRACE_S,
        max_log_bytes: int = MAX_LOG_BYTES,
        count_gpus: Callable[[], int] = count_installed_gpus,
        gpu_reservations: GpuReservations | None = None,
        has_credentials: bool = False,
    ) -> None:
        try:
            self._folder = ReplicaFolder(folder)
        except OSError as error:
            raise LaunchError(f"replicas cannot be launched: {format_os_error(error)}") from error
        self._host = host
        self._die_with_launcher = die_with_launcher
        self._forwards_output = forwards_output
        self._shutdown_grace_s = shutdown_grace_s
        self._max_log_bytes = max_log_bytes
        self._gpus = visible_gpus(os.environ, count_gpus)
        self._gpu_reservations = gpu_reservations or GpuReservations()
        self._has_credentials = has_credentials
        self._monitors = MonitorProcesses(self._folder)
        self._waiting: dict[str, _WaitingStart] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """Monitors that this launcher started, by replica."""
        self._pidfds: dict[str, int] = {}
        """Descriptors that become readable when the monitor of a running replica exits."""
        self._watch_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.changed = asyncio.Event()

    # --- interface -------------------------------------------------------------------------------

    async def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        self._ensure_watch()
        replicas = {}
        for name, record in self._folder.read_records().items():
            is_running = self._folder.is_running(name)
            status = self._folder.read_status(record)
            if not is_running and (status is None or status.exited_at is None):
                status = await self._monitors.record_lost_exit(record)
            replicas[name] = describe_replica(record, status)
        for name, waiting in self._waiting.items():
            spec, previous = waiting.spec, replicas.get(name)
            replicas[name] = LaunchedReplica(
                **spec.identity,
                state=LaunchState.PROVISIONING,
                reason=waiting.reason,
                node=socket.gethostname(),
                attempt=1 if previous is None else previous.attempt + 1,
            )
        return replicas

    async def start(self, spec: LaunchSpec, epoch: int) -> None:
        self._ensure_watch()
        check_spec(spec, len(self._gpus))
        await self._start(spec, epoch, self._waiting.get(spec.name))

    async def _start(self, spec: LaunchSpec, epoch: int, waiting: _WaitingStart | None) -> None:
        """Start a replica, unless the start that waited has been cancelled meanwhile."""
        await self._monitors.wait_for_release(spec.name)
        async with self._folder.locked(epoch):
            if self._waiting.get(spec.name) is not waiting:
                return
            if self._folder.is_running(spec.name):
                self._waiting.pop(spec.name, None)
                return
            previous = self._folder.read_record(spec.name)
            if previous is None:
                self._kill_unrecorded(spec.name)
            accelerators = spec.resources.accelerators
            with self._gpu_reservations.reserve(accelerators, self._gpus) as locks:
                if locks is None:
                    gpus = "a GPU" if accelerators == 1 else f"{accelerators} GPUs"
                    reason = f"waiting for {gpus} of this machine"
                    self._set_waiting(_WaitingStart(spec, epoch, reason))
                    return
                try:
                    running = [
                        each
                        for each in self._folder.read_records().values()
                        if self._monitors.is_running(each)
                    ]
                    record = plan_attempt(
                        spec, previous, tuple(locks), running, self._host, self._folder
                    )
                    inherited = (
                        os.environ
                        if spec.inherits_environment
                        else replica_variables(os.environ, has_credentials=self._has_credentials)
                    )
                    monitor = self._monitors.spawn(
                        record,
                        self._build_monitor_settings(spec, record, tuple(locks.values())),
                        inherited,
                        None if self._forwards_output else self._folder.log_path(spec.name),
                    )
                except OSError as error:
                    self._folder.restore_record(spec.name, previous)
                    raise LaunchError(
                        f"replica {spec.name} cannot be started: {format_os_error(error)}"
                    ) from error
            self._waiting.pop(spec.name, None)
            self._reap(spec.name)
            self._children[spec.name] = monitor
        assert monitor.stdout is not None  # noqa: S101 - it is a pipe
        with monitor.stdout:
            line = await run_in_daemon_thread(monitor.stdout.readline)
        problem = msgspec.json.decode(line, type=str) if line else "its monitor was killed"
        if problem:
            await run_in_daemon_thread(monitor.wait)
            async with self._folder.locked():
                if self._folder.read_record(spec.name) == record:  # no other attempt has begun
                    self._folder.restore_record(spec.name, previous)
            raise LaunchError(f"replica {spec.name} cannot be started: {problem}")
        log.info("replica_started", replica=spec.name, attempt=record.attempt)
        self._wake.set()
        self.changed.set()

    async def prepare_pool(self, spec: LaunchSpec, epoch: int) -> None:
        """Do nothing: processes share nothing."""

    async def drain(self, name: str, epoch: int) -> None:
        async with self._folder.locked(epoch):
            record = self._cancel_waiting(name)
            if record is None or not await self._monitors.send_signal(record, DRAIN_SIGNAL):
                return
        await self._monitors.wait_for_status(
            record, lambda status: status.is_draining or status.exited_at is not None
        )
        self.changed.set()

    async def stop(self, name: str, epoch: int) -> None:
        async with self._folder.locked(epoch):
            record = self._cancel_waiting(name)
            if record is None:
                return
            await self._monitors.send_signal(record, STOP_SIGNAL)
        if not await self._monitors.wait_for_status(
            record, lambda status: status.is_stopping or status.exited_at is not None
        ):
            await self._monitors.kill_processes(record)
        await self._monitors.wait_for_exit(record)
        self.changed.set()

    async def remove(self, name: str, epoch: int) -> None:
        await self._monitors.wait_for_release(name)
        async with self._folder.locked(epoch):
            record = self._cancel_waiting(name)
            if record is None:
                return
            if self._folder.is_running(name):
                raise LaunchError(f"replica {name} is running; stop it before removing it")
            try:
                self._folder.remove(record)
            except OSError as error:
                raise LaunchError(
                    f"replica {name} cannot be removed: {format_os_error(error)}"
                ) from error
        self.changed.set()

    async def read_log(self, name: str, max_bytes: int) -> bytes:
        return read_log_end(self._folder.log_path(name), max_bytes)

    def list_logs(self) -> list[str]:
        """Return the names of the replicas whose logs are kept, also of removed ones."""
        return self._folder.list_logs()

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
            self._watch_task = None
        for name in list(self._pidfds):
            self._forget_pidfd(name)
        for monitor in self._children.values():
            if monitor.stdin is not None:
                monitor.stdin.close()
            if self._die_with_launcher:
                await run_in_daemon_thread(monitor.wait)
            else:
                _reap_later(monitor)
        self._children.clear()
        self._waiting.clear()

    # --- start -----------------------------------------------------------------------------------

    def _cancel_waiting(self, name: str) -> LaunchRecord | None:
        """Forget a start that waits. Returns the record of the latest attempt that began."""
        if self._waiting.pop(name, None) is not None:
            self.changed.set()
        return self._folder.read_record(name)

    def _set_waiting(self, waiting: _WaitingStart) -> None:
        if self._waiting.get(waiting.spec.name) != waiting:
            self._waiting[waiting.spec.name] = waiting
            self.changed.set()

    def _build_monitor_settings(
        self, spec: LaunchSpec, record: LaunchRecord, gpu_locks: tuple[int, ...]
    ) -> MonitorSettings:
        visible = {VISIBLE_DEVICES_VARIABLE: ",".join(record.gpus)} if self._gpus else {}
        return MonitorSettings(
            command=fill_command(spec.command, record, self._host),
            environment={**visible, **spec.environment},
            attempt=record.attempt,
            status_path=str(self._folder.status_path(spec.name)),
            log_path=str(self._folder.log_path(spec.name)),
            max_log_bytes=self._max_log_bytes,
            forwards_output=self._forwards_output,
            drain_signal=signal.Signals[spec.drain_signal],
            drain_timeout_s=spec.drain_deadline_s + self._shutdown_grace_s,
            memory_bytes=spec.resources.memory_bytes,
            cpus=record.cpus,
            inherited_fds=gpu_locks,
            die_with_launcher=self._die_with_launcher,
        )

    # --- watch -----------------------------------------------------------------------------------

    def _ensure_watch(self) -> None:
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch(), name="watch-replicas")

    async def _watch(self) -> None:
        """Set `changed` when a status changes, and start waiting replicas when GPUs may be free. Runs until closed."""
        seen: dict[str, tuple[int, ...]] = {}
        while True:
            self._wake.clear()
            await self._start_waiting()
            interval_s = POLL_INTERVAL_S
            with contextlib.suppress(OSError, LaunchError):  # `list_replicas` raises it too
                interval_s = self._watch_running()
                current = self._read_versions()  # now that later exits wake this task
                if current != seen:
                    seen = current
                    self.changed.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()

    def _read_versions(self) -> dict[str, tuple[int, ...]]:
        """Return the version of the status of each replica."""
        versions = {}
        for name in self._folder.read_records():
            version: tuple[int, ...] = ()
            with contextlib.suppress(OSError):
                stat = self._folder.status_path(name).stat()
                version = (stat.st_mtime_ns, stat.st_ino)
            versions[name] = (self._folder.is_running(name), *version)
        return versions

    def _watch_running(self) -> float:
        """Watch for the exit of running replicas, and return the time to the next look at their reports."""
        interval_s = POLL_INTERVAL_S
        for name, record in self._folder.read_records().items():
            if not self._monitors.is_running(record):
                self._forget_pidfd(name)
                continue
            status = self._folder.read_status(record)
            is_young = time.time() - record.started_at < FIRST_REPORT_TIMEOUT_S
            if status is None or (not status.is_serving and (status.activity or is_young)):
                interval_s = START_POLL_INTERVAL_S
            if status is not None and name not in self._pidfds and hasattr(os, "pidfd_open"):
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(status.monitor_pid)
                    self._pidfds[name] = pidfd
                    asyncio.get_running_loop().add_reader(pidfd, self._on_monitor_exit, name)
        return interval_s

    def _on_monitor_exit(self, name: str) -> None:
        self._forget_pidfd(name)
        self._wake.set()

    def _forget_pidfd(self, name: str) -> None:
        pidfd = self._pidfds.pop(name, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        if not self._folder.is_running(name):
            self._reap(name)

    def _reap(self, name: str) -> None:
        """Let go of a monitor of this launcher that exits, and has released its lock."""
        monitor = self._children.pop(name, None)
        if monitor is not None:
            _reap_later(monitor)
            if monitor.stdin is not None:
                monitor.stdin.close()

    def _kill_unrecorded(self, name: str) -> None:
        """Kill a monitor of this launcher, with its replica, if another program has removed their folder."""
        monitor = self._children.get(name)
        if monitor is None or monitor.poll() is not None:
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(monitor.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    each.kill()

    async def _start_waiting(self) -> None:
        for name, waiting in list(self._waiting.items()):
            try:
                await self._start(waiting.spec, waiting.epoch, waiting)
            except StaleEpochError:
                self._waiting.pop(name, None)  # the next leader decides about it
                self.changed.set()
            except LaunchError as error:
                self._set_waiting(replace(waiting, reason=str(error)))


def _reap_later(monitor: subprocess.Popen[bytes]) -> None:
    """Reap a child whenever it ends, without blocking the event loop, on which one that does not end would stop all."""
    if monitor.poll() is None:
        Thread(target=monitor.wait, name=f"reap-{monitor.pid}", daemon=True).start()
