"""The options of every command that listens over TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from argosy.cli.serve_options import ACCESS_PANEL

if TYPE_CHECKING:
    from argosy.http_server import TlsConfig

TlsCert = Annotated[
    str | None,
    Option(
        help="PEM file with the certificate to show: then it listens over TLS.",
        metavar="FILE",
        rich_help_panel=ACCESS_PANEL,
    ),
]
TlsKey = Annotated[
    str | None, Option(help="PEM file with its key.", metavar="FILE", rich_help_panel=ACCESS_PANEL)
]
TlsClientCa = Annotated[
    str | None,
    Option(
        help="PEM file: clients must show a certificate of this authority.",
        metavar="FILE",
        rich_help_panel=ACCESS_PANEL,
    ),
]


def build_tls_config(cert: str | None, key: str | None, client_ca: str | None) -> TlsConfig | None:
    """What the options say together; None: no TLS. Raises ValueError when one is missing."""
    from argosy.http_server import TlsConfig

    if cert is not None and key is not None:
        return TlsConfig(certificate=cert, key=key, client_ca=client_ca)
    if cert is None and key is None and client_ca is None:
        return None
    raise ValueError("TLS takes both --tls-cert and --tls-key; give the other one too")
