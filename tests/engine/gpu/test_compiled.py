"""The GPU kernels compile for Hopper and fit into its resources, and nothing else needs Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from argosy.extras import install_command

SHARED_BYTES = 227 << 10
"""Maximum shared memory of a program."""
STACK_BYTES = 640
"""Maximum stack of a thread, for spilled registers. Above it, a kernel is slow."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shapes", "count"),
    [("representative", 33), pytest.param("all", 129, marks=pytest.mark.exhaustive)],
)
def test_kernels_fit_hopper(pytestconfig: pytest.Config, shapes: str, count: int) -> None:
    """Matrix products use asynchronous instructions and copies.

    Kernels with the bits of torch's operations use no fused multiply-adds.

    Triton's cache outlives the test, so that only kernels that have changed are compiled.
    """
    assert pytestconfig.cache is not None
    environment = os.environ | {"TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    process = subprocess.run(
        [sys.executable, "-m", "tests.engine.gpu.compile_kernels", shapes],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(lines) == count
    for line in lines:
        assert line["shared"] <= SHARED_BYTES, line
        assert line["stack"] <= STACK_BYTES, line
        if line["kernel"].startswith(("attend", "matmul")):
            assert line["wgmma"], line
            assert line["cp_async"], line
        if line["kernel"].startswith(("sample", "edit", "matmul", "add choices")):
            assert not line["fused"], line


def run_without_triton(code: str) -> subprocess.CompletedProcess[str]:
    hide_triton = "import sys; sys.modules['triton'] = None; "
    return subprocess.run(
        [sys.executable, "-c", hide_triton + code], capture_output=True, text=True, check=False
    )


def test_missing_triton_is_reported_with_remedy() -> None:
    process = run_without_triton("import argosy.engine.execution.kernels.gpu")
    assert process.returncode != 0
    assert install_command("gpu") in process.stderr


def test_cpu_engine_loads_without_triton() -> None:
    process = run_without_triton(
        "import argosy.engine.execution.loading.executor_loader, argosy.engine.execution.executor.executor"
    )
    assert process.returncode == 0, process.stderr
