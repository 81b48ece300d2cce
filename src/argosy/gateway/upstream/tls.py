"""TLS client settings for replicas: trusted authorities and the gateway's own certificate."""

from __future__ import annotations

import ssl

from argosy.deployment import UpstreamTls


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
