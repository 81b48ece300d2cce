"""Which replica computes where: what CUDA would show, counted without it, and one GPU for each replica."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.fleet import DeviceAssignment, assign_devices, usable_gpus
from argosy.fleet.device_assignment import count_installed_gpus, visible_gpus


@pytest.mark.parametrize(
    ("told", "seen"),
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
def test_what_is_seen_is_what_cuda_shows(told: str | None, seen: tuple[str, ...]) -> None:
    environment = {} if told is None else {"CUDA_VISIBLE_DEVICES": told}
    assert visible_gpus(environment, lambda: 4) == seen


NVML = """
static int ready;
int nvmlInit_v2(void) { ready = 1; return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return ready ? COUNT : 1; }
int nvmlShutdown(void) { ready = 0; return 0; }
"""


@pytest.mark.parametrize(("init", "count", "gpus"), [(0, 0, 3), (9, 0, 0), (0, 999, 0)])
def test_the_driver_says_how_many_there_are(
    tmp_path: Path, init: int, count: int, gpus: int
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(NVML)
    defined = [f"-DINIT={init}", f"-DCOUNT={count}"]
    subprocess.run([compiler, "-shared", "-fPIC", *defined, "-o", library, source], check=True)
    assert count_installed_gpus(str(library)) == gpus


def test_without_a_driver_there_are_none() -> None:
    assert count_installed_gpus("libno-such-driver.so.1") == 0


def test_replicas_that_compute_on_the_cpu_take_none() -> None:
    assert usable_gpus("cpu", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == ()
    assert usable_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == ("GPU-1",)


def test_each_replica_has_a_gpu_of_its_own() -> None:
    assert assign_devices(2, ["4", "5", "6"], "own") == [
        DeviceAssignment("4", 0),
        DeviceAssignment("5", 0),
    ]
    with pytest.raises(ValueError, match="start at most 2, or let them share with --gpus shared"):
        assign_devices(3, ["0", "1"], "own")


@given(replicas=st.integers(1, 20), count=st.integers(0, 8))
def test_those_that_share_divide_evenly_and_know_it(replicas: int, count: int) -> None:
    found = assign_devices(replicas, [str(number) for number in range(count)], "shared")
    assert len(found) == replicas
    for place in found:
        together = [other for other in found if other.gpu == place.gpu]
        assert place.colocated_replicas == len(together) - 1
        assert len(together) <= -(-replicas // max(1, count))
