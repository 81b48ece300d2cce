"""`argosy gateway`: the front door of a fleet, from a file that says what stands behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from argosy.cli.failure import fail
from argosy.cli.tls_options import TlsCert, TlsClientCa, TlsKey, build_tls_config
from argosy.process import format_os_error


def gateway(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="YAML file with the models and their replicas.")
    ],
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (overrides the file).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
) -> None:
    """Route requests to the replicas of a fleet, and carry streams on when one dies."""
    from argosy.gateway import GatewayConfig, load_config, serve_gateway

    try:
        tls = build_tls_config(tls_cert, tls_key, tls_client_ca)
        options: dict[str, Any] = {"host": host, "port": port, "tls": tls}
        given = {name: value for name, value in options.items() if value is not None}
        if host is not None or port is not None:
            given["uds"] = None  # the file's socket would be listened on instead

        def read() -> GatewayConfig:
            return msgspec.structs.replace(load_config(config), **given)

        def reread() -> GatewayConfig:
            _require_regular_file(config)
            return read()

        settings = read()
        serve_gateway(
            settings, _print_nothing if settings.log_format == "json" else _print_ready, reread
        )
    except OSError as error:
        fail(format_os_error(error))
    except ValueError as error:
        fail(str(error))


def _require_regular_file(path: Path) -> None:
    """Raises ValueError where there is no file to be read again: of a pipe nobody may ever write the other end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file, and so is not read again: restart instead")


def _print_ready(url: str) -> None:
    typer.echo(f"argosy gateway is ready at {url}/v1", err=True)


def _print_nothing(url: str) -> None:
    """Where standard error is JSON, the log's event `ready` tells it."""
