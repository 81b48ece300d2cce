"""Starts the engine core process, with the environment of processes that compute.

Quick to import, so that the process can import torch while its parent initialises.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Self

COMPUTE_ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}
"""Default environment variables of processes that compute with torch, set before torch is imported.

OpenMP threads that wait for each other spin for about ten microseconds and then sleep
(docs/decisions/0004-short-spin.md)."""
DEFAULT_CORE_FACTORY = "argosy.engine.serving.engine_core.core:EngineCore"
"""Default factory of the core (`core_process.CoreFactory`)."""


def start_core_process(core_factory: str) -> subprocess.Popen[bytes]:
    """Start a process that imports `core_factory` and waits for a `CoreLaunchSpec` on stdin.

    Raises:
        OSError: The process cannot be started.
    """
    return subprocess.Popen(  # noqa: S603 - our own module
        [
            sys.executable,
            "-P",
            "-m",
            "argosy.engine.serving.engine_core.core_process",
            core_factory,
        ],
        stdin=subprocess.PIPE,
        env=COMPUTE_ENVIRONMENT | os.environ,
        start_new_session=True,  # the parent handles signals from the terminal
    )


class PrestartedCore:
    """Context manager for a core process that starts before its client exists. Kills the process on exit if unused."""

    def __init__(self, core_factory: str = DEFAULT_CORE_FACTORY) -> None:
        self._core_factory = core_factory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = start_core_process(self._core_factory)
        return self

    def __exit__(self, *error: object) -> None:
        process = self.take_process()
        if process is not None:
            process.kill()
            process.communicate()

    def take_process(self) -> subprocess.Popen[bytes] | None:
        """Return the process on the first call, else None. The caller then has to end it."""
        process, self._process = self._process, None
        return process
