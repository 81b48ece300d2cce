"""A private folder for sockets, which vanishes at the end; what a killed process left behind vanishes with the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "argosy-fleet-"
LOCK = "lock"


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """The folder, for this user alone (mode 0700). Its path is short, as paths of sockets must be."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / LOCK)  # held from the moment that others see it
            _sweep(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove our folders that nobody holds any more."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # just made, or gone meanwhile
            if folder.stat().st_uid != os.getuid():
                continue  # what lies in there is another user's to say
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
