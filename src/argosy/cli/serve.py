"""`argosy serve`: a model behind the whole front door, on this machine, with one command."""

from __future__ import annotations

import os

import msgspec

from argosy.cli import serve_options
from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import BROKEN, USAGE, fail
from argosy.cli.serve_settings import with_settings
from argosy.engine import EngineConfig, ServerConfig
from argosy.process import reason_of


@with_settings
def serve(
    server: ServerConfig,
    engine: EngineConfig,
    *,
    replicas: serve_options.Replicas = 1,
    gpus: serve_options.Gpus = "own",
    store: StoreUrl = None,
    auth: serve_options.Auth = "auto",
    allowed_origins: serve_options.AllowedOrigins = None,
    log_level: serve_options.LogLevel = "warning",
) -> None:
    """Serve a model with the OpenAI API on this machine (the bundled model by default)."""
    from argosy.cli.auth_bootstrap import Doorkeeping
    from argosy.cli.local_fleet import Whole
    from argosy.cli.startup_display import Display
    from argosy.fleet import FleetFailedError, places, usable_gpus

    server = msgspec.structs.replace(server, log_level=log_level)
    with Display() as shown:
        host = "localhost" if server.uds is not None else server.host
        try:
            where = places(replicas, usable_gpus(engine.device, os.environ), gpus)
            door = Doorkeeping(store, auth, host, allowed_origins)
            whole = Whole(server, engine, where, door, shown)
            whole.serve()
        except ValueError as error:
            fail(str(error))
        except FleetFailedError as error:
            fail(str(error), BROKEN if whole.served else USAGE)
        except OSError as error:
            fail(reason_of(error))
