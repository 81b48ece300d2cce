"""Runs the GPU kernels on a GPU if one is visible, and else in Triton's interpreter on host tensors."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path

import pytest

from tests.engine.gpu.device import INTERPRETED

if importlib.util.find_spec("triton") is None:  # Triton exists for Linux on x86-64 only
    collect_ignore_glob = ["test_*.py"]
elif INTERPRETED:
    # Triton reads the variable at its import and at the declaration of a kernel. Other tests must not see it.
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported before TRITON_INTERPRET could be set")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from argosy.engine.execution.kernels import gpu
        from tests.engine.gpu import interpreter

        for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
            importlib.import_module(module.name)
    finally:
        del os.environ["TRITON_INTERPRET"]
    interpreter.install()

HOST_TESTS = ("test_device.py", "test_compiled.py", "test_waits.py")


@pytest.fixture(autouse=True)
def _interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that a GPU runs too: `pytest -m real_gpu`. The others replace the device or compile only."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in HOST_TESTS:
            item.add_marker("real_gpu")
