"""Device of a GPU with Triton kernels, and with what belongs to CUDA in a subclass: memory, events and graphs."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self, cast

import msgspec
import structlog
import torch
import triton
from torch import Tensor

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture, MoeArchitecture
from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedSource,
    quantize_to_groups,
)
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import KvCacheShape, RowAdapters
from argosy.engine.execution.kernels.device import Device, DeviceAdapter, DeviceEvent
from argosy.engine.execution.kernels.gpu.attention import TritonAttention
from argosy.engine.execution.kernels.gpu.delta_rule import TritonDeltaRule
from argosy.engine.execution.kernels.gpu.elementwise import TritonElementwiseOps
from argosy.engine.execution.kernels.gpu.experts import (
    create_gpu_experts,
    create_gpu_head_linears,
    select_experts,
)
from argosy.engine.execution.kernels.gpu.latent_attention import TritonLatentAttention
from argosy.engine.execution.kernels.gpu.linear import create_gpu_group_linear, create_gpu_linear
from argosy.engine.execution.kernels.gpu.logit_edits import TritonLogitSampler
from argosy.engine.execution.kernels.gpu.lora import (
    GpuAdapter,
    GpuRowAdapters,
    create_gpu_adapter,
)
from argosy.engine.execution.kernels.operations import DeltaRule, DeltaRuleWeights, Experts
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider, pack_in_memory
from argosy.engine.execution.kernels.torch.logit_edits import LogitSampler
from argosy.engine.execution.kernels.torch.lora import AdapterWeights
from argosy.folders import cache_folder, replace_file

MEMORY_MARGIN_BYTES = 512 << 20
"""Memory kept free beside the largest step and the graphs, for tables that grow and kernels that are loaded later."""
MIN_CAPABILITY = (8, 0)
"""Compute capability of Ampere, the first generation with bfloat16 in its matrix unit."""
MIN_FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of Ada, the first generation with e4m3 in its matrix unit."""


