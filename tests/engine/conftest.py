"""The ways to compute that this machine has: a test that takes `path` runs once on each."""

from __future__ import annotations

import pytest

from argosy.engine.execution.isa import EMULATED, TORCH, VARIABLE, available_isas
from argosy.engine.execution.native_kernels import load_kernels
from argosy.native import NativeUnavailable

PATHS = [*(isa.name for isa in (*available_isas(), EMULATED)), TORCH]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the kernels that everything built in this test computes with."""
    name: str = request.param
    monkeypatch.setenv(VARIABLE, name)
    if name != TORCH:
        try:
            load_kernels()
        except (NativeUnavailable, ValueError) as why:
            pytest.skip(f"no {name} kernels here: {why}")
    return name
