"""Replicas on one machine: their devices and CPUs, and why one has exited."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.fleet import ReplicaGroup, group_replicas, usable_gpus
from argosy.fleet.device_assignment import visible_gpus
from argosy.fleet.launchers.local_start import choose_cpus
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
    ("variable", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2", ("2",)),
        ("3, 1", ("3", "1")),
        ("1,-1,2", ("1",)),
        ("0,7,1", ("0",)),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1", ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "1")),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    ],
)  # fmt: skip
def test_visible_gpus_follow_cuda_visible_devices(
    variable: str | None, visible: tuple[str, ...]
) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environment, lambda: 4) == visible


def test_cpu_replicas_use_no_gpu() -> None:
    assert usable_gpus("cpu", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == ()
    assert usable_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == ("GPU-1",)


def test_each_replica_gets_its_own_gpu() -> None:
    assert group_replicas(2, ["4", "5", "6"], "own") == [ReplicaGroup(2, accelerators=1)]
    with pytest.raises(ValueError, match="start at most 2, or let them share with --gpus shared"):
        group_replicas(3, ["0", "1"], "own")


@given(replicas=st.integers(1, 20), count=st.integers(0, 8))
def test_shared_gpus_are_divided_evenly(replicas: int, count: int) -> None:
    groups = group_replicas(replicas, [str(number) for number in range(count)], "shared")
    assert sum(group.num_replicas for group in groups) == replicas
    for group in groups:
        has_own_gpu = replicas <= count
        assert (group.accelerators == 1) == has_own_gpu
        assert (group.shared_gpu is None) == (has_own_gpu or not count)
        assert group.colocated_replicas == (0 if has_own_gpu else group.num_replicas - 1)
        assert has_own_gpu or group.num_replicas <= -(-replicas // max(1, count))


@pytest.mark.parametrize(
    ("cpus", "used", "chosen"),
    [
        (None, [], ()),
        (0.5, [], (2,)),
        (1.5, [2], (4, 6)),
        (2, [2, 4, 4, 6], (2, 6)),
        (64, [2], (2, 4, 6)),
    ],
)
def test_replica_is_pinned_to_least_used_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: float | None, used: list[int], chosen: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 4, 6})
    assert choose_cpus(cpus, used) == chosen


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
