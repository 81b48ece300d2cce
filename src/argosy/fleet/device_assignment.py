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

Sharing = Literal["own", "shared"]
"""Each replica has a GPU of its own, or several may be on one."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVML = "libnvidia-ml.so.1"
_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica computes."""

    gpu: str | None
    """As `CUDA_VISIBLE_DEVICES` names it; None: on the CPU, or wherever its own settings say."""
    neighbours: int
    """Other replicas there: they divide it."""


def places(replicas: int, gpus: Sequence[str], sharing: Sharing) -> list[Place]:
    """One for each replica, round robin. Raises ValueError when there is not a GPU for each, and there should be."""
    if not gpus:
        return [Place(None, replicas - 1)] * replicas
    if replicas > len(gpus) and sharing == "own":
        message = f"{replicas} replicas need as many GPUs, and {len(gpus)} can be used ({', '.join(gpus)})"
        raise ValueError(
            f"{message}; start at most {len(gpus)}, or let them share with --gpus shared"
        )
    taken = [gpus[number % len(gpus)] for number in range(replicas)]
    return [Place(gpu, taken.count(gpu) - 1) for gpu in taken]


def usable_gpus(
    device: Literal["auto", "cpu", "cuda"], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """The GPUs that a replica with this setting may take, as `CUDA_VISIBLE_DEVICES` names them."""
    if device == "cpu" or (device == "auto" and not _torch_has_cuda()):
        return ()
    return visible_gpus(environment, installed_gpus)


def visible_gpus(environment: Mapping[str, str], installed: Callable[[], int]) -> tuple[str, ...]:
    """The GPUs that CUDA would show a process of this environment, in its order.

    As in CUDA's programming guide (section "CUDA environment variables"): those before the first name that is none.
    """
    count = installed()
    told = environment.get(VISIBLE)
    if told is None:
        return tuple(map(str, range(count)))

    def there(name: str) -> bool:
        known = _NAME.fullmatch(name) is not None
        return known and (not name.isdigit() or int(name) < count)

    return tuple(takewhile(there, map(str.strip, told.split(","))))


def installed_gpus(library: str = NVML) -> int:
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


def _torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
