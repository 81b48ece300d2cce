"""Private folder for state and sockets, removed at exit. The next process removes folders of killed processes."""

from __future__ import annotations

import contextlib
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
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        # systemd-tmpfiles removes nothing from a locked folder, however old it is (tmpfiles.d(5)).
        fcntl.flock(folder_fd, fcntl.LOCK_SH)
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Locked before the name is visible to other processes.
            (folder / "new").rename(folder / LOCK_NAME)
            _remove_stale_folders(folder.parent)
            yield folder
    finally:
        os.close(folder_fd)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders that no process has locked."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # not locked yet, or removed meanwhile
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK_NAME).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
