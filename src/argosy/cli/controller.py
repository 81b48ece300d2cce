"""`argosy controller`: keeps a fleet as it is declared."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Annotated

import typer

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import fail
from argosy.cli.fleet_target import (
    FilesOption,
    FleetOption,
    open_fleet,
    parse_revision,
)

EXIT_TERMINATED = 128 + signal.SIGTERM


def controller(
    *,
    files: FilesOption = None,
    fleet: FleetOption = None,
    until_down: Annotated[
        bool, typer.Option("--until-down", help="End once the fleet is down.")
    ] = False,
    store: StoreUrl = None,
) -> None:
    """Keep a fleet as it is declared. Of several controllers, one leads and the others stand by.

    Replicas and gateways run on when it ends, and the next controller adopts them.
    """
    from argosy.fleet.control import (
        DEFAULT_LEASE_S,
        Controller,
        FleetContext,
        open_launcher,
        process_holder,
    )
    from argosy.fleet.launchers import Launcher, LaunchError
    from argosy.process import handle_signals, raise_file_limit
    from argosy.telemetry import configure_logging

    with open_fleet(files, fleet, store) as target:
        raise_file_limit()
        revision = target.latest()
        config = None if revision is None else parse_revision(revision)
        lease_s = DEFAULT_LEASE_S if config is None else config.controller.lease_s
        configure_logging(
            "console" if config is None or sys.stderr.isatty() else config.log_format,
            "info" if config is None else config.log_level,
        )
        folder = target.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            fail(f"{folder} cannot be created: {error.strerror}")

        def create_launcher(name: str) -> Launcher:
            latest = target.latest()
            return open_launcher(name, folder, None if latest is None else parse_revision(latest))

        context = FleetContext(
            store=target.store,
            store_url=target.store_url,
            fleet=target.name,
            create_launcher=create_launcher,
            folder=folder,
        )

        async def run() -> None:
            work = asyncio.create_task(
                Controller(context, process_holder(), lease_s).run(until_empty=until_down)
            )
            with handle_signals(work.cancel, None):
                await asyncio.wait({work})
            if not work.cancelled():
                work.result()
            elif until_down:
                raise typer.Exit(
                    EXIT_TERMINATED
                )  # so that a keeper does not take the fleet for down

        try:
            asyncio.run(run())
        except (LaunchError, OSError) as error:
            fail(str(error))
