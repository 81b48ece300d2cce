"""`argosy replica`: one replica of a fleet, with JSON logs instead of a terminal display."""

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
        # The core's slow imports run in parallel with this process's.
        with PrestartedCore() as core:
            _serve(server, engine, core)
    except OSError as error:
        fail(format_os_error(error))


def _serve(server: ReplicaServerConfig, engine: EngineConfig, core: PrestartedCore) -> None:
    from argosy.engine import EngineFailedError, serve_replica

    has_served = False

    def on_ready(_url: str) -> None:
        nonlocal has_served
        has_served = True

    try:
        serve_replica(server, engine, on_ready=on_ready, prestarted_core=core)
    except ValueError as error:
        fail(str(error))
    except EngineFailedError as error:
        fail(str(error), EXIT_FAILURE if has_served else EXIT_USAGE)
