"""A declared fleet that a benchmark runs by the commands of operators, with its store in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from argosy.controller_keeper import has_keeper
from argosy.store import FleetStore, open_store

MAX_STOP_S = 30.0
"""Time in which the controller of a fleet without processes ends."""


class Fleet:
    """A fleet with its folder."""

    def __init__(self, folder: Path, declaration: Path | None = None) -> None:
        self.folder = folder
        self._declaration = declaration
        self._overlay = folder / "overlay.yaml"
        self._environment = os.environ | {"XDG_STATE_HOME": str(folder)}

    def declare(self, overlay: Mapping[str, Any]) -> None:
        """Replace what is declared in addition to the declaration."""
        self._overlay.write_text(yaml.safe_dump(overlay))

    def run(self, *command: str) -> None:
        """Run a command of `argosy` about the fleet."""
        files = [*([] if self._declaration is None else [self._declaration]), self._overlay]
        options = [option for file in files for option in ("-f", str(file))]
        arguments = [sys.executable, "-m", "argosy.cli", *command, *options]
        subprocess.run(arguments, env=self._environment, check=True, stderr=subprocess.DEVNULL)

    def wait_until_stopped(self) -> None:
        """Wait until no controller is left, which would outlive its folder."""
        deadline = time.monotonic() + MAX_STOP_S
        folders = [each for each in self.folder.glob("argosy/fleets/*") if each.is_dir()]
        while any(map(has_keeper, folders)):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"a controller runs {MAX_STOP_S:g} s after `argosy down`")
            time.sleep(0.1)

    def open_store(self) -> FleetStore:
        """Return its store."""
        return open_store(f"sqlite:///{self.folder}/argosy/argosy.db").fleets


@contextlib.contextmanager
def run_fleet(overlay: Mapping[str, Any], declaration: Path | None = None) -> Iterator[Fleet]:
    """Run a fleet from `argosy up` to `argosy down`.

    Args:
        overlay: The declaration, or what is declared in addition to that in a file.
        declaration: Path of the file.
    """
    with tempfile.TemporaryDirectory(prefix="argosy-fleet-") as folder:
        fleet = Fleet(Path(folder), None if declaration is None else declaration.absolute())
        fleet.declare(overlay)
        fleet.run("up")
        try:
            yield fleet
        finally:
            fleet.run("down")
            fleet.wait_until_stopped()
