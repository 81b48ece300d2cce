"""The base install: every room but execution loads on a machine without torch."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import importlib, sys
for name in ("torch", "safetensors", "transformers"):
    sys.modules[name] = None  # importing it now raises ImportError
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "room",
    [
        "argosy",
        "argosy.bench",
        "argosy.cli",
        "argosy.engine",
        "argosy.engine.scheduling",
        "argosy.engine.serving",
        "argosy.fleet",
        "argosy.gateway",
        "argosy.policy",
        "argosy.protocol",
        "argosy.telemetry",
        "argosy.web",
    ],
)
def test_loads_without_torch(room: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, room], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
