"""Checks of a declaration against this installation and this machine, before anything is changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.failure import fail
from argosy.cli.fleet_progress import read_status

if TYPE_CHECKING:
    from argosy.cli.fleet_target import FleetTarget
    from argosy.deployment import FleetConfig


def check_launchers(target: FleetTarget, config: FleetConfig) -> None:
    """End the command if a launcher of the declaration cannot be used from this machine."""
    from argosy.fleet.control import check_launchers
    from argosy.fleet.launchers import LaunchError

    try:
        asyncio.run(check_launchers(config, target.folder))
    except LaunchError as error:
        fail(str(error))


def check_ports(target: FleetTarget, config: FleetConfig) -> None:
    """End the command if another program listens where a gateway of the fleet shall, on this machine."""
    from argosy.deployment import gateway_url
    from argosy.http_server import bind_tcp

    if config.uds is not None:
        return
    own_urls = {replica.url for replica in read_status(target).replicas}
    for ordinal in range(config.gateways if config.port else 0):
        if gateway_url(config, ordinal) in own_urls:
            continue
        try:
            bind_tcp(config.host, config.port + ordinal).close()
        except OSError as error:
            problem = str(error.strerror).partition(";")[0]
            fail(f"gateway {ordinal} {problem}; stop what listens there, or change `port`")


@contextlib.contextmanager
def created_folder(folder: Path) -> Iterator[None]:
    """Create the folder of a fleet's state, or end the command. If the block fails, it is removed again if empty."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        fail(
            f"{folder} cannot be created: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
        )
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
