"""Builds the C++ kernels of csrc/ with the system's compiler on first use, and loads them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from argosy.engine.execution.isa import TORCH_PATH, Isa, candidate_isas
from argosy.native import LOAD_FAILURE_REMEDY, CompilerError, NativeUnavailableError, build_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from argosy.engine.execution.model_architecture import Activation

KERNEL_SOURCES = Path(__file__).parent / "csrc"
COMPILER_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi")

log = structlog.get_logger(__name__)

_DTYPE_SUFFIXES = ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
"""The dtypes that functions come in, by the ends of their names."""


class Kernels:
    """The loaded library. Its functions trust their arguments and run without the GIL.

    attention_*, linear: take the address of an AttentionCall or LinearCall.
    norm: by dtype, takes the address of a NormCall.
    gate: by activation, then dtype; take the address of a GateCall.
    linear_bytes: (outs, cols) to the size of a packed weight.
    linear_pack: (weight's address, outs, cols, address of that many bytes, threads).
    linear_int: by format, what its integer weights need.
    """

    def __init__(self, path: Path, isa: str) -> None:
        self.path = path
        self.isa = isa
        library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.attention_float32 = _function(library, "argosy_attention_float32", None, pointer)
        self.attention_bfloat16 = _function(library, "argosy_attention_bfloat16", None, pointer)
        self.linear = _function(library, "argosy_linear", None, pointer)
        self.norm = _by_dtype(library, "norm")
        self.sample = _by_dtype(library, "draw")
        self.logprobs = _by_dtype(library, "tell")
        self.gated_activation: dict[Activation, dict[torch.dtype, Callable[..., int]]] = {
            "silu": _by_dtype(library, "silu"),
            "gelu_tanh": _by_dtype(library, "gelu_tanh"),
        }
        self.linear_packed_bytes = _function(library, "argosy_linear_bytes", size, size, size)
        self.linear_pack = _function(
            library, "argosy_linear_pack", None, pointer, size, size, pointer, size
        )
        self.linear_int = {name: IntKernels(library, name) for name in ("int8", "int4")}


class IntKernels:
    """The functions of linear_int.cpp for one format.

    size: (outs, cols) to the bytes of a packed weight.
    pack: by dtype: (weight's address, outs, cols, address to pack to, threads) to whether all is finite.
    compute: by dtype, takes the address of a LinearCall.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.packed_bytes = _function(library, f"argosy_linear_{name}_bytes", size, size, size)
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


def _function(
    library: ctypes.CDLL, name: str, result: type[ctypes.c_int64] | None, *arguments: type
) -> Callable[..., int]:
    """A C function with its types declared; one without a result returns nothing of use."""
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return function


def _by_dtype(library: ctypes.CDLL, name: str) -> dict[torch.dtype, Callable[..., int]]:
    """The variants of a function that takes the address of its call."""
    return {
        dtype: _function(library, f"argosy_{name}_{suffix}", None, ctypes.c_void_p)
        for dtype, suffix in _DTYPE_SUFFIXES
    }


def load_kernels(
    compiler: str | None = None, folder: Path | None = None, isa: str | None = None
) -> Kernels:
    """Load the kernels for this CPU, building them when no earlier process has.

    compiler: name or path; None takes $CXX, else c++, g++ or clang++.
    folder: where builds are kept; None takes argosy/native in the user's cache directory.
    isa: see isa.py; None takes $ARGOSY_CPU_ISA, else the fastest that CPU and compiler know.
    Safe with several processes at once. Raises NativeUnavailable, and ValueError for an `isa` that
    this CPU cannot run.
    """
    found = _load_or_reason(compiler, folder, tuple(candidate_isas(isa)))
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


def active_kernels_name() -> str:
    """The instruction set of the kernels that this process computes with, or "torch"."""
    try:
        return load_kernels().isa
    except NativeUnavailableError:
        return TORCH_PATH


@cache
def _load_or_reason(
    compiler: str | None, folder: Path | None, isas: tuple[Isa, ...]
) -> Kernels | str:
    """The kernels, or why there are none: asked once, since every layer asks."""
    reason = "torch's operations were asked for; unset ARGOSY_CPU_ISA to use the native kernels"
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
    """Build where needed, and load."""
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
