"""`argosy serve`: a model behind a gateway on this machine, with one command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from argosy.cli import serve_options
from argosy.cli.account_lookup import StoreUrl
from argosy.cli.console_options import AllowedHosts, ConsoleInsecureHttp, ServeConsole
from argosy.cli.failure import EXIT_FAILURE, EXIT_USAGE, fail
from argosy.cli.replica_options import with_replica_options
from argosy.cli.tls_options import TlsCert, TlsClientCa, TlsKey, build_tls_config
from argosy.engine import ReplicaServerConfig
from argosy.process import format_os_error


def parse_embedding_models(values: Sequence[str], taken_names: Sequence[str]) -> dict[str, str]:
    """Return the paths or hub names of embedding models by their public names.

    Args:
        values: Models, each alone or after its name and `=`.
        taken_names: Names that other models have.

    Raises:
        ValueError: Two models have the same name.
    """
    models: dict[str, str] = {}
    for value in values:
        name, separator, model = value.partition("=")
        if not separator or Path(value).exists():
            (name,), model = ReplicaServerConfig().model_names_for(value), value
        if name in models or name in taken_names:
            raise ValueError(
                f"two models are called {name!r}; name one with --embedding-model NAME={model}"
            )
        models[name] = model
    return models


@with_replica_options(
    omitted=("colocated_replicas", "digest", "log_name"), defaults={"log_level": "warning"}
)
def serve(
    options: Mapping[str, Any],
    *,
    context: typer.Context,  # noqa: ARG001 - every command with these options gets it
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    replicas: serve_options.ReplicaCount = 1,
    embedding_model: serve_options.EmbeddingModels = None,
    gpus: serve_options.GpuSharingOption = "own",
    store: StoreUrl = None,
    auth: serve_options.AuthModeOption = "auto",
    allowed_origins: serve_options.AllowedOrigins = None,
    console: ServeConsole = True,
    allowed_host: AllowedHosts = None,
    console_insecure_http: ConsoleInsecureHttp = False,
    log_content: serve_options.LogContent = False,
) -> None:
    """Serve a model with the OpenAI API on this machine (the bundled model by default)."""
    from argosy.cli.auth_bootstrap import AuthBootstrap
    from argosy.cli.local_fleet import LocalFleet
    from argosy.cli.replica_fleet import FleetFailedError
    from argosy.cli.startup_display import StartupDisplay
    from argosy.engine import build_replica_settings
    from argosy.fleet import group_replicas, usable_gpus
    from argosy.fleet.launchers import LaunchError

    with StartupDisplay() as display:
        try:
            server, engine = build_replica_settings(options)
            tls = build_tls_config(tls_cert, tls_key, tls_client_ca)
            server = msgspec.structs.replace(server, tls=tls)
            host = "localhost" if server.uds is not None else server.host
            groups = group_replicas(replicas, usable_gpus(engine.device, os.environ), gpus)
            auth_bootstrap = AuthBootstrap(
                store,
                auth,
                host,
                allowed_origins,
                console=console,
                allowed_hosts=allowed_host,
                console_insecure_http=console_insecure_http,
            )
            names = server.model_names_for(engine.model)
            fleet = LocalFleet(
                server=server,
                engine=engine,
                groups=groups,
                auth_bootstrap=auth_bootstrap,
                display=display,
                options=options,
                log_content=log_content,
                embedding_models=parse_embedding_models(embedding_model or (), names),
            )
            fleet.serve()
        except (ValueError, LaunchError) as error:
            fail(str(error))
        except FleetFailedError as error:
            fail(str(error), EXIT_FAILURE if fleet.has_served else EXIT_USAGE)
        except OSError as error:
            fail(format_os_error(error))
