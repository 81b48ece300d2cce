"""Choice of the CPUs and ports of a replica on this machine."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable

LOCAL_HOST = "127.0.0.1"
MAX_PORT_ATTEMPTS = 100


def choose_cpus(cpus: float | None, used: Iterable[int]) -> tuple[int, ...]:
    """Return the CPUs to pin a replica to, those with the fewest other replicas first.

    Args:
        cpus: Number of CPUs that it needs, rounded up; all if there are fewer. None pins it to none.
        used: CPUs of the running replicas, one for each replica.
    """
    if cpus is None or not hasattr(os, "sched_getaffinity"):
        return ()
    replicas_by_cpu = Counter(used)
    usable = sorted(os.sched_getaffinity(0), key=lambda cpu: (replicas_by_cpu[cpu], cpu))
    return tuple(sorted(usable[: max(1, math.ceil(cpus))]))


def choose_port(host: str, previous: int | None, reserved: Collection[int]) -> int:
    """Return a port of an address that no process listens at and no replica has reserved, if possible the previous one.

    Raises:
        OSError: No port is free.
    """
    if previous is not None and previous not in reserved and _is_free(host, previous):
        return previous
    for _ in range(MAX_PORT_ATTEMPTS):
        with socket.socket(_family(host)) as listener:
            listener.bind((host, 0))
            port: int = listener.getsockname()[1]
        if port not in reserved:
            return port
    raise OSError("no port is free")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
