"""Without Triton, the GPU's kernels say what to install, and nothing else asks for it."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    hidden = "import sys; sys.modules['triton'] = None; "
    return subprocess.run(
        [sys.executable, "-c", hidden + code], capture_output=True, text=True, check=False
    )


def test_a_missing_triton_is_named_with_the_remedy() -> None:
    done = run("import argosy.engine.execution.gpu")
    assert done.returncode != 0
    assert "pip install 'argosy[gpu]'" in done.stderr


def test_the_cpu_engine_loads_without_triton() -> None:
    done = run("import argosy.engine.execution.executor_loader, argosy.engine.execution.executor")
    assert done.returncode == 0, done.stderr
