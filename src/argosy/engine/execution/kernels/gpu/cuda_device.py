"""Device of a CUDA GPU through torch: detection of a usable one, and its memory, events and graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from argosy.engine.execution.kernels.device import Device, DeviceEvent
from argosy.engine.execution.kernels.gpu.device import MIN_CAPABILITY, GpuDevice

DRIVER_LIBRARY = "libcuda.so.1"
"""Library that the NVIDIA driver installs."""


def create_cuda_device(index: int = 0) -> Device:
    """Return GPU number `index` of those visible to this process.

    Raises:
        ValueError: The machine has no NVIDIA driver, torch has no CUDA, no GPU is visible, or the GPU is too old.
    """
    if not _is_driver_installed():
        raise ValueError(
            "this machine has no NVIDIA driver, so no GPU can be used; choose --device cpu or auto, or install the "
            "driver of its GPU"
        )
    if torch.version.cuda is None:
        raise ValueError(
            f"torch {torch.__version__} is built without CUDA; install a CUDA build of the same "
            "version, or choose --device cpu or auto"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or choose --device cpu or auto"
        )
    torch.cuda.set_device(index)
    device = CudaDevice(index)
    if device.compute_capability < MIN_CAPABILITY:
        raise ValueError(
            f"{device.name} does not support bfloat16; use a GPU of the Ampere generation or later, "
            "or choose --device cpu or auto"
        )
    return device


def _is_driver_installed() -> bool:
    """Return whether the library of the NVIDIA driver can be loaded."""
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return False
    return True


class CudaDevice(GpuDevice):
    """Device of one GPU, on torch's current stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda ({torch.cuda.get_device_name(index)})"
        self.torch_device = torch.device("cuda", index)
        self.compute_capability = torch.cuda.get_device_capability(index)
        self.num_multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self.capture_graph = self._capture
        self._graph_pool = torch.cuda.graph_pool_handle()
        """Memory pool that all captured graphs share."""

    def free_bytes(self) -> int:
        """Return the free bytes, including memory that torch has reserved but does not use."""
        free, _ = torch.cuda.mem_get_info(self.index)
        idle = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return free + idle

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        before = torch.cuda.memory_allocated(self.index)
        work()
        torch.cuda.synchronize(self.index)
        peak = torch.cuda.max_memory_allocated(self.index) - before
        torch.cuda.empty_cache()
        return peak

    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def record_event(self) -> DeviceEvent:
        return CudaEvent()

    def _capture(self, work: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class CudaEvent:
    """CUDA event in the current stream, with timing."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000.0
