"""`argosy replica`: one replica of a fleet, with logs instead of a panel."""

from __future__ import annotations

import msgspec

from argosy.cli import serve_options
from argosy.cli.failure import BROKEN, USAGE, fail
from argosy.cli.serve_settings import with_settings
from argosy.engine import EarlyCore, EngineConfig, ServerConfig
from argosy.process import reason_of


@with_settings
def replica(
    server: ServerConfig, engine: EngineConfig, *, log_level: serve_options.LogLevel = "info"
) -> None:
    """Serve a model as one replica of a fleet, for a gateway to route to."""
    server = msgspec.structs.replace(server, log_format="json", log_level=log_level)
    try:
        with EarlyCore() as early:  # its imports take longest: it does them during ours
            _serve(server, engine, early)
    except OSError as error:
        fail(reason_of(error))


def _serve(server: ServerConfig, engine: EngineConfig, early: EarlyCore) -> None:
    from argosy.engine import EngineFailedError, serve_replica

    served = False

    def ready(_url: str) -> None:
        nonlocal served
        served = True

    try:
        serve_replica(server, engine, on_ready=ready, early=early)
    except ValueError as error:
        fail(str(error))
    except EngineFailedError as error:
        fail(str(error), BROKEN if served else USAGE)
