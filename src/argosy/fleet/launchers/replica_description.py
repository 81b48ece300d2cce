"""Description of a replica by its record and the status that its monitor wrote."""

from __future__ import annotations

import signal
import socket

import msgspec

from argosy.fleet.launchers.launcher import LaunchedReplica
from argosy.fleet.launchers.replica_folder import LaunchRecord
from argosy.policy.reconciliation import LaunchState
from argosy.process_monitor import ProcessStatus

_CRASH_SIGNALS = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS"})
"""Signals by which faulty code ends its own process."""


def describe_replica(record: LaunchRecord, status: ProcessStatus | None) -> LaunchedReplica:
    """Return the state of a replica. Without a status its monitor is being started."""
    replica = LaunchedReplica(
        **record.identity,
        state=LaunchState.RUNNING,
        url=record.url,
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


def describe_exit(code: int | None, *, error: str = "", ran_out_of_memory: bool = False) -> str:
    """Return why a process exited, as far as its own error and its exit status show.

    Args:
        code: Exit status, or the negative number of the signal that ended the process.
        error: Error that the process reported.
        ran_out_of_memory: Whether the system killed it for lack of memory.
    """
    if error:
        return f"it could not start: {error}"
    if code is None:
        return "it exited"
    if code >= 0:
        return f"it exited with status {code}"
    if -code == signal.SIGKILL:
        if ran_out_of_memory:
            return "the system killed it because memory ran out"
        return "it was killed (SIGKILL), by a person or because memory ran out"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it crashed with {name}" if name in _CRASH_SIGNALS else f"it was killed ({name})"
