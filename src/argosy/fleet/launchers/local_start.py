"""Start of a replica on this machine: checks of its specification, and what is assigned to its next attempt."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from urllib.parse import quote

from argosy.fleet.launchers.launcher import LaunchError, LaunchSpec
from argosy.fleet.launchers.machine_resources import choose_cpus, choose_port
from argosy.fleet.launchers.replica_folder import LaunchRecord, ReplicaFolder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PLACEHOLDER = re.compile(r"\{(host|port|socket|name)\}")


def check_spec(spec: LaunchSpec, num_gpus: int) -> None:
    """Refuse what can never be started, before anything is changed.

    Args:
        spec: The replica.
        num_gpus: Number of GPUs that replicas may use.

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

    Args:
        spec: The replica.
        previous: Its last attempt; None for the first.
        gpus: GPUs that are reserved for it.
        running: All replicas that run on this machine, whose ports and CPUs are taken.
        host: Address at which replicas with a port listen.
        folder: Folder for its socket.

    Raises:
        OSError: No port is free, or no socket can be created.
    """
    placeholders = {name for part in spec.command for name in _PLACEHOLDER.findall(part)}
    url = port = uds = None
    if "socket" in placeholders:
        uds = str(folder.prepare_socket(spec.name, previous))
        url = f"unix://{quote(uds)}"
    elif "port" in placeholders:
        reserved = {record.port for record in running if record.port is not None}
        port = choose_port(host, None if previous is None else previous.port, reserved)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    else:
        url = spec.url
    return LaunchRecord(
        name=spec.name,
        pool=spec.pool,
        generation=spec.generation,
        ordinal=spec.ordinal,
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
