"""Connections to the servers behind the gateway, and what is asked on them."""

from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.fetch import fetch_path, fetch_response
from argosy.gateway.upstream.name_resolution import resolve_addresses
from argosy.gateway.upstream.tls import UpstreamTls, create_client_ssl_context
from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import ResponseTooLargeError, UpstreamResponse

__all__ = [
    "ResponseTooLargeError",
    "Upstream",
    "UpstreamError",
    "UpstreamResponse",
    "UpstreamTls",
    "create_client_ssl_context",
    "fetch_path",
    "fetch_response",
    "resolve_addresses",
]
