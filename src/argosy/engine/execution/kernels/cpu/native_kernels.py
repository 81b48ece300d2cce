"""Loader of the C++ kernels in csrc/, which are built on first use, and the structures of their arguments."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import get_args

import structlog
import torch

from argosy.engine.execution.architectures.decoder import Activation
from argosy.engine.execution.kernels.cpu.isa import ISAS, TORCH_ISA_NAME, Isa, candidate_isas
from argosy.native import (
    LOAD_FAILURE_REMEDY,
    CompilerError,
    NativeUnavailableError,
    build_library,
    prebuild_library,
)

KERNEL_SOURCES = Path(__file__).parent / "csrc"
NO_THREAD_LIMIT = 2**31 - 1
COMPILER_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi")

log = structlog.get_logger(__name__)

_DTYPE_SUFFIXES = ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
"""Dtypes of the kernel variants, and the suffixes of their function names."""


class Kernels:
    """Loaded kernel library. Its functions do not check their arguments and run without the GIL.

    - `attention`, `attention_int8`: by the dtype of queries, take the address of an `AttentionCall`. The cache is in
      that dtype, or in bytes with scales.
    - `linear`: takes the address of a `LinearCall`.
    - `norm`, `delta_rule`, `lora`, `sample`, `logprobs`: by dtype, take the address of a `NormCall`, `DeltaRuleCall`,
      `LoraCall`, `SampleCall` or `LogprobCall`.
    - `gated_activation`: by activation and dtype, take the address of a `GatedActivationCall`.
    - `linear_packed_bytes`: maps (outs, cols) to the bytes of a packed weight.
    - `linear_pack`: takes (address of the weight, outs, cols, address of the packed weight, threads).
    - `limit_threads`: sets the number of threads that no kernel of this process exceeds.
    - `linear_int`: kernels of quantized weights by format.
    - `linear_group`: kernels of weights in groups by bits, 4 or 8.
    """

    def __init__(self, path: Path, isa: str) -> None:
        self.path = path
        self.isa = isa
        library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.attention = _by_dtype(library, "attention")
        self.attention_int8 = _by_dtype(library, "attention_int8")
        self.linear = _function(library, "argosy_linear", None, pointer)
        self.norm = _by_dtype(library, "norm")
        self.delta_rule = _by_dtype(library, "delta_rule")
        self.lora = _by_dtype(library, "lora")
        self.sample = _by_dtype(library, "sample")
        self.logprobs = _by_dtype(library, "logprobs")
        self.gated_activation: dict[Activation, dict[torch.dtype, Callable[..., int]]] = {
            activation: _by_dtype(library, activation) for activation in get_args(Activation)
        }
        self.linear_packed_bytes = _function(
            library, "argosy_linear_packed_bytes", size, size, size
        )
        self.linear_pack = _function(
            library, "argosy_linear_pack", None, pointer, size, size, pointer, size
        )
        self.limit_threads = _function(library, "argosy_limit_threads", None, size)
        self.linear_int = {name: IntKernels(library, name) for name in ("int8", "int4")}
        self.linear_group = {bits: GroupKernels(library, bits) for bits in (4, 8)}


class IntKernels:
    """Functions of linear_int.cpp for one format.

    - `packed_bytes`: maps (outs, cols) to the bytes of a packed weight.
    - `pack_by_dtype`: take (address of the weight, outs, cols, address of the packed weight, threads), and return
      whether all weights are finite.
    - `linear_by_dtype`: take the address of a `LinearCall`.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.packed_bytes = _function(
            library, f"argosy_linear_{name}_packed_bytes", size, size, size
        )
        self.pack_by_dtype = {
            dtype: _function(
                library,
                f"argosy_linear_{name}_pack_{suffix}",
                size,
                *(pointer, size, size, pointer, size),
            )
            for dtype, suffix in _DTYPE_SUFFIXES
        }
        self.linear_by_dtype = _by_dtype(library, f"linear_{name}")


class GroupKernels:
    """Functions of linear_group.cpp for weights of some bits.

    - `packed_bytes`: maps (outs, cols, group, whether there are offsets) to the bytes of a packed weight.
    - `pack`: takes (addresses of bytes, scales and offsets, outs, cols, group, address of the packed weight, threads).
    - `linear_by_dtype`: take the address of a `LinearGroupCall`.
    """

    def __init__(self, library: ctypes.CDLL, bits: int) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        name = f"argosy_linear_group{bits}"
        self.packed_bytes = _function(
            library, f"{name}_packed_bytes", size, *(size, size, size, size)
        )
        self.pack = _function(
            library,
            f"{name}_pack",
            None,
            *(pointer, pointer, pointer, size, size, size, pointer, size),
        )
        self.linear_by_dtype = _by_dtype(library, f"linear_group{bits}")


def _function(
    library: ctypes.CDLL, name: str, result: type[ctypes.c_int64] | None, *arguments: type
) -> Callable[..., int]:
    """Return a C function with declared types. If `result` is None, its return value is meaningless."""
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return function


def _by_dtype(library: ctypes.CDLL, name: str) -> dict[torch.dtype, Callable[..., int]]:
    """Return the variants by dtype of a function that takes the address of its argument structure."""
    return {
        dtype: _function(library, f"argosy_{name}_{suffix}", None, ctypes.c_void_p)
        for dtype, suffix in _DTYPE_SUFFIXES
    }


