"""Memory limit of a process with its descendants: a cgroup (v2) where one can be created, else a watch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Where cgroup v2 is mounted: alone, or beside version 1."""


class MemoryLimit:
    """Limits the memory of a process and its descendants.

    Only memory that cannot be reclaimed counts in the watch, since mapped weights are in the page cache.

    Args:
        cgroups: Folders in which a cgroup may be created, best first.
    """

    def __init__(self, name: str, limit_bytes: int, cgroups: tuple[Path, ...]) -> None:
        self._limit_bytes = limit_bytes
        self._cgroup = next(
            (child for parent in cgroups if (child := _create_cgroup(parent / name, limit_bytes))),
            None,
        )

    @property
    def is_watched(self) -> bool:
        """Whether `is_exceeded` has to be called regularly, since no cgroup enforces the limit."""
        return self._cgroup is None

    @property
    def reason(self) -> str:
        """Reason for the exit of a process that exceeded the limit."""
        return f"it exceeded its memory limit of {_format_bytes(self._limit_bytes)}"

    def add(self, pid: int) -> None:
        """Apply the limit to a process that has no children yet."""
        if self._cgroup is not None:
            try:
                (self._cgroup / "cgroup.procs").write_text(str(pid))
            except OSError:  # e.g. the process may not leave its cgroup; it is watched instead
                self.close()

    def is_exceeded(self, pid: int) -> bool:
        """Return whether the process exceeds its limit now, or was killed by its cgroup."""
        if self._cgroup is not None:
            return count_oom_kills(self._cgroup) > 0
        return read_memory_bytes(pid) > self._limit_bytes

    def close(self) -> None:
        """Remove the cgroup. All its processes must have exited."""
        if self._cgroup is not None:
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()
            self._cgroup = None


def own_cgroup() -> Path | None:
    """Return the folder of this process's cgroup (v2), or None without one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            hierarchy, _, path = line.split(":", 2)
            for root in CGROUP_ROOTS:
                if hierarchy == "0" and (root / "cgroup.controllers").exists():
                    return root / path.lstrip("/")
    return None


def delegated_cgroups() -> tuple[Path, ...]:
    """Return the cgroups in which this process may create others, if their owner lets it.

    A cgroup with processes cannot have children with limits, so the parent is where a service with
    `DelegateSubgroup` may create them.
    """
    own = own_cgroup()
    return () if own is None else (own, own.parent)


def count_oom_kills(cgroup: Path | None) -> int:
    """Return how many processes of a cgroup the system has killed for lack of memory, or 0."""
    if cgroup is not None:
        with contextlib.suppress(OSError, ValueError):
            events = (cgroup / "memory.events").read_text().split()
            return int(events[events.index("oom_kill") + 1])
    return 0


def read_memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants that cannot be reclaimed. Shared memory counts once."""
    anonymous = shared = 0
    pids = [pid]
    while pids:
        pid = pids.pop()
        pids += read_children(pid)
        with contextlib.suppress(OSError):
            fields = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith(("RssAnon:", "RssShmem:"))
            )
            anonymous += _read_kib(fields, "RssAnon")
            shared = max(shared, _read_kib(fields, "RssShmem"))
    return anonymous + shared


def read_children(pid: int) -> list[int]:
    """Return the children of all threads of a process. Empty if it has exited."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - quicker, and called often
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                children += map(int, text.split())
    return children


def _create_cgroup(cgroup: Path, limit_bytes: int) -> Path | None:
    """Create a cgroup with a memory limit, or return None if this process may not."""
    parent = cgroup.parent
    try:
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        cgroup.mkdir()
    except OSError:
        return None
    try:
        (cgroup / "memory.max").write_text(str(limit_bytes))
        (cgroup / "memory.oom.group").write_text("1")  # a part of a replica is of no use
    except OSError:
        with contextlib.suppress(OSError):
            cgroup.rmdir()
        return None
    return cgroup


def _read_kib(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0]) * 1024


def _format_bytes(count: int) -> str:
    return f"{count / 2**30:.4g} GiB" if count >= 2**30 else f"{count / 2**20:.4g} MiB"
