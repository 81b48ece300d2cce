"""Serving HTTP/1.1: hardened connections, requests and answers under limits, listening sockets."""

from argosy.web.collector import calm_collector
from argosy.web.copies import Copy
from argosy.web.deadlines import Deadlines
from argosy.web.exchange import (
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
from argosy.web.listen import GOODBYE_S, Listener, bind, bind_unix, listening_socket, url_of
from argosy.web.refusing import answered, check_method, nothing_at
from argosy.web.tls import Certificates, TlsConfig

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
