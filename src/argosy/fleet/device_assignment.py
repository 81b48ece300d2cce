"""Which replica computes where on this machine. Nothing here loads torch or CUDA: it is done before replicas start."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

GpuSharing = Literal["own", "shared"]
"""Each replica has a GPU of its own, or several may be on one."""

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
NVML_LIBRARY = "libnvidia-ml.so.1"
_DEVICE_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Where a replica computes."""

    gpu: str | None
    """As `CUDA_VISIBLE_DEVICES` names it; None: on the CPU, or wherever its own settings say."""
    colocated_replicas: int
    """Other replicas there: they divide it."""


def assign_devices(
    num_replicas: int, gpus: Sequence[str], sharing: GpuSharing
) -> list[DeviceAssignment]:
    """One for each replica, round robin. Raises ValueError when there is not a GPU for each, and there should be."""
    if not gpus:
        return [DeviceAssignment(None, num_replicas - 1)] * num_replicas
    if num_replicas > len(gpus) and sharing == "own":
        message = f"{num_replicas} replicas need as many GPUs, and {len(gpus)} can be used ({', '.join(gpus)})"
        raise ValueError(
            f"{message}; start at most {len(gpus)}, or let them share with --gpus shared"
        )
    taken = [gpus[number % len(gpus)] for number in range(num_replicas)]
    return [DeviceAssignment(gpu, taken.count(gpu) - 1) for gpu in taken]


def usable_gpus(
    device: Literal["auto", "cpu", "cuda"], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """The GPUs that a replica with this setting may take, as `CUDA_VISIBLE_DEVICES` names them."""
    if device == "cpu" or (device == "auto" and not _is_torch_built_with_cuda()):
        return ()
    return visible_gpus(environment, count_installed_gpus)


def visible_gpus(environment: Mapping[str, str], count_gpus: Callable[[], int]) -> tuple[str, ...]:
    """The GPUs that CUDA would show a process of this environment, in its order.

    As in CUDA's programming guide (section "CUDA environment variables"): those before the first name that is none.
    """
    count = count_gpus()
    told = environment.get(VISIBLE_DEVICES_VARIABLE)
    if told is None:
        return tuple(map(str, range(count)))

    def there(name: str) -> bool:
        known = _DEVICE_NAME.fullmatch(name) is not None
        return known and (not name.isdigit() or int(name) < count)

    return tuple(takewhile(there, map(str.strip, told.split(","))))


def count_installed_gpus(library: str = NVML_LIBRARY) -> int:
    """How many GPUs the driver shows this process: 0 where there is no driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2():
        return 0
    try:
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    finally:
        nvml.nvmlShutdown()
    return 0 if failed else count.value


def _is_torch_built_with_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
