"""Parts of a request without effect: refused, or named in a response header."""

from __future__ import annotations

from collections.abc import Iterable

from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.http_server import HttpExchange
from argosy.protocol import IGNORED_FIELDS_HEADER, RELAXED_SCHEMA_HEADER, format_names

UNKNOWN_FIELDS_HEADER = b"x-argosy-unknown-fields"
"""Request header with which a gateway applies its own setting: `refuse` refuses unknown fields."""


def refuses_unknown_fields(config: ReplicaServerConfig, exchange: HttpExchange) -> bool:
    """Return whether unknown fields are refused, by the server's setting or by the gateway's."""
    return (
        config.unknown_fields == "refuse" or exchange.get_header(UNKNOWN_FIELDS_HEADER) == "refuse"
    )


def report_ignored_fields(exchange: HttpExchange, names: tuple[str, ...]) -> None:
    """Add the response header that names the ignored fields, if there are any."""
    if names:
        exchange.extra_headers.append((IGNORED_FIELDS_HEADER, format_names(names)))


def report_relaxed_keywords(exchange: HttpExchange, keywords: Iterable[str]) -> None:
    """Add the response header that names the schema keywords that are not enforced, if there are any."""
    unique = dict.fromkeys(keywords)
    if unique:
        exchange.extra_headers.append((RELAXED_SCHEMA_HEADER, format_names(unique)))
