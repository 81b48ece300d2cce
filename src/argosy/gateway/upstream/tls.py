"""TLS client settings for replicas: trusted authorities and the gateway's own certificate."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import msgspec


class UpstreamTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setting `tls` of a replica with an `https` URL. Files are PEM. The replica's certificate is always verified."""

    ca: str | None = None
    """File of the authority that signs the replica's certificate; by default the system's trusted authorities apply."""
    certificate: str | None = None
    """File of the gateway's client certificate, for replicas that require one."""
    key: str | None = None
    """File of the private key for `certificate`."""
    server_name: str | None = None
    """Host name to send (SNI) and to verify, if it differs from the host in the URL."""

    def digest(self) -> bytes:
        """Return a digest of the files' contents, by which a change is noticed. Raises OSError."""
        paths = (self.ca, self.certificate, self.key)
        contents = [Path(path).read_bytes() for path in paths if path is not None]
        return hashlib.blake2b(b"\0".join(contents)).digest()


def create_client_ssl_context(config: UpstreamTls) -> ssl.SSLContext:
    """Create the TLS context for connections to a replica.

    Raises:
        ValueError: A file is missing or unusable. The message names it.
    """
    try:
        context = ssl.create_default_context(cafile=config.ca)
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.ca}: {error}"
        raise ValueError(f"{message}. Give a PEM file with the authority's certificate.") from error
    context.set_alpn_protocols(["http/1.1"])
    if config.certificate is None:
        return context
    try:
        context.load_cert_chain(config.certificate, config.key, password=lambda: "")
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.certificate} with {config.key}: {error}"
        raise ValueError(f"{message}. Give PEM files that belong together.") from error
    return context
