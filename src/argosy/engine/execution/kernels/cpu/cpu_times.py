"""CPU time of this process and idle time of its CPUs, from which the CPUs available to it follow."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from argosy.engine.execution.kernels.cpu import cgroup

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
    quotas: tuple[cgroup.CpuQuota, ...] = ()

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
        quotas=cgroup.read_cpu_quotas(),
    )
