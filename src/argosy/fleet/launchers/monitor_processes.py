"""Control of the monitors of replicas, also of those that an earlier launcher started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from argosy.fleet.launchers.replica_folder import LaunchRecord, ReplicaFolder
from argosy.folders import open_private_log
from argosy.process_monitor import MonitorSettings, ProcessStatus

RESPONSE_TIMEOUT_S = 5.0
"""Time in which a monitor handles a signal. One that does not is killed with its replica."""
POLL_INTERVAL_S = 0.01
OWNER_VARIABLE = "ARGOSY_REPLICA"
"""Variable in the environment of all processes of a replica. It identifies those that a killed monitor leaves."""


class MonitorProcesses:
    """Starts monitors, sends them signals and waits for what they write. Not thread-safe."""

    def __init__(self, folder: ReplicaFolder) -> None:
        self._folder = folder

    def owner(self, record: LaunchRecord) -> str:
        """Return the value of `OWNER_VARIABLE` in the processes of an attempt."""
        return f"{self._folder.path}:{record.name}:{record.attempt}"

    def spawn(
        self,
        record: LaunchRecord,
        settings: MonitorSettings,
        environment: Mapping[str, str],
        log_path: Path | None,
    ) -> subprocess.Popen[bytes]:
        """Write the record and start the monitor, which inherits the locks. The folder must be locked.

        Killed at any point, this process leaves either a monitor that holds the lock, or no lock. A monitor starts
        nothing before it has read its settings to the end.

        `environment` is that of the monitor, to which that of the settings is added for the replica.
        `log_path` is the file for errors of the monitor. None leaves them on standard error.

        Raises:
            OSError: The record cannot be written, or no process can be created.
        """
        settings_line = msgspec.json.encode(settings) + b"\n"
        lock = self._folder.lock_run(record.name)
        try:
            self._folder.write_record(record)
            log_file = (
                contextlib.nullcontext()
                if log_path is None
                else os.fdopen(open_private_log(log_path), "ab")
            )
            with log_file as log:
                monitor = subprocess.Popen(
                    [sys.executable, "-P", "-m", "argosy.process_monitor"],
                    env={**environment, OWNER_VARIABLE: self.owner(record)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    pass_fds=(lock, *settings.inherited_fds),
                    start_new_session=True,  # keeps signals of the terminal from it
                )
        finally:
            os.close(lock)
        assert monitor.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):  # it was killed, which its missing result shows
            monitor.stdin.write(settings_line)
            monitor.stdin.flush()
            if not settings.die_with_launcher:
                monitor.stdin.close()
        return monitor

    def is_running(self, record: LaunchRecord) -> bool:
        """Return whether the attempt runs. Its monitor ends a moment later."""
        if not self._folder.is_running(record.name):
            return False
        status = self._folder.read_status(record)
        return status is None or status.exited_at is None

    async def send_signal(self, record: LaunchRecord, number: signal.Signals) -> bool:
        """Send a signal to the monitor, and return whether it runs. The folder must be locked."""
        status = await self.wait_for_status(record, lambda _status: True)
        if status is None or not self.is_running(record):
            return False
        with contextlib.suppress(ProcessLookupError), _open_pidfd(status.monitor_pid) as pidfd:
            # The lock shows that the pid is still the monitor's, and the descriptor keeps it so.
            if self._folder.is_running(record.name):
                if pidfd is None:
                    os.kill(status.monitor_pid, number)
                else:
                    signal.pidfd_send_signal(pidfd, number)
                return True
        return False

    async def wait_for_status(
        self, record: LaunchRecord, reached: Callable[[ProcessStatus], bool]
    ) -> ProcessStatus | None:
        """Wait until the monitor has written such a status. Returns None if it ends or does not respond."""
        deadline = time.monotonic() + RESPONSE_TIMEOUT_S
        while time.monotonic() < deadline:
            is_running = self._folder.is_running(record.name)
            status = self._folder.read_status(record)
            if status is not None and reached(status):
                return status
            if not is_running:
                return None
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    async def wait_for_exit(self, record: LaunchRecord) -> None:
        """Wait until the attempt does not run."""
        while self.is_running(record):  # noqa: ASYNC110 - another process releases the lock
            await asyncio.sleep(POLL_INTERVAL_S)

    async def wait_for_release(self, name: str) -> None:
        """Wait until the monitor of a replica that has exited ends too, which it does at once."""
        record = self._folder.read_record(name)
        if record is not None:
            while self._folder.is_running(name) and not self.is_running(record):  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_INTERVAL_S)

    async def kill_processes(self, record: LaunchRecord) -> None:
        """Kill the monitor, and what a killed monitor left, by the variable in their environment."""
        deadline = time.monotonic() + RESPONSE_TIMEOUT_S
        while (processes := self._find_processes(record)) and time.monotonic() < deadline:
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _find_processes(self, record: LaunchRecord) -> list[psutil.Process]:
        owner = self.owner(record)
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # ended, or another user's
                if process.environ().get(OWNER_VARIABLE) == owner:
                    processes.append(process)
        return processes

    async def record_lost_exit(self, record: LaunchRecord) -> ProcessStatus:
        """Record the exit of an attempt whose monitor did not, because it was killed or never ran.

        Raises:
            LaunchError: The folder cannot be locked.
        """
        async with self._folder.locked():
            status = self._folder.read_status(record)
            if status is not None and status.exited_at is not None:
                return status
            if status is None:
                reason = "its launcher was killed before it could start it, or its status was lost"
                status = ProcessStatus(attempt=record.attempt, monitor_pid=0, pid=0)
            else:
                reason = "its monitor was killed, or the machine restarted"
            await self.kill_processes(record)
            status.kill_reason = status.kill_reason or reason
            status.exited_at = time.time()
            if self._folder.read_record(record.name) == record:
                with contextlib.suppress(OSError):  # a full disk; the next list tries again
                    self._folder.write_status(record.name, status)
            return status


@contextlib.contextmanager
def _open_pidfd(pid: int) -> Iterator[int | None]:
    """Open a descriptor of a process, or yield None on systems without them.

    Raises:
        ProcessLookupError: No such process exists.
    """
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
