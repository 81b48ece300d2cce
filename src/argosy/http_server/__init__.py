"""Serving HTTP/1.1: hardened connections, requests and answers under limits, listening sockets."""

from argosy.http_server.deadlines import Deadlines
from argosy.http_server.error_responses import check_method, not_found, run_handler
from argosy.http_server.gc_tuning import tune_gc
from argosy.http_server.http_exchange import (
    EXCHANGE_KEY,
    JSON_CONTENT_TYPE,
    AsgiApp,
    ClientListener,
    DisconnectedError,
    ExchangeLimits,
    HttpExchange,
    Receive,
    Scope,
    Send,
    SlowReaderError,
)
from argosy.http_server.response_observer import ResponseObserver
from argosy.http_server.server import (
    SHUTDOWN_GRACE_S,
    HttpServer,
    bind_tcp,
    bind_unix,
    listen_url,
    listening_socket,
)
from argosy.http_server.tls import CertificateWatcher, TlsConfig

__all__ = [
    "EXCHANGE_KEY",
    "JSON_CONTENT_TYPE",
    "SHUTDOWN_GRACE_S",
    "AsgiApp",
    "CertificateWatcher",
    "ClientListener",
    "Deadlines",
    "DisconnectedError",
    "ExchangeLimits",
    "HttpExchange",
    "HttpServer",
    "Receive",
    "ResponseObserver",
    "Scope",
    "Send",
    "SlowReaderError",
    "TlsConfig",
    "bind_tcp",
    "bind_unix",
    "check_method",
    "listen_url",
    "listening_socket",
    "not_found",
    "run_handler",
    "tune_gc",
]
