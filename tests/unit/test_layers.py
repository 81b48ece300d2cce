"""The base install: every room but execution loads on a machine without torch."""

import subprocess
import sys

WITHOUT_TORCH = """
import importlib, sys
for name in ("torch", "safetensors", "transformers"):
    sys.modules[name] = None  # importing it now raises ImportError
for room in sys.argv[1:]:
    importlib.import_module(room)
"""
ROOMS = (
    "argosy",
    "argosy.policy",
    "argosy.protocol",
    "argosy.store",
    "argosy.telemetry",
    "argosy.http_server",
    "argosy.bench",
    "argosy.engine",
    "argosy.engine.scheduling",
    "argosy.engine.serving",
    "argosy.gateway",
    "argosy.fleet",
    "argosy.cli",
)


def test_all_load_without_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *ROOMS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