def load_kernels(
    compiler: str | None = None, folder: Path | None = None, isa: str | None = None
) -> Kernels:
    """Load the kernels for this CPU, and build them if no earlier process has. Safe for concurrent processes.

    Args:
        compiler: Name or path. None tries $CXX, or c++, g++ and clang++ without it.
        folder: Folder of the builds. None is argosy/native in the user's cache directory.
        isa: Instruction set. None reads $ARGOSY_CPU_ISA, or takes the fastest one that CPU and compiler support.

    Raises:
        NativeUnavailableError: The kernels cannot be built or loaded.
        ValueError: This CPU does not support `isa`.
    """
    kernels = _load_or_reason(compiler, folder, tuple(candidate_isas(isa)))
    if isinstance(kernels, str):
        raise NativeUnavailableError(kernels)
    return kernels


def prebuild_kernels(folder: Path) -> dict[str, Path]:
    """Build the kernels for machines without a compiler, by the name of the instruction set.

    An instruction set that the compiler does not know is left out. So is one without a name that all CPUs share.

    Raises:
        NativeUnavailableError: There is no compiler, or the folder cannot be written.
    """
    built = {}
    for isa in ISAS:
        if "-march=native" in isa.compiler_flags:
            continue
        try:
            flags = (*COMPILER_FLAGS, *isa.compiler_flags)
            built[isa.name] = prebuild_library(KERNEL_SOURCES, flags, folder)
        except CompilerError as error:
            log.warning("kernel_build_failed", isa=isa.name, reason=str(error))
    return built


def active_kernels_name() -> str:
    """Return the instruction set of the kernels in use, or "torch" without native kernels."""
    try:
        return load_kernels().isa
    except NativeUnavailableError:
        return TORCH_ISA_NAME


def limit_kernel_threads(threads: int | None) -> None:
    """Let no native kernel in this process use more than `threads` threads. None removes the limit."""
    with contextlib.suppress(NativeUnavailableError):
        load_kernels().limit_threads(NO_THREAD_LIMIT if threads is None else threads)


@cache
def _load_or_reason(
    compiler: str | None, folder: Path | None, isas: tuple[Isa, ...]
) -> Kernels | str:
    """Return the kernels, or the reason why they are unavailable. Cached, because every layer calls it."""
    reason = "ARGOSY_CPU_ISA selects torch's operations; unset it to use the native kernels"
    for isa in isas:
        try:
            return _build_and_load(isa, compiler, folder)
        except CompilerError as error:
            reason = str(error)
            log.warning("kernel_build_failed", isa=isa.name, reason=reason)
        except NativeUnavailableError as error:
            return str(error)
    return reason


def _build_and_load(isa: Isa, compiler: str | None, folder: Path | None) -> Kernels:
    """Build the kernels if needed, and load them."""
    path = build_library(
        KERNEL_SOURCES,
        (*COMPILER_FLAGS, *isa.compiler_flags),
        compiler=compiler,
        build_folder=folder,
    )
    try:
        return Kernels(path, isa.name)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(
            f"{path} does not load ({error}); {LOAD_FAILURE_REMEDY}"
        ) from error


def _fields(pointers: str, sizes: str, floats: str = "") -> list[tuple[str, type]]:
    """Return the fields of a structure: addresses, sizes in elements and other integers, and float32 numbers."""
    kinds = ((pointers, ctypes.c_void_p), (sizes, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class AttentionCall(ctypes.Structure):
    """Arguments of an attention call (`ArgosyAttention` in attention_call.h)."""

    _fields_ = _fields(
        "q k v cos sin sinks out keys values positions slot_mapping query_start_loc seq_lens block_table",
        "tokens sequences block_table_stride q_stride k_stride v_stride heads kv_heads head_dim value_dim "
        "block_size rotary_dim window threads",
        "scale softcap",
    )


class LinearCall(ctypes.Structure):
    """Arguments of a linear call (`ArgosyLinear` in linear_call.h)."""

    _fields_ = _fields("x packed bias out", "rows cols outs x_stride threads")


class LinearGroupCall(LinearCall):
    """Arguments of a linear call with a grouped weight (`ArgosyLinearGroup` in linear_call.h)."""

    _fields_ = _fields("table", "group has_offsets")


class NormCall(ctypes.Structure):
    """Arguments of a norm call (`ArgosyNorm` in elementwise.cpp)."""

    _fields_ = _fields(
        "x delta weight out",
        "outer_size inner_size size x_stride round_before_weight threads",
        "eps",
    )


class GatedActivationCall(ctypes.Structure):
    """Arguments of a gated activation call (`ArgosyGatedActivation` in elementwise.cpp)."""

    _fields_ = _fields("x out", "rows size threads")


class DeltaRuleCall(ctypes.Structure):
    """Arguments of a call of the gated delta rule (`ArgosyDeltaRule` in delta_rule.cpp)."""

    _fields_ = _fields(
        "qkv factors conv decay_rate decay_bias states mixed scratch out rows positions save_slots query_start_loc",
        "tokens sequences qkv_stride state_stride key_heads value_heads key_dim value_dim width threads",
    )


class LoraWeights(ctypes.Structure):
    """Packed adapter of a linear layer (`ArgosyLoraWeights` in lora.cpp)."""

    _fields_ = _fields("a b gain offset runs", "ranks num_runs")


class LoraCall(ctypes.Structure):
    """Arguments of a call for the adapters of a linear layer (`ArgosyLora` in lora.cpp)."""

    _fields_ = _fields(
        "x out rows starts weights", "segments weights_stride cols outs x_stride threads"
    )


class SampleCall(ctypes.Structure):
    """Arguments of a sampling call (`ArgosySample` in sampling.cpp)."""

    _fields_ = _fields(
        "logits logit_scale top_k top_p log2_min_p random_values tokens",
        "rows vocab stride threads",
    )


class LogprobCall(ctypes.Structure):
    """Arguments of a log-probability call (`ArgosyLogprobs` in sampling.cpp)."""

    _fields_ = _fields(
        "logits logit_rows tokens top_counts ranks weight_sums token_logits largest top_ids top_logits",
        "rows vocab stride max_top threads",
    )