class GpuDevice(Device):
    """Device of one GPU. Steps run in one stream, in the order of their launch, and copies of KV blocks in another."""

    default_dtype = torch.bfloat16
    elementwise_ops = TritonElementwiseOps()
    normalizes_heads = True
    max_steps_in_flight = 1
    ridge_tokens = 256
    """Hopper computes 206 (H200) to 295 (H100) bfloat16 multiplications while it reads one weight."""
    warmup_sizes = (
        *(1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257),
        *(512, 1024, 2048, 4096, 8192),  # of which each expert computes a sixteenth, for example
    )
    """Sizes for every tile of the kernels. Multiples of 16 and other sizes are compiled separately."""
    mask_threads = 4
    """The GPU leaves most CPUs idle."""
    kv_memory_fraction = 0.95
    """Fraction of the memory left by weights and the largest step. The rest covers fragmentation and unforeseen use."""
    compute_capability: tuple[int, int]
    """CUDA compute capability."""
    num_multiprocessors: int

    @abstractmethod
    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work`, wait for it, and return the largest number of bytes that it needed at once.

        These include graphs that what it returns owns, which is dropped afterwards.
        """

    @abstractmethod
    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor of the same shape and dtype in pinned host memory."""

    @property
    def computes_float8(self) -> bool:  # type: ignore[override]  # depends on the GPU
        return self.compute_capability >= MIN_FLOAT8_CAPABILITY

    @property
    def kernel_compiler(self) -> str:
        return f"triton {triton.__version__}"

    def instruction_set(self, dtype: torch.dtype, weight_format: WeightFormat | None) -> str:
        """Return the compute capability, since the order of all sums depends on nothing else of the GPU."""
        del dtype, weight_format
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        """Return the bytes for activations and graphs. They are measured once per key, and later read from disk."""
        graphs = "without graphs" if self.capture_graph is None else "with graphs"
        full_key = f"{key} {self.name} torch {torch.__version__} {graphs}"
        peak = read_memory_profile(full_key)
        if peak is None:
            peak = self.measure_peak_bytes(run_largest_step)
            write_memory_profile(full_key, peak)
        return peak + MEMORY_MARGIN_BYTES

    def weight_layout_id(self, dtype: torch.dtype) -> str:
        """Return "", because the device packs weights itself."""
        del dtype
        return ""

    def create_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: WeightFormat | None = None,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> Callable[[Tensor], Tensor]:
        del get_packed
        if weight_format in ("int8", "int4"):
            grouped = quantize_to_groups(weight, weight_format)
            return create_gpu_group_linear(grouped, bias, self.torch_device)
        if weight_format == "fp8":
            self._require_float8("quantize fp8")
        return create_gpu_linear(weight, bias, float8=weight_format == "fp8")

    def create_group_linear(
        self, source: GroupedSource, bias: Tensor | None, get_packed: PackedWeightProvider
    ) -> Callable[[Tensor], Tensor]:
        del get_packed
        return create_gpu_group_linear(source.read(), bias, self.torch_device)

    def create_head_linears(self, weights: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        return create_gpu_head_linears(weights)

    def create_experts(
        self,
        gate_up: Sequence[Callable[[Tensor], Tensor]],
        down: Sequence[Callable[[Tensor], Tensor]],
        activation: Callable[[Tensor], Tensor],
    ) -> Experts:
        return create_gpu_experts(gate_up, down, activation)

    def select_experts(
        self,
        logits: Tensor,
        correction: Tensor | None,
        architecture: MoeArchitecture,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        return select_experts(logits, correction, architecture, dtype)

    def create_attention(self, shape: KvCacheShape) -> Attention:
        if shape.dtype == torch.float8_e4m3fn:
            self._require_float8("kv_dtype fp8")
        attention_type = TritonAttention if shape.value_dim is None else TritonLatentAttention
        return attention_type(
            shape, device=self.torch_device, num_multiprocessors=self.num_multiprocessors
        )

    def create_delta_rule(
        self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights
    ) -> DeltaRule:
        return TritonDeltaRule(architecture, weights)

    def create_adapter(
        self, weights: AdapterWeights, num_linears: int, dtype: torch.dtype
    ) -> DeviceAdapter:
        del dtype
        return create_gpu_adapter(weights, num_linears, self.torch_device)

    def create_row_adapters(
        self, adapters: Sequence[DeviceAdapter], rows: Tensor, starts: Tensor, dtype: torch.dtype
    ) -> RowAdapters:
        del dtype
        return GpuRowAdapters(self, cast("Sequence[GpuAdapter]", adapters), rows, starts)

    def create_logit_sampler(self, rows: int, vocab_size: int) -> LogitSampler:
        return TritonLogitSampler(self, rows, vocab_size)

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy through pinned memory, which the allocator keeps until the copy is done."""
        pinned = self.empty_pinned_like(tensor).copy_(tensor)
        if out is not None:
            return out.copy_(pinned, non_blocking=True)
        return pinned.to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.empty_pinned_like(tensor).copy_(tensor, non_blocking=True)

    def _require_float8(self, setting: str) -> None:
        if not self.computes_float8:
            raise ValueError(
                f"{self.name} does not support float8; remove {setting}, "
                "or use a GPU of the Ada or Hopper generation or later"
            )


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
    """Device of one GPU, on torch's current stream and a stream for copies."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda ({torch.cuda.get_device_name(index)})"
        self.torch_device = torch.device("cuda", index)
        self.compute_capability = torch.cuda.get_device_capability(index)
        self.num_multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self.capture_graph = self._capture
        self._graph_pool = torch.cuda.graph_pool_handle()
        """Memory pool that all captured graphs share."""
        self._copy_stream = torch.cuda.Stream(index)

    def free_bytes(self) -> int:
        """Return the free bytes, including memory that torch has reserved but does not use."""
        free, _ = torch.cuda.mem_get_info(self.index)
        idle = self._reserved_bytes() - torch.cuda.memory_allocated(self.index)
        return free + idle

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.synchronize(self.index)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.index)
        free, reserved = torch.cuda.mem_get_info(self.index)[0], self._reserved_bytes()
        result = work()
        torch.cuda.synchronize(self.index)
        peak = torch.cuda.max_memory_reserved(self.index) - reserved
        # What the driver allocated for graphs and kernels is not in the allocator's statistics.
        taken = free - torch.cuda.mem_get_info(self.index)[0]
        outside = taken - (self._reserved_bytes() - reserved)
        del result
        gc.collect()
        torch.cuda.empty_cache()
        self._graph_pool = torch.cuda.graph_pool_handle()  # the graphs of the old pool are gone
        return peak + max(0, outside)

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.index)

    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def record_event(self) -> DeviceEvent:
        return CudaEvent()

    def copy_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copy_stream)

    def allocate_host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Pin pageable memory, since the allocator of pinned memory rounds sizes up to a power of two."""
        memory = torch.empty(shape, dtype=torch.uint8)
        if memory.nbytes:
            runtime, address = torch.cuda.cudart(), memory.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
            weakref.finalize(memory, runtime.cudaHostUnregister, address)
        return memory

    def _capture(self, work: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class CudaEvent:
    """CUDA event in the stream that is current when it is made, with timing."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self._event.wait()

    def seconds_since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000.0


log = structlog.get_logger(__name__)


class MemoryProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a profile file."""

    key: str
    """Measured configuration: device, model, formats and limits."""
    working_bytes: int
    """Bytes that the largest step allocates."""


def read_memory_profile(key: str) -> int | None:
    """Return the bytes measured for `key`, or None if no readable profile exists."""
    try:
        profile = msgspec.json.decode(_profile_path(key).read_bytes(), type=MemoryProfile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("memory_profile_unreadable", key=key, reason=str(error))
        return None
    return profile.working_bytes if profile.key == key and profile.working_bytes > 0 else None


def write_memory_profile(key: str, working_bytes: int) -> None:
    """Save the bytes measured for `key`. If this fails, the next start measures again."""
    try:
        path = _profile_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(MemoryProfile(key, working_bytes)))
    except OSError as error:
        log.warning("memory_profile_not_saved", reason=str(error))


def _profile_path(key: str) -> Path:
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return cache_folder() / "memory" / f"{name}.json"
