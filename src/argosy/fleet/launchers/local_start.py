"""Start of a replica on this machine: checks of its specification, and its address and CPUs."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from argosy.fleet.launchers.launcher import LaunchError, LaunchSpec
from argosy.fleet.launchers.replica_folder import LaunchRecord, ReplicaFolder, socket_url

LOCAL_HOST = "127.0.0.1"
MAX_PORT_ATTEMPTS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PLACEHOLDER = re.compile(r"\{(host|port|socket|name)\}")


def check_spec(spec: LaunchSpec, num_gpus: int) -> None:
    """Refuse what can never be started, before anything is changed.

    Raises:
        LaunchError: It can never be started. The message contains the remedy.
    """
    if not _NAME.fullmatch(spec.name):
        raise LaunchError(
            f"replica name {spec.name!r} is not a file name; use letters, digits, '.', '_' and '-'"
        )
    if not spec.command:
        raise LaunchError(f"pool {spec.pool!r} has an empty command")
    program = spec.command[0]
    environment = os.environ | dict(spec.environment)
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise LaunchError(
            f"program {program!r} of pool {spec.pool!r} is not an executable file in PATH; "
            "install it, or write its full path in the command"
        )
    if spec.drain_signal not in signal.Signals.__members__:
        raise LaunchError(
            f"drain signal {spec.drain_signal!r} of pool {spec.pool!r} is unknown; use a name such as SIGTERM"
        )
    if spec.resources.accelerators > num_gpus:
        raise LaunchError(
            f"a replica of pool {spec.pool!r} needs {spec.resources.accelerators} GPUs, but this machine has "
            f"{num_gpus} to use; lower `accelerators` or choose another launcher"
        )


def plan_attempt(
    spec: LaunchSpec,
    previous: LaunchRecord | None,
    gpus: tuple[str, ...],
    running: Sequence[LaunchRecord],
    host: str,
    folder: ReplicaFolder,
) -> LaunchRecord:
    """Return the record of the next attempt, with its address and CPUs. The folder must be locked.

    `previous` is its last attempt; None for the first. The ports and CPUs of `running` replicas are taken.

    Raises:
        OSError: No port is free, or no socket can be created.
    """
    placeholders = {name for part in spec.command for name in _PLACEHOLDER.findall(part)}
    url = port = uds = None
    if "socket" in placeholders:
        uds = str(folder.prepare_socket(spec.name, previous))
        url = spec.url or socket_url(uds)
    elif "port" in placeholders:
        reserved = {record.port for record in running if record.port is not None}
        port = choose_port(host, None if previous is None else previous.port, reserved)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    else:
        url = spec.url
    return LaunchRecord(
        **spec.identity,
        attempt=1 if previous is None else previous.attempt + 1,
        started_at=time.time(),
        url=url,
        port=port,
        socket=uds,
        gpus=gpus,
        cpus=choose_cpus(spec.resources.cpus, (cpu for record in running for cpu in record.cpus)),
    )


def fill_command(command: Sequence[str], record: LaunchRecord, host: str) -> tuple[str, ...]:
    """Return a command with its placeholders replaced by what an attempt was assigned."""
    values = {
        "host": host,
        "port": str(record.port),
        "socket": record.socket or "",
        "name": record.name,
    }
    return tuple(_PLACEHOLDER.sub(lambda match: values[match[1]], part) for part in command)


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
