"""Instruction sets on which the kernel tests run, and their tiers."""

from __future__ import annotations

import pytest

from argosy.engine.execution.kernels.cpu.isa import EMULATED_AMX, TORCH_ISA_NAME, available_isas

_NAMES = [*(isa.name for isa in (*available_isas(), EMULATED_AMX)), TORCH_ISA_NAME]
_DEFAULT = {_NAMES[0], "avx2", TORCH_ISA_NAME}
"""The fastest instruction set, a second one that compiles quickly, and torch."""

ISAS = [
    pytest.param(name, id=name, marks=() if name in _DEFAULT else pytest.mark.exhaustive)
    for name in _NAMES
]
"""All instruction sets of this machine, emulated AMX, and torch's operations."""
