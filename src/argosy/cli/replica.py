"""`argosy replica`: one replica of a fleet, with JSON logs instead of a terminal display."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer

from argosy.cli.failure import EXIT_FAILURE, EXIT_USAGE, fail
from argosy.cli.replica_options import with_replica_options
from argosy.cli.server_options import TlsCert, TlsClientCa, TlsKey, build_tls_config
from argosy.engine import EngineConfig, PrestartedCore, ReplicaServerConfig
from argosy.process import format_os_error
from argosy.process_monitor import StartupReporter

OptionsDocument = Annotated[
    str,
    typer.Option(
        "--options",
        metavar="JSON",
        help="Options as one object, by name, as a fleet passes them; those on the command line replace them.",
    ),
]


@with_replica_options()
def replica(
    options: Mapping[str, Any],
    *,
    context: typer.Context,
    options_document: OptionsDocument = "{}",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
) -> None:
    """Serve a model as one replica of a fleet, for a gateway to route to."""
    from argosy.engine import build_replica_settings

    try:
        document = msgspec.json.decode(options_document, type=dict[str, Any])
        server, engine = build_replica_settings({**document, **options})
        server = msgspec.structs.replace(
            server,
            tls=build_tls_config(tls_cert, tls_key, tls_client_ca),
            log_format="console" if server.log_name else "json",
        )
    except msgspec.DecodeError as error:
        fail(f"--options: {error}; write a JSON object of options by name")
    except ValueError as error:
        fail(str(error))
    _serve(server, engine, context.find_object(PrestartedCore))


def _serve(
    server: ReplicaServerConfig, engine: EngineConfig, prestarted_core: PrestartedCore | None
) -> None:
    from argosy.engine import EngineFailedError, serve_replica

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
            prestarted_core=prestarted_core,
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
    if server.log_name and reporter.is_connected:  # `argosy serve` shows what was reported
        raise typer.Exit(status)
    fail(message, status)
