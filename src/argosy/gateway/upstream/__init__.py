"""Connections to the servers behind the gateway, and what is asked on them."""

from argosy.gateway.upstream.asking import answer_to, get
from argosy.gateway.upstream.attempt import Attempt, TooLargeError
from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.names import addresses_of
from argosy.gateway.upstream.tls import UpstreamTls, client_context
from argosy.gateway.upstream.upstream import Upstream

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
