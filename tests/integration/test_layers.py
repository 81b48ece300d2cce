"""Imports of the base install: every package except `engine.execution` loads without torch."""

import subprocess
import sys

WITHOUT_TORCH = """
import importlib, sys
for name in ("torch", "safetensors", "transformers"):
    sys.modules[name] = None  # makes an import raise ImportError
for package in sys.argv[1:]:
    importlib.import_module(package)
"""
PACKAGES = (
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


def test_packages_load_without_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *PACKAGES]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
