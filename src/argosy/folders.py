"""Folders for a user's files, according to the XDG Base Directory Specification."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for files that can be recreated.

    Raises:
        FileNotFoundError: The user has no home folder. The message names the variables to set.
    """
    return _xdg_folder("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """Return the folder for large persistent files.

    Raises:
        FileNotFoundError: The user has no home folder. The message names the variables to set.
    """
    return _xdg_folder("XDG_DATA_HOME", ".local/share")


def state_folder() -> Path:
    """Return the folder for persistent files.

    Raises:
        FileNotFoundError: The user has no home folder. The message names the variables to set.
    """
    return _xdg_folder("XDG_STATE_HOME", ".local/state")


def _xdg_folder(variable: str, default: str) -> Path:
    base_folder = os.environ.get(variable)
    if base_folder:
        return Path(base_folder) / "argosy"
    try:
        return Path.home() / default / "argosy"
    except RuntimeError as error:  # a user id without a name, as in some containers
        raise FileNotFoundError(f"this user has no home folder; set HOME or {variable}") from error


def open_private_log(path: Path) -> int:
    """Open a file to append to, which only this user may read by now, also if it exists already."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(file, 0o600)
    return file


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old or the new content. For one writer at a time.

    Raises:
        OSError: The file cannot be written. The old content stays.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
