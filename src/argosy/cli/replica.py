"""`argosy replica`: one replica of a fleet, with logs instead of a panel."""

from __future__ import annotations

import msgspec

from argosy.cli import serve_options
from argosy.cli.failure import EXIT_FAILURE, EXIT_USAGE, fail
from argosy.cli.serve_settings import with_shared_options
from argosy.engine import EngineConfig, PrestartedCore, ReplicaServerConfig
from argosy.process import format_os_error


@with_shared_options
def replica(
    server: ReplicaServerConfig, engine: EngineConfig, *, log_level: serve_options.LogLevel = "info"
) -> None:
    """Serve a model as one replica of a fleet, for a gateway to route to."""
    server = msgspec.structs.replace(server, log_format="json", log_level=log_level)
    try:
        with PrestartedCore() as early:  # its imports take longest: it does them during ours
            _serve(server, engine, early)
    except OSError as error:
        fail(format_os_error(error))


def _serve(server: ReplicaServerConfig, engine: EngineConfig, early: PrestartedCore) -> None:
    from argosy.engine import EngineFailedError, serve_replica

    served = False

    def ready(_url: str) -> None:
        nonlocal served
        served = True

    try:
        serve_replica(server, engine, on_ready=ready, prestarted_core=early)
    except ValueError as error:
        fail(str(error))
    except EngineFailedError as error:
        fail(str(error), EXIT_FAILURE if served else EXIT_USAGE)
