"""CPUs and memory that this process may use, within the limits of its cgroup (v2)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")


class CpuQuota(NamedTuple):
    """CPU quota of a cgroup and the CPU time that its processes have used."""

    cpus: float
    used_s: float


def usable_cpus() -> int:
    """Return the number of CPUs in the process's affinity mask, limited by the cgroup's quota (at least 1)."""
    quotas = [max(1, int(quota.cpus)) for quota in read_cpu_quotas()]
    return min([len(os.sched_getaffinity(0)), *quotas])


def read_cpu_quotas() -> tuple[CpuQuota, ...]:
    """Return the quotas of this process's cgroup and of those around it, innermost first."""
    quotas = []
    for folder in _cgroup_folders():
        fields = _read_text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            stat = dict(line.split() for line in _read_text(folder / "cpu.stat").splitlines())
            used_s = int(stat.get("usage_usec", 0)) / 1e6
            quotas.append(CpuQuota(int(fields[0]) / int(fields[1]), used_s))
    return tuple(quotas)


def free_bytes() -> int:
    """Return the bytes that may still be allocated. Inactive page cache counts as free."""
    free_by_limit = [psutil.virtual_memory().available]
    for folder in _cgroup_folders():
        limit, used = _read_text(folder / "memory.max"), _read_text(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read_text(folder / "memory.stat").splitlines())
            free_by_limit.append(int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return max(0, min(free_by_limit))


def _cgroup_folders() -> list[Path]:
    """Return the folders of this process's cgroup, innermost first, or an empty list without cgroup v2."""
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            folder = CGROUP_ROOT / path.lstrip("/")
            return [folder, *(p for p in folder.parents if p.is_relative_to(CGROUP_ROOT))]
    return []


def _read_text(path: Path) -> str:
    """Return the stripped text of a kernel file, or an empty string if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
