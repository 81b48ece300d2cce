"""Assignment of replicas to GPUs. Runs before replicas start, and loads neither torch nor CUDA."""

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
"""Whether each replica has its own GPU, or several replicas may share a GPU."""

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
NVML_LIBRARY = "libnvidia-ml.so.1"
_DEVICE_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Device of one replica."""

    gpu: str | None
    """GPU in the syntax of `CUDA_VISIBLE_DEVICES`, or None for the CPU or the device in the replica's settings."""
    colocated_replicas: int
    """Number of other replicas on the same device, which share its memory and cores."""


def assign_devices(
    num_replicas: int, gpus: Sequence[str], sharing: GpuSharing
) -> list[DeviceAssignment]:
    """Assign a device to each replica, round robin.

    Args:
        num_replicas: Number of replicas.
        gpus: Usable GPUs; empty for the CPU.
        sharing: Whether several replicas may share a GPU.

    Raises:
        ValueError: `sharing` is `own` and there are more replicas than GPUs.
    """
    if not gpus:
        return [DeviceAssignment(None, num_replicas - 1)] * num_replicas
    if num_replicas > len(gpus) and sharing == "own":
        message = f"{num_replicas} replicas need as many GPUs, but {len(gpus)} can be used ({', '.join(gpus)})"
        raise ValueError(
            f"{message}; start at most {len(gpus)}, or let them share with --gpus shared"
        )
    assigned = [gpus[number % len(gpus)] for number in range(num_replicas)]
    return [DeviceAssignment(gpu, assigned.count(gpu) - 1) for gpu in assigned]


def usable_gpus(
    device: Literal["auto", "cpu", "cuda"], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the GPUs that a replica with this `device` setting may use, in the syntax of `CUDA_VISIBLE_DEVICES`."""
    if device == "cpu" or (device == "auto" and not _is_torch_built_with_cuda()):
        return ()
    return visible_gpus(environment, count_installed_gpus)


def visible_gpus(environment: Mapping[str, str], count_gpus: Callable[[], int]) -> tuple[str, ...]:
    """Return the GPUs that CUDA shows to a process with this environment, in its order.

    CUDA ignores the names after the first invalid name (CUDA programming guide, "CUDA environment variables").

    Args:
        environment: Environment variables.
        count_gpus: Returns the number of installed GPUs.
    """
    count = count_gpus()
    visible = environment.get(VISIBLE_DEVICES_VARIABLE)
    if visible is None:
        return tuple(map(str, range(count)))

    def is_valid(name: str) -> bool:
        has_valid_syntax = _DEVICE_NAME.fullmatch(name) is not None
        return has_valid_syntax and (not name.isdigit() or int(name) < count)

    return tuple(takewhile(is_valid, map(str.strip, visible.split(","))))


def count_installed_gpus(library: str = NVML_LIBRARY) -> int:
    """Return the number of GPUs that the driver reports, or 0 without a driver."""
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
    """Return whether the installed torch was built for CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
