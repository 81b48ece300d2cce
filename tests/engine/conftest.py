"""The ways to compute that this machine has: a test that takes `path` runs once on each."""

from __future__ import annotations

import pytest

from argosy.engine.execution.isa import EMULATED_AMX, ISA_VARIABLE, TORCH_ISA_NAME, available_isas
from argosy.engine.execution.native_kernels import load_kernels
from argosy.native import NativeUnavailableError

PATHS = [*(isa.name for isa in (*available_isas(), EMULATED_AMX)), TORCH_ISA_NAME]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the kernels that everything built in this test computes with."""
    name: str = request.param
    monkeypatch.setenv(ISA_VARIABLE, name)
    if name != TORCH_ISA_NAME:
        try:
            load_kernels()
        except (NativeUnavailableError, ValueError) as why:
            pytest.skip(f"no {name} kernels here: {why}")
    return name
