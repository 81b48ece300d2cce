"""Locks between processes of one machine, which end with the process that has them (flock)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(
    file: Path, *, is_shared: bool = False, on_wait: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Have the lock of a file, which is created if it does not exist, within a context.

    Args:
        file: The file, whose content does not matter.
        is_shared: Whether others may have the lock at the same time, if theirs is shared too.
        on_wait: Called before waiting for another process.

    Raises:
        OSError: The file cannot be created or locked.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        if not try_lock(descriptor, kind):
            on_wait()
            fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock an open file if no other process prevents it. Return whether it is locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
