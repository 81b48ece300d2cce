"""What the largest step of a model takes on a GPU: measured at the first boot, kept on disk for later ones."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import msgspec
import structlog

from argosy.folders import cache_folder

log = structlog.get_logger(__name__)


class MemoryProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's content."""

    key: str
    """What was measured: device, model, formats and limits."""
    working_bytes: int


def read_memory_profile(key: str) -> int | None:
    """The bytes that were measured for `key`; None where there is no such plan, or only a damaged one."""
    try:
        plan = msgspec.json.decode(_profile_path(key).read_bytes(), type=MemoryProfile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("memory_profile_unreadable", key=key, reason=str(error))
        return None
    return plan.working_bytes if plan.key == key and plan.working_bytes > 0 else None


def write_memory_profile(key: str, working_bytes: int) -> None:
    """Keep it; where the disk does not take it, the next boot measures again."""
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
