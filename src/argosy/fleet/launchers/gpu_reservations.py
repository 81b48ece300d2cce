"""Reservations of the GPUs of this machine, so that no two replicas use one, whatever fleets they belong to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from argosy.fleet.device_assignment import read_gpu_uuids
from argosy.fleet.launchers.launcher import LaunchError
from argosy.process import format_os_error

FOLDER_NAME = "argosy-gpus"
_SHARED_FOLDERS = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 - safe against links, see `_open_lock`
"""Folders in which every user may create files, best first."""
_SHARED_MODE = stat.S_ISVTX | 0o777


class GpuReservations:
    """GPUs of this machine, each with a lock file that all fleets and users share.

    Args:
        folder: Folder of the lock files. None for one that does not depend on the user.
        read_uuids: Returns the UUIDs of the installed GPUs, by which a GPU with several names has one lock.
    """

    def __init__(
        self,
        folder: Path | None = None,
        read_uuids: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._folder = folder or shared_folder() / FOLDER_NAME
        self._uuids = (read_uuids or read_gpu_uuids)()

    @contextlib.contextmanager
    def reserve(self, count: int, gpus: Sequence[str]) -> Iterator[dict[str, int] | None]:
        """Reserve some of the given GPUs, each with the descriptor of its lock, or none while too few are free.

        On exit this process gives its locks up. A GPU is reserved until all processes that inherit its lock have ended.

        Raises:
            LaunchError: The lock files cannot be used.
        """
        locks: dict[str, int] = {}
        try:
            for gpu in gpus:
                if len(locks) == count:
                    break
                lock = self._try_lock(gpu)
                if lock is not None:
                    locks[gpu] = lock
            yield locks if len(locks) == count else None
        finally:
            for lock in locks.values():
                os.close(lock)

    def _try_lock(self, gpu: str) -> int | None:
        """Return the descriptor of a GPU's lock, or None if another process has it."""
        try:
            self._create_folder()
            lock = _open_lock(self._folder / f"{self._identify(gpu).replace('/', '_')}.lock")
        except OSError as error:
            raise LaunchError(
                f"no GPU can be reserved: {format_os_error(error)}; let this user write to {self._folder}"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _create_folder(self) -> None:
        try:
            self._folder.mkdir()
            self._folder.chmod(_SHARED_MODE)  # whatever the umask is
        except FileExistsError:
            if not stat.S_ISDIR(self._folder.lstat().st_mode):
                raise

    def _identify(self, gpu: str) -> str:
        """Return one name for all names of a GPU: its UUID, if the driver reports it."""
        if gpu.isdigit():
            return (self._uuids[int(gpu)] if int(gpu) < len(self._uuids) else "") or gpu
        found = [uuid for uuid in self._uuids if uuid.startswith(gpu)]  # CUDA takes abbreviations
        return found[0] if len(found) == 1 else gpu


def shared_folder() -> Path:
    """Return the folder for temporary files that is the same for all users of this machine."""
    return next(
        (
            folder
            for folder in _SHARED_FOLDERS
            if folder.is_dir() and folder.stat().st_mode & _SHARED_MODE == _SHARED_MODE
        ),
        _SHARED_FOLDERS[-1],
    )


def _open_lock(path: Path) -> int:
    """Open a lock file that any user may have created. Locking needs no permission to write.

    Raises:
        OSError: It cannot be opened or created, or is a link.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        # O_EXCL, because a system may refuse O_CREAT for files of others in such a folder.
        lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(lock, 0o644)  # whatever the umask is
        return lock
    return os.open(path, flags)
