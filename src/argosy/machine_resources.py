"""CPUs and memory that this process may use, by the limits of its cgroup (v2) and by what other processes use."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
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


def total_bytes() -> int:
    """Return the memory that processes may use in all: that of the machine, limited by the cgroup."""
    limits = [_read_text(folder / "memory.max") for folder in _cgroup_folders()]
    total = int(psutil.virtual_memory().total)
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


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


MIN_ACCOUNTED_FRACTION = 0.5
"""Part of the elapsed time that the kernel's counters must account for. Some sandboxes report constants."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Counters at one moment, in seconds."""

    at_s: float
    own_s: float
    """CPU time of this process."""
    idle_s: float
    """Idle time of the usable CPUs, all together."""
    total_s: float
    """Time that the kernel accounted for on the usable CPUs, all together."""
    num_cpus: int
    quotas: tuple[CpuQuota, ...] = ()

    def available_cpus_since(self, earlier: CpuTimes) -> float | None:
        """Return how many CPUs this process could use since `earlier`: what it used, and what was idle.

        A cgroup's quota limits it to what the other processes of the cgroup left. Returns None if the counters cannot
        be used.
        """
        elapsed_s = self.at_s - earlier.at_s
        own_s = self.own_s - earlier.own_s
        accounted_s = self.total_s - earlier.total_s
        if accounted_s < MIN_ACCOUNTED_FRACTION * elapsed_s * self.num_cpus or elapsed_s <= 0:
            return None
        available = min(self.num_cpus, (self.idle_s - earlier.idle_s + own_s) / elapsed_s)
        for quota, before in zip(self.quotas, earlier.quotas, strict=False):
            others_s = quota.used_s - before.used_s - own_s
            available = min(available, quota.cpus - others_s / elapsed_s)
        return available


def read_cpu_times() -> CpuTimes | None:
    """Read the counters. Returns None where the kernel does not have them."""
    usable = os.sched_getaffinity(0)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    idle = total = num_cpus = 0
    for line in lines:
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break  # the lines of the CPUs are the first ones
        if name == "cpu" or int(name[3:]) not in usable or len(fields) < 8:
            continue
        ticks = [
            int(field) for field in fields[:8]
        ]  # user nice system idle iowait irq softirq steal
        idle += ticks[3] + ticks[4]
        total += sum(ticks)
        num_cpus += 1
    if num_cpus < len(usable):
        return None
    return CpuTimes(
        at_s=time.monotonic(),
        own_s=time.process_time(),
        idle_s=idle / ticks_per_s,
        total_s=total / ticks_per_s,
        num_cpus=num_cpus,
        quotas=read_cpu_quotas(),
    )
