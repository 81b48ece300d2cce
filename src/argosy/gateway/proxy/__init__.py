"""Proxy for generation requests: from a parsed request to the last byte of its response.

`CompletionHandlers` parses a request, runs the filters and creates the objects that serve it. Its `FailoverProxy` makes
attempts until the response is complete. For each attempt the pool's `Dispatcher` waits for a replica with a free
concurrency slot, and a `HedgedRequest` sends the request to it, or to two. The `ResponseRelay` forwards the replica's
stream to the client through a `ResponseWriter`, and on a regular stream it moves both sockets to the native `FastPath`.
"""

from argosy.gateway.proxy.dispatcher import RETRY_AFTER_S, no_replica_error
from argosy.gateway.proxy.fast_path import FastPath, load_fast_path
from argosy.gateway.proxy.handlers import CompletionHandlers
from argosy.gateway.proxy.upstream_headers import REFUSE_UNKNOWN_FIELDS, forward_notes

__all__ = [
    "REFUSE_UNKNOWN_FIELDS",
    "RETRY_AFTER_S",
    "CompletionHandlers",
    "FastPath",
    "forward_notes",
    "load_fast_path",
    "no_replica_error",
]
