"""`argosy replica`: one replica of a fleet, with JSON logs instead of a terminal display."""

from __future__ import annotations

import os

import msgspec
import typer

from argosy.cli import serve_options
from argosy.cli.failure import EXIT_FAILURE, EXIT_USAGE, fail
from argosy.cli.serve_settings import with_shared_options
from argosy.engine import EngineConfig, PrestartedCore, ReplicaServerConfig
from argosy.process import format_os_error
from argosy.process_monitor import StartupReporter


@with_shared_options
def replica(
    server: ReplicaServerConfig,
    engine: EngineConfig,
    *,
    digest: serve_options.Digest = None,
    context: typer.Context,
    colocated_replicas: serve_options.ColocatedReplicas = 0,
    log_level: serve_options.LogLevel = "info",
    log_name: serve_options.LogName = "",
) -> None:
    """Serve a model as one replica of a fleet, for a gateway to route to."""
    from argosy.engine import EngineFailedError, serve_replica

    server = msgspec.structs.replace(
        server,
        log_format="console" if log_name else "json",
        log_level=log_level,
        log_name=log_name,
    )
    try:
        engine = msgspec.structs.replace(
            engine, colocated_replicas=colocated_replicas, digest=digest
        )
    except ValueError as error:
        fail(str(error))
    reporter = StartupReporter(os.environ)
    status = EXIT_USAGE

    def on_ready(_url: str) -> None:
        nonlocal status
        status = EXIT_FAILURE
        reporter.report_serving()

    try:
        serve_replica(
            server,
            engine,
            on_ready=on_ready,
            on_load_progress=reporter.report_progress,
            prestarted_core=context.find_object(PrestartedCore),
        )
    except ValueError as error:
        message, status = str(error), EXIT_USAGE
    except EngineFailedError as error:
        message = str(error)
    except OSError as error:
        message, status = format_os_error(error), EXIT_USAGE
    else:
        return
    reporter.report_error(message)
    if log_name and reporter.is_connected:  # `argosy serve` shows what was reported
        raise typer.Exit(status)
    fail(message, status)
