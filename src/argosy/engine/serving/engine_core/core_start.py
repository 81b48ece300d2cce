"""Starts the engine core's process: quick to import, as the process imports torch while its parent gets ready."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Self

from argosy.engine.engine_config import COMPUTE_ENVIRONMENT

DEFAULT_CORE_FACTORY = "argosy.engine.serving.engine_core.core:EngineCore"
"""What makes the core, as `process.CoreFactory`."""


def start_core_process(core_factory: str) -> subprocess.Popen[bytes]:
    """A process that imports `core`, then waits for a `process.Launch` on stdin. Raises OSError."""
    return subprocess.Popen(  # noqa: S603 - ourselves
        [
            sys.executable,
            "-P",
            "-m",
            "argosy.engine.serving.engine_core.core_process",
            core_factory,
        ],
        stdin=subprocess.PIPE,
        env=COMPUTE_ENVIRONMENT | os.environ,
        start_new_session=True,  # signals from the terminal are the parent's affair
    )


class PrestartedCore:
    """A core's process that is started before anyone can talk to it; ended at the end if nobody has taken it."""

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
        """The process, once; from then on it is the caller's to end."""
        process, self._process = self._process, None
        return process
