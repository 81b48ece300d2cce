"""The base install, without torch: every package except `engine.execution` loads, and errors name what to install."""

import json
import subprocess
import sys
from pathlib import Path

from argosy.extras import install_command
from argosy.models import BUNDLED_MODEL

WITHOUT_TORCH = """
import importlib, sys
for name in ("torch", "safetensors", "transformers"):
    sys.modules[name] = None  # makes an import raise ImportError
"""
IMPORT_PACKAGES = """
for package in sys.argv[1:]:
    importlib.import_module(package)
"""
INSPECT_MODEL = """
from argosy.cli import main
sys.argv[:1] = ["argosy", "models", "inspect"]
main()
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
    "argosy.process_monitor",
    "argosy.cli",
)


def test_packages_load_without_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH + IMPORT_PACKAGES, *PACKAGES]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_only_quantized_models_need_torch_to_be_inspected(tmp_path: Path) -> None:
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(BUNDLED_MODEL / "model.safetensors")
    plain, quantized = (
        subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH + INSPECT_MODEL, str(model)],
            capture_output=True,
            text=True,
            check=False,
        )
        for model in (BUNDLED_MODEL, tmp_path)
    )
    assert plain.returncode == 0, plain.stderr
    assert install_command("engine") in quantized.stderr
    assert "Traceback" not in quantized.stderr
