"""Headers of a replica: those with which a gateway controls a request, and those that name its parts without effect."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.http_server import HttpExchange
from argosy.protocol import (
    IGNORED_FIELDS_HEADER,
    RELAXED_SCHEMA_HEADER,
    format_names,
    invalid_request,
)

UNKNOWN_FIELDS_HEADER = b"x-argosy-unknown-fields"
"""Request header with which a gateway applies its own setting: `refuse` refuses unknown fields."""
RESUME_METADATA_HEADER = b"x-argosy-resume-metadata"
CACHED_TOKENS_HEADER = b"x-argosy-cached-tokens"
RESUME_GIVEN_HEADER = b"x-argosy-resume-given"
_COUNT_PATTERN = re.compile(r"[0-9]{1,9}")
_COUNTS_PATTERN = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_RESPONSE_ID_PATTERN = re.compile(r"([\x21-\x7e]{1,128}) (\d{1,11})")
MAX_WEIGHT = 1e6
MAX_TIER = 100


def parse_gateway_headers(exchange: HttpExchange, response_id: str) -> GatewayHeaders:
    """Parse the gateway's `x-argosy-*` headers.

    Raises:
        ApiError: 400 if a header is malformed.
    """
    tier = _parse_number(exchange, "x-argosy-tier")
    weight = _parse_number(exchange, "x-argosy-weight")
    if not 0 <= tier <= MAX_TIER or tier != int(tier):
        message = f"The header x-argosy-tier must be a whole number from 0 to {MAX_TIER}."
        raise invalid_request(message, "x-argosy-tier")
    if not 0 < weight <= MAX_WEIGHT:
        message = f"The header x-argosy-weight must be above 0 and at most {MAX_WEIGHT:g}."
        raise invalid_request(message, "x-argosy-weight")
    response_id, created = _parse_response_id(exchange, response_id)
    return GatewayHeaders(
        request_id=response_id,
        created_at=created,
        wants_resume_metadata=exchange.get_header(RESUME_METADATA_HEADER) == "1",
        resumed_cached_tokens=_parse_cached_tokens(exchange),
        resume_given_tokens=_parse_given_tokens(exchange),
        tenant=exchange.get_header(b"x-argosy-tenant"),
        cache_domain=exchange.get_header(b"x-argosy-cache-domain"),
        tier=int(tier),
        weight=weight,
    )


def _parse_response_id(exchange: HttpExchange, response_id: str) -> tuple[str, int | None]:
    """Return id and creation time of a resumed response. Otherwise return the new id and None."""
    header = exchange.get_header(b"x-argosy-response-id")
    if not header:
        return response_id, None
    match = _RESPONSE_ID_PATTERN.fullmatch(header)
    if match is None:
        raise invalid_request(
            "The header x-argosy-response-id must be an id and a Unix time.", "x-argosy-response-id"
        )
    return match[1], int(match[2])


def _parse_cached_tokens(exchange: HttpExchange) -> int | None:
    """Return the cached tokens that a resumed stream reported. None means that no stream is resumed."""
    header = exchange.get_header(CACHED_TOKENS_HEADER)
    if not header:
        return None
    if _COUNT_PATTERN.fullmatch(header) is None:
        raise invalid_request(
            "The header x-argosy-cached-tokens must be a count of tokens.", "x-argosy-cached-tokens"
        )
    return int(header)


def _parse_given_tokens(exchange: HttpExchange) -> tuple[int, ...]:
    """Return the comma-separated whole numbers of the header, or none if it is missing."""
    header = exchange.get_header(RESUME_GIVEN_HEADER)
    if header and not _COUNTS_PATTERN.fullmatch(header):
        raise invalid_request(
            "The header x-argosy-resume-given must be whole numbers.", "x-argosy-resume-given"
        )
    return tuple(map(int, header.split(","))) if header else ()


def _parse_number(exchange: HttpExchange, name: str) -> float:
    """Return the header's finite number, or 1 if the header is missing."""
    try:
        value = float(exchange.get_header(name.encode()) or "1")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid_request(f"The header {name} must be a number.", name)
    return value


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
