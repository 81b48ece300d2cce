"""TLS towards replicas: whom the gateway trusts, and what it shows of itself."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import msgspec


class UpstreamTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For replicas with an `https` URL. The files are PEM; a replica's certificate is always verified."""

    ca: str | None = None
    """The authority that signs the replica's certificate, instead of those that the system trusts."""
    certificate: str | None = None
    """What the gateway shows a replica that asks for it."""
    key: str | None = None
    server_name: str | None = None
    """The name that is asked for (SNI) and verified, where the URL has an address or another name."""

    def digest(self) -> bytes:
        """Differs when the files have other contents. Raises OSError."""
        paths = (self.ca, self.certificate, self.key)
        found = [Path(path).read_bytes() for path in paths if path is not None]
        return hashlib.blake2b(b"\0".join(found)).digest()


def create_client_ssl_context(config: UpstreamTls) -> ssl.SSLContext:
    """What connections to such a replica use. Raises ValueError, naming the file to change."""
    try:
        context = ssl.create_default_context(cafile=config.ca)
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.ca} ({error})"
        raise ValueError(f"{message}; give a PEM file with the authority's certificate") from error
    context.set_alpn_protocols(["http/1.1"])
    if config.certificate is None:
        return context
    try:
        context.load_cert_chain(config.certificate, config.key, password=lambda: "")
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.certificate} with {config.key} ({error})"
        raise ValueError(f"{message}; give PEM files that belong together") from error
    return context
