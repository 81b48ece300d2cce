"""How many files and sockets a process may have open: as many as the system lets it, and how many clients that is."""

from __future__ import annotations

import contextlib
import resource
import sys

OWN = 48
"""Descriptors that a server needs whoever is there: its files, its event loop, connections that are no client's."""


def raise_file_limit() -> None:
    """Let this process have as many as the system allows: the usual limit, 1024, is there for old programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_clients(each: int) -> int:
    """Clients that there is room for when each of them takes so many descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - OWN) // each)
