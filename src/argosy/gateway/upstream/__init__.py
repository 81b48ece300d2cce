"""Connections to the servers behind the gateway, and what is asked on them."""

from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.fetch import answer_to, get
from argosy.gateway.upstream.name_resolution import addresses_of
from argosy.gateway.upstream.tls import UpstreamTls, client_context
from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import Attempt, TooLargeError

__all__ = [
    "Attempt",
    "TooLargeError",
    "Upstream",
    "UpstreamError",
    "UpstreamTls",
    "addresses_of",
    "answer_to",
    "client_context",
    "get",
]
