"""Which instructions the CPU kernels are compiled for: what this CPU has, unless the user says otherwise."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ISA_VARIABLE = "ARGOSY_CPU_ISA"
"""The environment variable that names the instruction set, for tests and for doubtful machines."""
TORCH_PATH = "torch"
"""The name that asks for torch's operations instead of the native kernels."""


@dataclass(frozen=True, slots=True)
class Isa:
    """One way to compile the kernels."""

    name: str
    required_features: frozenset[str]
    """Features of /proc/cpuinfo."""
    compiler_flags: tuple[str, ...]
    """For the compiler."""


_AVX2 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")

ISAS = (
    Isa("amx", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Isa("avx512_bf16", _BF16, _BF16_FLAGS),
    Isa("avx512", _AVX512, ("-march=x86-64-v4",)),
    Isa("avx2", _AVX2, ("-march=x86-64-v3",)),
    Isa("generic", frozenset(), () if platform.machine() == "x86_64" else ("-march=native",)),
)
"""The fastest first."""
EMULATED_AMX = Isa("amx_emulated", _AVX2, ("-march=x86-64-v3", "-DARGOSY_AMX_EMULATED"))
"""The code of "amx" with the matrix unit in software: to test it on any machine, not to serve."""

_CPUINFO_KEYS = ("flags", "Features")
"""How /proc/cpuinfo calls the list of features, on x86 and on ARM."""


def available_isas() -> list[Isa]:
    """What this CPU can run, the fastest first."""
    return [isa for isa in ISAS if isa.required_features <= cpu_features()]


def candidate_isas(name: str | None) -> list[Isa]:
    """What to try in order: the one of that name, or of $ARGOSY_CPU_ISA, else all that can run.

    Empty where torch is asked for. Raises ValueError for a name that this CPU cannot run.
    """
    name = name or os.environ.get(ISA_VARIABLE)
    if not name:
        return available_isas()
    if name == TORCH_PATH:
        return []
    runnable = {
        isa.name: isa
        for isa in (*available_isas(), EMULATED_AMX)
        if isa.required_features <= cpu_features()
    }
    if name not in runnable:
        known = {isa.name: isa for isa in (*ISAS, EMULATED_AMX)}
        lacking = sorted(known[name].required_features - cpu_features()) if name in known else []
        why = f"this CPU lacks {', '.join(lacking)}" if lacking else "there is no such path"
        choices = ", ".join((*runnable, TORCH_PATH))
        raise ValueError(
            f"{ISA_VARIABLE} is {name!r}, but {why}; unset it or choose one of {choices}"
        )
    return [runnable[name]]


@cache
def cpu_features() -> frozenset[str]:
    """The features of the first CPU, without the matrix unit where the system refuses it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    features = next(
        (set(value.split()) for name, _, value in lines if name.strip() in _CPUINFO_KEYS), set()
    )
    if "amx_tile" in features and not _request_amx_permission():
        features -= {"amx_tile", "amx_bf16", "amx_int8"}
    return frozenset(features)


def _request_amx_permission() -> bool:
    """Ask the kernel for the use of AMX's tiles in this process (arch_prctl(2), since Linux 5.16)."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0
