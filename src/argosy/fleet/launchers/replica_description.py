"""Description of a replica by its record and the status that its monitor wrote."""

from __future__ import annotations

import socket

import msgspec

from argosy.fleet.launchers.launcher import LaunchedReplica
from argosy.fleet.launchers.replica_folder import LaunchRecord
from argosy.policy import ProcessRun
from argosy.policy.reconciliation import LaunchState
from argosy.process_monitor import ProcessStatus


def describe_replica(record: LaunchRecord, status: ProcessStatus | None) -> LaunchedReplica:
    """Return the state of a replica. Without a status its monitor is being started."""
    replica = LaunchedReplica(
        name=record.name,
        pool=record.pool,
        generation=record.generation,
        ordinal=record.ordinal,
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
    run = ProcessRun(
        0.0,
        start_error=status.error,
        exit_status=status.exit_status,
        ran_out_of_memory=status.ran_out_of_memory,
    )
    has_failed = not status.error and (status.exit_status or 0) > 0
    output = f"; its last output: {status.last_output}" if has_failed and status.last_output else ""
    return run.exit_reason + output
