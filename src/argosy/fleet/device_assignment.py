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
_MAX_UUID_BYTES = 96
_DEVICE_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Replicas that are started alike."""

    num_replicas: int
    accelerators: int = 0
    """Number of GPUs that each has for itself. The launcher selects them."""
    shared_gpu: str | None = None
    """GPU that they share, in the syntax of `CUDA_VISIBLE_DEVICES`. None if they have their own, or run on the CPU."""

    @property
    def colocated_replicas(self) -> int:
        """Number of other replicas of the group on the device of each, which share its memory and cores."""
        return 0 if self.accelerators else self.num_replicas - 1


def group_replicas(
    num_replicas: int, gpus: Sequence[str], sharing: GpuSharing
) -> list[ReplicaGroup]:
    """Divide replicas into groups by their devices: one group if each has its own GPU, or else one for each GPU.

    `gpus` are the usable GPUs; empty for the CPU. `sharing` says whether several replicas may share one.

    Raises:
        ValueError: `sharing` is `own` and there are more replicas than GPUs.
    """
    if not gpus or num_replicas <= len(gpus):
        return [ReplicaGroup(num_replicas, accelerators=min(1, len(gpus)))]
    if sharing == "own":
        message = f"{num_replicas} replicas need as many GPUs, but {len(gpus)} can be used ({', '.join(gpus)})"
        raise ValueError(
            f"{message}; start at most {len(gpus)}, or let them share with --gpus shared"
        )
    return [
        ReplicaGroup(len(range(number, num_replicas, len(gpus))), shared_gpu=gpu)
        for number, gpu in enumerate(gpus)
    ]


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
    """
    count = count_gpus()
    visible = environment.get(VISIBLE_DEVICES_VARIABLE)
    if visible is None:
        return tuple(map(str, range(count)))

    def is_valid(name: str) -> bool:
        has_valid_syntax = _DEVICE_NAME.fullmatch(name) is not None
        return has_valid_syntax and (not name.isdigit() or int(name) < count)

    return tuple(takewhile(is_valid, map(str.strip, visible.split(","))))


def count_installed_gpus() -> int:
    """Return the number of GPUs that the driver reports, or 0 without a driver."""
    return len(read_gpu_uuids())


def read_gpu_uuids(library: str = NVML_LIBRARY) -> list[str]:
    """Return the UUIDs of the installed GPUs in the driver's order; empty where one cannot be read."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    uuids: list[str] = []
    count, device = ctypes.c_uint(0), ctypes.c_void_p()
    text = ctypes.create_string_buffer(_MAX_UUID_BYTES)
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        for index in range(count.value):
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) or (
                nvml.nvmlDeviceGetUUID(device, text, _MAX_UUID_BYTES)
            )
            uuids.append("" if failed else text.value.decode())
    finally:
        nvml.nvmlShutdown()
    return uuids


def _is_torch_built_with_cuda() -> bool:
    """Return whether the installed torch was built for CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
