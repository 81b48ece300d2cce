"""Limits of processes that run what a checkpoint brings: templates and patterns. It imports little."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def limit_resources(memory_bytes: int) -> None:
    """Limit memory to that of the idle process and `memory_bytes`, and forbid core dumps and files."""
    with contextlib.suppress(OSError, ValueError):  # no procfs, or a lower hard limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(name, (0, 0))
