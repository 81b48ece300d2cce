"""Count and identity of installed GPUs, as a driver library reports them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from argosy.fleet.device_assignment import read_gpu_uuids

NVML = """
#include <stdio.h>
static int ready;
int nvmlInit_v2(void) { ready = 1; return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return ready ? COUNT : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = (void *)(long)index; return !ready; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int size) {
    return snprintf(uuid, size, "GPU-%ld", (long)device) >= size || !ready;
}
int nvmlShutdown(void) { ready = 0; return 0; }
"""


@pytest.mark.parametrize(
    ("init_status", "count_status", "gpus"), [(0, 0, 3), (9, 0, 0), (0, 999, 0)]
)
def test_gpus_are_counted_by_the_driver(
    tmp_path: Path, init_status: int, count_status: int, gpus: int
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(NVML)
    macros = [f"-DINIT={init_status}", f"-DCOUNT={count_status}"]
    subprocess.run([compiler, "-shared", "-fPIC", *macros, "-o", library, source], check=True)
    assert read_gpu_uuids(str(library)) == ["GPU-0", "GPU-1", "GPU-2"][:gpus]


def test_no_gpus_without_a_driver() -> None:
    assert read_gpu_uuids("libno-such-driver.so.1") == []
