"""Device assignment: visible GPUs follow CUDA's rules, and each replica gets a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.fleet import ReplicaGroup, group_replicas, usable_gpus
from argosy.fleet.device_assignment import visible_gpus


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
