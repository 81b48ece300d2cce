"""Headers of a replica: those with which a gateway controls a request, and those that name its parts without effect."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from urllib.parse import unquote

from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.http_server import HttpExchange
from argosy.protocol import (
    IGNORED_FIELDS_HEADER,
    PUBLIC_MODEL_HEADER,
    RELAXED_SCHEMA_HEADER,
    ApiError,
    format_names,
    invalid_request,
)

UNKNOWN_FIELDS_HEADER = b"x-argosy-unknown-fields"
"""Request header with which a gateway applies its own setting: `refuse` refuses unknown fields."""
RESUME_METADATA_HEADER = b"x-argosy-resume-metadata"
_COUNT_PATTERN = re.compile(r"[0-9]{1,9}")
_COUNTS_PATTERN = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_RESPONSE_ID_PATTERN = re.compile(r"([\x21-\x7e]{1,128}) (\d{1,11})")
MAX_WEIGHT = 1e6
MAX_TIER = 100


def parse_gateway_headers(
    exchange: HttpExchange, response_id: str, config: ReplicaServerConfig
) -> GatewayHeaders:
    """Parse the gateway's `x-argosy-*` headers, which may be stricter than the replica's own settings.

    Raises:
        ApiError: 400 if a header is malformed.
    """
    tier = _parse_number(exchange, "x-argosy-tier")
    if not 0 <= tier <= MAX_TIER or tier != int(tier):
        raise _malformed("x-argosy-tier", f"a whole number from 0 to {MAX_TIER}")
    weight = _parse_number(exchange, "x-argosy-weight")
    if not 0 < weight <= MAX_WEIGHT:
        raise _malformed("x-argosy-weight", f"above 0 and at most {MAX_WEIGHT:g}")
    resumed = _match(
        exchange, "x-argosy-response-id", _RESPONSE_ID_PATTERN, "an id and a Unix time"
    )
    cached = _match(exchange, "x-argosy-cached-tokens", _COUNT_PATTERN, "a count of tokens")
    given = _match(exchange, "x-argosy-resume-given", _COUNTS_PATTERN, "whole numbers")
    return GatewayHeaders(
        request_id=response_id if resumed is None else resumed[1],
        created_at=None if resumed is None else int(resumed[2]),
        wants_resume_metadata=exchange.get_header(RESUME_METADATA_HEADER) == "1",
        resumed_cached_tokens=None if cached is None else int(cached[0]),
        resume_given_tokens=() if given is None else tuple(map(int, given[0].split(","))),
        tenant=exchange.get_header(b"x-argosy-tenant"),
        cache_domain=exchange.get_header(b"x-argosy-cache-domain"),
        tier=int(tier),
        weight=weight,
        refuse_unknown=refuses_unknown_fields(config, exchange),
        public_model=unquote(exchange.get_header(PUBLIC_MODEL_HEADER)),
    )


def _match(
    exchange: HttpExchange, name: str, pattern: re.Pattern[str], expected: str
) -> re.Match[str] | None:
    """Match a header as a whole. Return None if it is missing."""
    header = exchange.get_header(name.encode())
    if not header:
        return None
    match = pattern.fullmatch(header)
    if match is None:
        raise _malformed(name, expected)
    return match


def _parse_number(exchange: HttpExchange, name: str) -> float:
    """Return the header's finite number, or 1 if the header is missing."""
    try:
        value = float(exchange.get_header(name.encode()) or "1")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _malformed(name, "a number")
    return value


def _malformed(name: str, expected: str) -> ApiError:
    return invalid_request(f"The header {name} must be {expected}.", name)


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
