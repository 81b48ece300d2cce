"""Serving HTTP/1.1: hardened connections, requests and answers under limits, listening sockets."""

from argosy.http_server.deadlines import Deadlines
from argosy.http_server.error_responses import answered, check_method, nothing_at
from argosy.http_server.gc_tuning import calm_collector
from argosy.http_server.http_exchange import (
    EXCHANGE,
    JSON,
    App,
    DisconnectedError,
    Exchange,
    ExchangeLimits,
    Receive,
    Scope,
    Send,
    SlowReaderError,
    Watcher,
)
from argosy.http_server.response_observer import Copy
from argosy.http_server.server import GOODBYE_S, Listener, bind, bind_unix, listening_socket, url_of
from argosy.http_server.tls import Certificates, TlsConfig

__all__ = [
    "EXCHANGE",
    "GOODBYE_S",
    "JSON",
    "App",
    "Certificates",
    "Copy",
    "Deadlines",
    "DisconnectedError",
    "Exchange",
    "ExchangeLimits",
    "Listener",
    "Receive",
    "Scope",
    "Send",
    "SlowReaderError",
    "TlsConfig",
    "Watcher",
    "answered",
    "bind",
    "bind_unix",
    "calm_collector",
    "check_method",
    "listening_socket",
    "nothing_at",
    "url_of",
]
