"""CUDA through torch: finds the GPU, says what to do where there is none, and is the device's runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from argosy.engine.execution.gpu.device import MIN_CAPABILITY, GpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.device import CapturedGraph, Device, DeviceEvent


def create_cuda_device(index: int = 0) -> Device:
    """The GPU `index` of those that this process may see. ValueError, with the remedy: there is none."""
    if torch.version.cuda is None:
        raise ValueError(
            f"this torch ({torch.__version__}) is built without CUDA; install a CUDA build of the "
            "same version, or set device to cpu"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or set device to cpu"
        )
    torch.cuda.set_device(index)
    runtime = CudaRuntime(index)
    if runtime.compute_capability < MIN_CAPABILITY:
        raise ValueError(
            f"{runtime.name} has no bfloat16; take a GPU of the Ampere generation or later, "
            "or set device to cpu"
        )
    return GpuDevice(runtime)


class CudaRuntime:
    """The `Runtime` of one GPU, on torch's current stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._graph_pool = torch.cuda.graph_pool_handle()
        """The memory that all recorded graphs share."""

    @property
    def name(self) -> str:
        """See `Runtime`."""
        return f"cuda ({torch.cuda.get_device_name(self.index)})"

    @property
    def torch_device(self) -> torch.device:
        """See `Runtime`."""
        return torch.device("cuda", self.index)

    @property
    def compute_capability(self) -> tuple[int, int]:
        """See `Runtime`."""
        return torch.cuda.get_device_capability(self.index)

    @property
    def num_multiprocessors(self) -> int:
        """See `Runtime`."""
        return torch.cuda.get_device_properties(self.index).multi_processor_count

    def free_bytes(self) -> int:
        """See `Runtime`. What torch has reserved and does not use counts as free."""
        free, _ = torch.cuda.mem_get_info(self.index)
        idle = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return free + idle

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """See `Runtime`."""
        torch.cuda.synchronize(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        before = torch.cuda.memory_allocated(self.index)
        work()
        torch.cuda.synchronize(self.index)
        peak = torch.cuda.max_memory_allocated(self.index) - before
        torch.cuda.empty_cache()
        return peak

    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        """See `Runtime`."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def record_event(self) -> DeviceEvent:
        """See `Runtime`."""
        return CudaEvent()

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            work()
        return graph


class CudaEvent:
    """A point in the current stream, with the time at which the GPU passed it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def synchronize(self) -> None:
        """See `Event`."""
        self._event.synchronize()

    def seconds_since(self, earlier: Self) -> float:
        """See `Event`."""
        return float(earlier._event.elapsed_time(self._event)) / 1000.0
