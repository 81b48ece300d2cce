"""Description of a replica that has exited."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.fleet.launchers.replica_folder import LaunchRecord, describe_replica
from argosy.process_monitor import ProcessStatus

RECORD = LaunchRecord(
    name="a-1-0",
    pool="a",
    generation=1,
    ordinal=0,
    attempt=1,
    started_at=0.0,
    url=None,
    port=None,
    socket=None,
    gpus=(),
    cpus=(),
)


@pytest.mark.parametrize(
    ("exit_", "reason"),
    [
        ({"exit_status": 3}, "it exited with status 3"),
        ({"exit_status": 3, "last_output": "no"}, "it exited with status 3; its last output: no"),
        ({"exit_status": 0}, "it exited with status 0"),
        ({"exit_status": -11}, "it crashed with SIGSEGV"),
        (
            {"exit_status": -9, "ran_out_of_memory": True},
            "the system killed it because memory ran out",
        ),
        ({"exit_status": -9}, "it was killed (SIGKILL), by a person or because memory ran out"),
        ({"exit_status": -15}, "it was killed (SIGTERM)"),
        ({"exit_status": -99}, "it was killed (signal 99)"),
        ({"exit_status": 1, "error": "no GPU"}, "it could not start: no GPU"),
        ({}, "it exited"),
    ],
)
def test_exit_reason_names_status_signal_or_error(exit_: dict[str, Any], reason: str) -> None:
    status = ProcessStatus(attempt=1, monitor_pid=2, pid=3, exited_at=1.0, **exit_)
    assert describe_replica(RECORD, status).reason == reason
