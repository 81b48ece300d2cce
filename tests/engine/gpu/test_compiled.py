"""Every kernel compiles for Hopper and fits it, at the shapes of real models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SHARED_BYTES = 227 << 10
"""Shared memory that a program may have."""
STACK_BYTES = 512
"""More than this a thread does not do without registers before it is slow."""


@pytest.mark.timeout(600)
def test_every_kernel_fits_hopper(tmp_path: Path) -> None:
    """Matrix products by the asynchronous matrix unit, fed by asynchronous copies; draws rounded as a CPU does."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.gpu.compile_kernels"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 40
    for line in lines:
        assert line["shared"] <= SHARED_BYTES, line
        assert line["stack"] <= STACK_BYTES, line
        if line["kernel"].startswith(("attend", "multiply")):
            assert line["wgmma"], line
            assert line["cp_async"], line
        if line["kernel"].startswith("draw"):
            assert not line["fused"], line
