"""Runs scripts with the SDKs for JavaScript in node."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

JS = Path(__file__).parents[1] / "integration/js"


async def run_javascript(script: str, *arguments: str) -> Any:  # noqa: ANN401 - any JSON value
    """Run a script and return the JSON that it prints. Skip the test if node or the SDK is missing."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    packages = json.loads((JS / "package.json").read_bytes())["dependencies"]
    if not all((JS / "node_modules" / package).is_dir() for package in packages):
        pytest.skip("the JavaScript SDKs are not installed: run npm ci in tests/integration/js")
    process = await asyncio.create_subprocess_exec(
        *(node, str(JS / script), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)
