"""Where a user's files are kept, as the XDG Base Directory Specification has it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """For what can be made again. Raises FileNotFoundError, saying what to set, for a user without a home."""
    return _xdg_folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """For what is to last. Raises FileNotFoundError, saying what to set, for a user without a home."""
    return _xdg_folder("XDG_STATE_HOME", ".local/state")


def _xdg_folder(variable: str, default: str) -> Path:
    told = os.environ.get(variable)
    if told:
        return Path(told) / "argosy"
    try:
        return Path.home() / default / "argosy"
    except RuntimeError as error:  # a user without a name, as in some containers
        raise FileNotFoundError(f"this user has no home: set HOME or {variable}") from error
