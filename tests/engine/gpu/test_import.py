"""Import without Triton: the GPU package names the remedy, and the CPU engine does not need Triton."""

from __future__ import annotations

import subprocess
import sys


def run_without_triton(code: str) -> subprocess.CompletedProcess[str]:
    hide_triton = "import sys; sys.modules['triton'] = None; "
    return subprocess.run(
        [sys.executable, "-c", hide_triton + code], capture_output=True, text=True, check=False
    )


def test_missing_triton_is_reported_with_remedy() -> None:
    process = run_without_triton("import argosy.engine.execution.kernels.gpu")
    assert process.returncode != 0
    assert "pip install 'argosy[gpu]'" in process.stderr


def test_cpu_engine_loads_without_triton() -> None:
    process = run_without_triton(
        "import argosy.engine.execution.loading.executor_loader, argosy.engine.execution.executor.executor"
    )
    assert process.returncode == 0, process.stderr
