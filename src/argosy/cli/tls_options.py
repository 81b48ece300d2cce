"""TLS options of all commands that run a server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from argosy.http_server import TlsConfig

_file = partial(Option, metavar="FILE", rich_help_panel="Access")
TlsCert = Annotated[str | None, _file(help="PEM file with the server's certificate; enables TLS.")]
TlsKey = Annotated[str | None, _file(help="PEM file with the certificate's key.")]
TlsClientCa = Annotated[
    str | None,
    _file(help="PEM file with the authority that must have signed the clients' certificates."),
]


def build_tls_config(cert: str | None, key: str | None, client_ca: str | None) -> TlsConfig | None:
    """Return the TLS settings, or None without TLS.

    Raises:
        ValueError: The certificate or its key is missing.
    """
    from argosy.http_server import TlsConfig

    if cert is not None and key is not None:
        return TlsConfig(certificate=cert, key=key, client_ca=client_ca)
    if cert is None and key is None and client_ca is None:
        return None
    raise ValueError("TLS needs both --tls-cert and --tls-key; give the missing option")
