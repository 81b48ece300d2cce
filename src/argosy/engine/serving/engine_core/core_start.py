"""Starts the engine core's process: quick to import, as the process imports torch while its parent gets ready."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Self

from argosy.engine.engine_config import COMPUTE_ENVIRONMENT

CORE = "argosy.engine.serving.engine_core.core:EngineCore"
"""What makes the core, as `process.CoreFactory`."""


def start_process(core: str) -> subprocess.Popen[bytes]:
    """A process that imports `core`, then waits for a `process.Launch` on stdin. Raises OSError."""
    return subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, "-P", "-m", "argosy.engine.serving.engine_core.core_process", core],
        stdin=subprocess.PIPE,
        env=COMPUTE_ENVIRONMENT | os.environ,
        start_new_session=True,  # signals from the terminal are the parent's affair
    )


class EarlyCore:
    """A core's process that is started before anyone can talk to it; ended at the end if nobody has taken it."""

    def __init__(self, core: str = CORE) -> None:
        self._core = core
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = start_process(self._core)
        return self

    def __exit__(self, *error: object) -> None:
        process = self.take()
        if process is not None:
            process.kill()
            process.communicate()

    def take(self) -> subprocess.Popen[bytes] | None:
        """The process, once; from then on it is the caller's to end."""
        process, self._process = self._process, None
        return process
