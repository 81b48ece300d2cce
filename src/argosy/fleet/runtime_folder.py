"""A private folder for sockets, which vanishes at the end; what a killed process left behind vanishes with the next."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from argosy.process import socket_folder

PREFIX = "argosy-fleet-"
LOCK = "lock"
LONGEST = len("argosy-01234567/beats")
"""The longest path below: of a socket of a replica's engine core."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """The folder, for this user alone (mode 0700). Its path is short, as paths of sockets must be."""
    folder = socket_folder(PREFIX, LONGEST)
    try:
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / LOCK)  # held from the moment that others see it
            _sweep(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_folder(folder: Path) -> None:
    """Make it anew where somebody has tidied it up. Raises OSError when it cannot be made, or is another user's now."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it is another user's", str(folder))


def _sweep(parent: Path) -> None:
    """Remove our folders that nobody holds any more."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # just made, or gone meanwhile
            if folder.stat().st_uid != os.getuid():
                continue  # what lies in there is another user's to say
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
