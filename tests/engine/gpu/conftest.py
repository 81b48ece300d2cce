"""Runs the GPU kernels on the GPU where there is one, else in Triton's interpreter on host tensors."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

from tests.engine.gpu.device import DEVICE, INTERPRETED

if importlib.util.find_spec("triton") is None:  # other systems than Linux on x86-64 have none
    collect_ignore_glob = ["test_*.py"]
elif INTERPRETED:
    # Triton reads it when it is imported and when a kernel is declared; other tests must not see it.
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported before the tests of its kernels could say how")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from argosy.engine.execution.gpu import attention, elementwise, linear, sampling  # noqa: F401
        from tests.engine.gpu import interpreter
    finally:
        del os.environ["TRITON_INTERPRET"]
    interpreter.install()


@pytest.fixture(autouse=True)
def _interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    return DEVICE
