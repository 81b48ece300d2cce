"""Instruction sets of the CPU kernels: a test that takes the fixture `isa` runs once on each of them."""

from __future__ import annotations

import pytest

from argosy.engine.execution.kernels.cpu.isa import ISA_VARIABLE, TORCH_ISA_NAME
from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from argosy.engine.scheduling import DraftCandidate, DraftLengthPolicy
from argosy.native import NativeUnavailableError
from tests.engine.isas import ISAS


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the instruction set of all kernels that the test creates."""
    name: str = request.param
    monkeypatch.setenv(ISA_VARIABLE, name)
    if name != TORCH_ISA_NAME:
        try:
            load_kernels()
        except (NativeUnavailableError, ValueError) as error:
            pytest.skip(f"no {name} kernels on this machine: {error}")
    return name


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify all drafts, whatever their chances."""

    def select_all(
        policy: DraftLengthPolicy, candidates: list[DraftCandidate], *counts: int
    ) -> list[int]:
        return [candidate.size for candidate in candidates]

    monkeypatch.setattr(DraftLengthPolicy, "select_lengths", select_all)
