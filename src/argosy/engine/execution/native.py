"""Builds the C++ kernels of csrc/ with the system's compiler on first use, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from argosy.engine.execution.isa import TORCH, Isa, wanted_isas

if TYPE_CHECKING:
    from collections.abc import Callable

    from argosy.engine.execution.spec import Activation

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi")
BUILD_TIMEOUT_S = 120.0

log = structlog.get_logger(__name__)

_SUFFIXES = ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
"""The dtypes that functions come in, by the ends of their names."""


class NativeUnavailable(Exception):  # noqa: N818 - a state of the machine, with its remedy
    """The native kernels cannot be had here; the message says why, and what would help."""


class CompilerFailed(NativeUnavailable):
    """The compiler does not take these sources for this instruction set."""


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
        self.draw = _by_dtype(library, "draw")
        self.tell = _by_dtype(library, "tell")
        self.gate: dict[Activation, dict[torch.dtype, Callable[..., int]]] = {
            "silu": _by_dtype(library, "silu"),
            "gelu_tanh": _by_dtype(library, "gelu_tanh"),
        }
        self.linear_bytes = _function(library, "argosy_linear_bytes", size, size, size)
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
        self.size = _function(library, f"argosy_linear_{name}_bytes", size, size, size)
        self.pack = {
            dtype: _function(
                library,
                f"argosy_linear_{name}_pack_{suffix}",
                size,
                *(pointer, size, size, pointer, size),
            )
            for dtype, suffix in _SUFFIXES
        }
        self.compute = _by_dtype(library, f"linear_{name}")


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
        for dtype, suffix in _SUFFIXES
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
    found = _attempt(compiler, folder, tuple(wanted_isas(isa)))
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


def kernels_in_use() -> str:
    """The instruction set of the kernels that this process computes with, or "torch"."""
    try:
        return load_kernels().isa
    except NativeUnavailable:
        return TORCH


@cache
def _attempt(compiler: str | None, folder: Path | None, isas: tuple[Isa, ...]) -> Kernels | str:
    """The kernels, or why there are none: asked once, since every layer asks."""
    reason = "torch's operations were asked for; unset ARGOSY_CPU_ISA to use the native kernels"
    for isa in isas:
        try:
            return _load(_find_compiler(compiler), folder or _cache_folder(), isa)
        except CompilerFailed as error:
            reason = str(error)
            log.warning("kernels.build_failed", isa=isa.name, reason=reason)
        except NativeUnavailable as error:
            return str(error)
    return reason


def _load(program: str, folder: Path, isa: Isa) -> Kernels:
    """Build where needed, and load."""
    flags = (*FLAGS, *isa.flags)
    path = folder / _fingerprint(program, flags) / "kernels.so"
    if not path.exists():
        _build(program, flags, path)
    try:
        return Kernels(path, isa.name)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} does not load ({error}); delete it to rebuild") from error


def _find_compiler(compiler: str | None) -> str:
    """The compiler's path."""
    wanted = (compiler,) if compiler else (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    for name in wanted:
        program = shutil.which(name) if name else None
        if program:
            return program
    raise NativeUnavailable("no C++ compiler found; install g++, or set CXX to one")


def _cache_folder() -> Path:
    """Where builds are kept; a private temporary directory when the cache cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    folder = Path(base) / "argosy" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="argosy-native-"))


def _fingerprint(program: str, flags: tuple[str, ...]) -> str:
    """What a build depends on, hashed: sources, flags, compiler and the CPU's features."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((program, *flags, platform.machine(), _cpu_features())).encode())
    digest.update(_run(program, "--version").encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """The model and feature lines of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    first = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(x for x in first if x.startswith(("model name", "flags", "Features", "CPU")))


def _build(program: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile into a file of our own, then rename: other processes see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            built = Path(work) / path.name
            compile_one = partial(_compile, program, flags, Path(work))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
            _run(program, *flags, "-shared", *objects, "-o", str(built))
            built.replace(path)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write {path.parent} ({error}); make it writable"
        ) from error


def _compile(program: str, flags: tuple[str, ...], folder: Path, source: Path) -> str:
    """Compile one file; the object's path."""
    compiled = str(folder / f"{source.stem}.o")
    _run(program, *flags, "-c", str(source), "-o", compiled)
    return compiled


def _run(program: str, *arguments: str) -> str:
    """Run the compiler and return its output. Raises CompilerFailed with the end of its errors."""
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that the user has
            (program, *arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise CompilerFailed(f"{program} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{program} cannot be run: {error}") from error
    return done.stdout
