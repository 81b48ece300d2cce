"""Processes of a fleet by its state folder. They outlive the command that started them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil


def list_processes(state_folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes whose XDG_STATE_HOME is this folder, oldest first."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_STATE_HOME") == str(state_folder):
                yield process


def kill_processes(state_folder: Path) -> None:
    """Kill the processes of a state folder. A keeper is older than the controller that it would start again."""
    for process in list_processes(state_folder):
        with contextlib.suppress(psutil.Error):
            process.kill()
