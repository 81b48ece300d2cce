"""Folder with the state of the replicas on one machine, which outlives the processes that use it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from argosy.fleet.launchers.launcher import (
    MAX_KEPT_LOGS,
    LaunchedReplica,
    LaunchError,
    ReplicaIdentity,
    describe_exit,
    refuse_stale_epoch,
)
from argosy.folders import replace_file
from argosy.policy.reconciliation import LaunchState
from argosy.process import MAX_SOCKET_PATH_BYTES, create_socket_folder, format_os_error
from argosy.process_monitor import ProcessStatus

LOCK_TIMEOUT_S = 10.0
LOCK_RETRY_INTERVAL_S = 0.005
MAX_KEPT_LOG_BYTES = 256 * 1024 * 1024
"""Size of the logs of all removed replicas together."""
_EPOCH_BYTES = 20


class LaunchRecord(ReplicaIdentity, frozen=True, kw_only=True):
    """Decisions of the launcher about the latest attempt of a replica. Contains no environment, thus no secrets."""

    attempt: int
    started_at: float
    """Seconds since the epoch."""
    url: str | None
    port: int | None
    socket: str | None
    gpus: tuple[str, ...]
    """GPUs of its own, in the syntax of `CUDA_VISIBLE_DEVICES`."""
    cpus: tuple[int, ...]
    """CPUs to which it is pinned; empty for all."""


class ReplicaFolder:
    """Records, statuses, locks and logs of replicas, and the highest epoch seen.

    A lock file for each replica shows whether it runs. The monitor inherits the lock from the launcher, and the
    operating system releases it when the monitor ends. Neither a killed launcher nor a reused pid can mislead.

    Raises:
        OSError: The folder cannot be created, or belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._replicas = self.path / "replicas"
        self._logs = self.path / "logs"
        for folder in (self.path, self._replicas, self._logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.path} belongs to another user; choose another folder")
        self.path.chmod(0o700)

    # --- locks -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def locked(self, epoch: int | None = None) -> AsyncIterator[None]:
        """Exclude all other actions in this folder, also those of other processes.

        Args:
            epoch: Epoch of the action; None for one that repairs.

        Raises:
            LaunchError: The lock cannot be acquired.
            StaleEpochError: The folder has seen a higher epoch.
        """
        lock_path = self.path / "lock"
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(format_os_error(error)) from error
        try:
            await self._wait_for_lock(lock)
            if epoch is not None:
                _check_epoch(lock, epoch)
            yield
        finally:
            os.close(lock)

    async def _wait_for_lock(self, lock: int) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"another process has held the lock of {self.path} for {LOCK_TIMEOUT_S:g} s; "
                    "it may be stopped: find it with `lslocks` and continue or kill it"
                )
            await asyncio.sleep(LOCK_RETRY_INTERVAL_S)

    def is_running(self, name: str) -> bool:
        """Return whether a monitor of the replica runs, or is being started."""
        try:
            lock = os.open(self._run_lock_path(name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not _try_lock(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)

    def lock_run(self, name: str) -> int:
        """Return the descriptor of the lock of a replica that does not run. The folder must be locked.

        Raises:
            OSError: The file cannot be opened.
        """
        self._replica(name).mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self._run_lock_path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits only for `is_running` of other processes
        return lock

    # --- records ---------------------------------------------------------------------------------

    def read_records(self) -> dict[str, LaunchRecord]:
        """Return the records of all replicas by name."""
        records = map(self.read_record, sorted(os.listdir(self._replicas)))  # noqa: PTH208 - only names
        return {record.name: record for record in records if record is not None}

    def read_record(self, name: str) -> LaunchRecord | None:
        """Return the record of a replica, or None if it was never started.

        Raises:
            LaunchError: The record is damaged.
        """
        path = self._record_path(name)
        try:
            return msgspec.json.decode(path.read_bytes(), type=LaunchRecord)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise LaunchError(
                f"{path} is damaged ({error}); end the replica's processes, then remove {path.parent}"
            ) from error

    def write_record(self, record: LaunchRecord) -> None:
        """Write the record of a replica. The folder must be locked.

        Raises:
            OSError: It cannot be written. The old one stays.
        """
        replace_file(self._record_path(record.name), msgspec.json.encode(record))

    def restore_record(self, name: str, record: LaunchRecord | None) -> None:
        """Write back the record that preceded a failed start. The folder must be locked."""
        with contextlib.suppress(OSError):
            if record is None:
                self._remove_replica(name)
            else:
                self.write_record(record)

    def read_status(self, record: LaunchRecord) -> ProcessStatus | None:
        """Return the status that the monitor of the record's attempt wrote, or None if it wrote none.

        None stands for a damaged file as well, which a machine that lost its power may leave.
        """
        try:
            content = self.status_path(record.name).read_bytes()
            status = msgspec.json.decode(content, type=ProcessStatus)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return status if status.attempt == record.attempt else None

    def write_status(self, name: str, status: ProcessStatus) -> None:
        """Write the status in place of a monitor that does not run. The folder must be locked.

        Raises:
            OSError: It cannot be written. The old one stays.
        """
        replace_file(self.status_path(name), msgspec.json.encode(status))

    def remove(self, record: LaunchRecord) -> None:
        """Remove all of a replica that does not run except its logs. The folder must be locked.

        Raises:
            OSError: The record cannot be removed.
        """
        self._remove_replica(record.name)
        if record.socket is not None:
            self._remove_socket(Path(record.socket))
        self._prune_logs()

    def _remove_replica(self, name: str) -> None:
        self._record_path(name).unlink(
            missing_ok=True
        )  # first, because it decides whether there is a replica
        shutil.rmtree(self._replica(name), ignore_errors=True)

    # --- other files -----------------------------------------------------------------------------

    def status_path(self, name: str) -> Path:
        """Return the path of the file in which the monitor keeps the status."""
        return self._replica(name) / "status.json"

    def log_path(self, name: str) -> Path:
        """Return the path of the replica's log."""
        return self._logs / f"{name}.log"

    def list_logs(self) -> list[str]:
        """Return the names of the replicas that have logs, also of removed ones."""
        return sorted(log.stem for log in self._logs.glob("*.log"))

    def prepare_socket(self, name: str, previous: LaunchRecord | None) -> Path:
        """Return the path of the replica's Unix socket, at which no file is left.

        It is the same for all attempts. If the path in this folder is too long for a socket, it is in a folder for
        temporary files.

        Raises:
            OSError: The file of the last attempt cannot be removed, or no folder can be created.
        """
        path = self.path / f"{name}.sock"
        if previous is not None and previous.socket is not None:
            path = Path(previous.socket)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES or not path.parent.is_dir():
            return create_socket_folder("argosy-replica-", len("http.sock")) / "http.sock"
        path.unlink(missing_ok=True)
        return path

    def _remove_socket(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if path.parent != self.path:
                path.parent.rmdir()

    def _prune_logs(self) -> None:
        """Remove the oldest logs of removed replicas, beyond a number and a size of all together."""
        names: Mapping[str, object] = self.read_records()
        logs = [log for log in self._logs.glob("*.log") if log.stem not in names]
        kept_bytes = 0
        with contextlib.suppress(OSError):
            logs.sort(key=lambda log: log.stat().st_mtime, reverse=True)
            for number, log in enumerate(logs):
                older = log.with_name(f"{log.name}.1")
                kept_bytes += log.stat().st_size + (older.stat().st_size if older.exists() else 0)
                if number >= MAX_KEPT_LOGS or kept_bytes > MAX_KEPT_LOG_BYTES:
                    log.unlink()
                    older.unlink(missing_ok=True)

    def _replica(self, name: str) -> Path:
        return self._replicas / name

    def _record_path(self, name: str) -> Path:
        return self._replica(name) / "record.json"

    def _run_lock_path(self, name: str) -> Path:
        return self._replica(name) / "run.lock"


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_epoch(lock: int, epoch: int) -> None:
    """Compare an epoch with the highest one, which the lock file contains, and store it there if it is higher."""
    highest = int(os.pread(lock, _EPOCH_BYTES, 0) or b"0")
    refuse_stale_epoch(epoch, highest)
    if epoch > highest:
        try:
            # One write of constant length, so that a killed process leaves the old or the new epoch.
            os.pwrite(lock, b"%0*d" % (_EPOCH_BYTES, epoch), 0)
        except OSError as error:
            raise LaunchError(f"the epoch cannot be stored: {format_os_error(error)}") from error


def socket_url(path: str) -> str:
    """Return the URL of a server at a Unix socket."""
    return f"unix://{quote(path)}"


def describe_replica(record: LaunchRecord, status: ProcessStatus | None) -> LaunchedReplica:
    """Return the state of a replica. Without a status its monitor is being started."""
    replica = LaunchedReplica(
        **record.identity,
        state=LaunchState.RUNNING,
        url=record.url,
        own_url=None if record.socket is None else socket_url(record.socket),
        node=socket.gethostname(),
        attempt=record.attempt,
        started_at=record.started_at,
    )
    if status is None:
        return replica
    replica = msgspec.structs.replace(
        replica,
        state=LaunchState.DRAINING if status.is_draining else LaunchState.RUNNING,
        activity=status.activity,
        progress=status.progress,
        has_reported_ready=status.is_serving,
        start_error=status.error,
    )
    if status.exited_at is None:
        return replica
    return msgspec.structs.replace(
        replica,
        state=LaunchState.EXITED,
        reason=_exit_reason(status),
        exited_at=status.exited_at,
        exit_status=status.exit_status,
        ran_out_of_memory=status.ran_out_of_memory,
    )


def _exit_reason(status: ProcessStatus) -> str:
    """Return why the process exited, with its last output if nothing better explains a failure."""
    if status.kill_reason:
        return status.kill_reason
    if status.is_draining and not status.error:
        return "it was drained"
    has_failed = not status.error and (status.exit_status or 0) > 0
    output = f"; its last output: {status.last_output}" if has_failed and status.last_output else ""
    reason = describe_exit(
        status.exit_status, error=status.error, ran_out_of_memory=status.ran_out_of_memory
    )
    return reason + output
