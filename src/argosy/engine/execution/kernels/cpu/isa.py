"""Instruction sets for which the CPU kernels are compiled, chosen by CPU features or by `$ARGOSY_CPU_ISA`."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ISA_VARIABLE = "ARGOSY_CPU_ISA"
"""Environment variable that selects the instruction set, for tests and to rule out faulty hardware."""
TORCH_ISA_NAME = "torch"
"""Value of the environment variable that selects torch's operations instead of the native kernels."""


@dataclass(frozen=True, slots=True)
class Isa:
    """Instruction set for which the kernels can be compiled."""

    name: str
    required_features: frozenset[str]
    """Required CPU features, as named in /proc/cpuinfo."""
    compiler_flags: tuple[str, ...]
    """Compiler options that enable the instruction set."""


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
"""All instruction sets, fastest first."""
EMULATED_AMX = Isa("amx_emulated", _AVX2, ("-march=x86-64-v3", "-DARGOSY_AMX_EMULATED"))
"""Instruction set "amx" with the matrix unit emulated in software, for tests on machines without AMX."""

_CPUINFO_KEYS = ("flags", "Features")
"""Names of the feature list in /proc/cpuinfo, on x86 and on ARM."""


def available_isas() -> list[Isa]:
    """Return the instruction sets that this CPU supports, fastest first."""
    return [isa for isa in ISAS if isa.required_features <= cpu_features()]


def candidate_isas(name: str | None) -> list[Isa]:
    """Return the instruction sets to try, fastest first: the named one, that of $ARGOSY_CPU_ISA, or all supported ones.

    None are to be tried if the name is "torch".

    Raises:
        ValueError: This CPU does not support the named instruction set.
    """
    name = name or os.environ.get(ISA_VARIABLE)
    if not name:
        return available_isas()
    if name == TORCH_ISA_NAME:
        return []
    usable = {
        isa.name: isa
        for isa in (*available_isas(), EMULATED_AMX)
        if isa.required_features <= cpu_features()
    }
    if name not in usable:
        isa_by_name = {isa.name: isa for isa in (*ISAS, EMULATED_AMX)}
        missing = (
            sorted(isa_by_name[name].required_features - cpu_features())
            if name in isa_by_name
            else []
        )
        reason = (
            f"this CPU lacks {', '.join(missing)}"
            if missing
            else "no instruction set has this name"
        )
        choices = ", ".join((*usable, TORCH_ISA_NAME))
        raise ValueError(
            f"{ISA_VARIABLE} is {name!r}, but {reason}; unset it or choose one of {choices}"
        )
    return [usable[name]]


@cache
def cpu_features() -> frozenset[str]:
    """Return the features of the first CPU, without AMX if the system denies its use."""
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
    """Request the use of AMX tiles in this process (arch_prctl(2), since Linux 5.16), and return the success."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0
