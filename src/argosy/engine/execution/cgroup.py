"""What this process may use of the machine: its CPUs and memory, within the limits of its cgroup (v2)."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """CPUs of this process's affinity mask, within the cgroup's quota (at least 1)."""
    cpus = len(os.sched_getaffinity(0))
    for folder in _folders():
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            cpus = min(cpus, max(1, int(words[0]) // int(words[1])))
    return cpus


def free_bytes() -> int:
    """Bytes that may still be allocated; page cache that can go counts as free."""
    rooms = [psutil.virtual_memory().available]
    for folder in _folders():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            rooms.append(int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return max(0, min(rooms))


def _folders() -> list[Path]:
    """Folders of this process's cgroup, innermost first; empty where there is none."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            inner = CGROUP_ROOT / path.lstrip("/")
            return [inner, *(p for p in inner.parents if p.is_relative_to(CGROUP_ROOT))]
    return []


def _read(path: Path) -> str:
    """The stripped text of a file of the kernel's; empty where it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
