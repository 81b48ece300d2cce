"""`argosy gateway`: the gateway of a fleet whose replicas are listed in a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from argosy.cli.failure import fail
from argosy.cli.server_options import (
    AllowedHosts,
    ConsoleInsecureHttp,
    ServeConsole,
    TlsCert,
    TlsClientCa,
    TlsKey,
    build_tls_config,
    override_console_config,
)
from argosy.cli.startup_display import api_url
from argosy.process import format_os_error


def gateway(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="YAML file with the models and their replicas.")
    ],
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; overrides the file.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port; 0 selects a free port. Overrides the file."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    console: ServeConsole = True,
    allowed_host: AllowedHosts = None,
    console_insecure_http: ConsoleInsecureHttp = False,
    control_socket: Annotated[
        Path | None, typer.Option(hidden=True, help="Unix socket for the controller.")
    ] = None,
) -> None:
    """Route requests to the replicas of a fleet, and resume streams when a replica dies."""
    from argosy.deployment import GatewayConfig, load_config
    from argosy.gateway import serve_gateway
    from argosy.lessons import LESSONS

    try:
        tls = build_tls_config(tls_cert, tls_key, tls_client_ca)
        options: dict[str, Any] = {"host": host, "port": port, "tls": tls}
        overrides = {name: value for name, value in options.items() if value is not None}
        if host is not None or port is not None:
            overrides["uds"] = None  # otherwise the gateway would listen on the file's socket

        def load_settings() -> GatewayConfig:
            loaded = load_config(config)
            console_config = override_console_config(
                loaded.console,
                console=console,
                allowed_hosts=allowed_host,
                insecure_http=console_insecure_http,
            )
            return msgspec.structs.replace(loaded, console=console_config, **overrides)

        def reload_settings() -> GatewayConfig:
            _require_regular_file(config)
            return load_settings()

        def print_ready(url: str) -> None:
            if settings.log_format != "json":  # the log event `ready` contains the URL
                shown = api_url(url, settings.tls)
                typer.echo(f"argosy gateway is ready at {shown}", err=True)

        settings = load_settings()
        serve_gateway(settings, print_ready, reload_settings, LESSONS, control_socket)
    except OSError as error:
        fail(format_os_error(error))
    except ValueError as error:
        fail(str(error))


def _require_regular_file(path: Path) -> None:
    """Raise ValueError if `path` is not a regular file. Opening a pipe again could wait forever for a writer."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file, so it cannot be reloaded; restart instead")
