"""Disk cache of the memory that the largest step of a model needs on a GPU, measured at the first start."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import msgspec
import structlog

from argosy.folders import cache_folder

log = structlog.get_logger(__name__)


class MemoryProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a profile file."""

    key: str
    """Measured configuration: device, model, formats and limits."""
    working_bytes: int
    """Bytes that the largest step allocates."""


def read_memory_profile(key: str) -> int | None:
    """Return the bytes measured for `key`, or None if no readable profile exists."""
    try:
        profile = msgspec.json.decode(_profile_path(key).read_bytes(), type=MemoryProfile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("memory_profile_unreadable", key=key, reason=str(error))
        return None
    return profile.working_bytes if profile.key == key and profile.working_bytes > 0 else None


def write_memory_profile(key: str, working_bytes: int) -> None:
    """Save the bytes measured for `key`. If this fails, the next start measures again."""
    try:
        path = _profile_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(MemoryProfile(key, working_bytes)))
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("memory_profile_not_saved", reason=str(error))


def _profile_path(key: str) -> Path:
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return cache_folder() / "memory" / f"{name}.json"
