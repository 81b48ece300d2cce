"""A private folder for sockets, which vanishes at the end; what a killed process left behind vanishes with the next."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from argosy.process import create_socket_folder

FOLDER_PREFIX = "argosy-fleet-"
LOCK_NAME = "lock"
MAX_SOCKET_PATH_LEN = len("argosy-01234567/beats")
"""The longest path below: of a socket of a replica's engine core."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """The folder, for this user alone (mode 0700). Its path is short, as paths of sockets must be."""
    folder = create_socket_folder(FOLDER_PREFIX, MAX_SOCKET_PATH_LEN)
    try:
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / LOCK_NAME)  # held from the moment that others see it
            _remove_stale_folders(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ensure_folder(folder: Path) -> None:
    """Make it anew where somebody has tidied it up. Raises OSError when it cannot be made, or is another user's now."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it is another user's", str(folder))


def _remove_stale_folders(parent: Path) -> None:
    """Remove our folders that nobody holds any more."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # just made, or gone meanwhile
            if folder.stat().st_uid != os.getuid():
                continue  # what lies in there is another user's to say
            with (folder / LOCK_NAME).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
