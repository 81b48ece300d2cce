"""Options of the commands that run a server: TLS, and the console."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Option

if TYPE_CHECKING:
    from argosy.deployment import ConsoleConfig
    from argosy.http_server import TlsConfig

_file = partial(Option, metavar="FILE", rich_help_panel="Access")
TlsCert = Annotated[str | None, _file(help="PEM file with the server's certificate; enables TLS.")]
TlsKey = Annotated[str | None, _file(help="PEM file with the certificate's key.")]
TlsClientCa = Annotated[
    str | None,
    _file(help="PEM file with the authority that must have signed the clients' certificates."),
]
_console = partial(Option, rich_help_panel="Console")
ServeConsole = Annotated[
    bool,
    _console("--console/--no-console", help="Serve the web console at /."),
]
AllowedHosts = Annotated[
    list[str] | None,
    _console(
        "--allowed-host",
        help="Name under which browsers may open the console, such as llm.example.com; may be given several times.",
    ),
]
ConsoleInsecureHttp = Annotated[
    bool,
    _console(
        "--console-insecure-http",
        help="Allow to sign in to the console over plain HTTP from other machines.",
    ),
]


def build_tls_config(cert: str | None, key: str | None, client_ca: str | None) -> TlsConfig | None:
    """Return the TLS settings, or None without TLS. Raises ValueError if the certificate or its key is missing."""
    from argosy.http_server import TlsConfig

    if cert is not None and key is not None:
        return TlsConfig(certificate=cert, key=key, client_ca=client_ca)
    if cert is None and key is None and client_ca is None:
        return None
    raise ValueError("TLS needs both --tls-cert and --tls-key; give the missing option")


def override_console_config(
    config: ConsoleConfig,
    *,
    console: bool,
    allowed_hosts: list[str] | None,
    insecure_http: bool,
) -> ConsoleConfig:
    """Return the settings of the console with what the command line says."""
    return msgspec.structs.replace(
        config,
        enabled=config.enabled and console,
        allowed_hosts=(*config.allowed_hosts, *(allowed_hosts or ())),
        insecure_http=config.insecure_http or insecure_http,
    )
