"""Private folder for sockets that is removed at exit. Folders of killed processes are removed by the next process."""

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
"""Length of the longest path in the folder, which is a socket of a replica's engine core."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Create a folder for this user only (mode 0700). Its path is short, because socket paths are limited."""
    folder = create_socket_folder(FOLDER_PREFIX, MAX_SOCKET_PATH_LEN)
    try:
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Locked before the name is visible to other processes.
            (folder / "new").rename(folder / LOCK_NAME)
            _remove_stale_folders(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ensure_folder(folder: Path) -> None:
    """Create the folder again if a clean-up job removed it.

    Raises:
        OSError: The folder cannot be created, or belongs to another user.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(folder))


def _remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders that no process has locked."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # not locked yet, or removed meanwhile
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK_NAME).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
