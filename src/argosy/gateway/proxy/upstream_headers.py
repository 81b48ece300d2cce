"""Headers of requests to replicas. Native replicas also get tenant, scheduling and resume headers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import quote

from argosy.gateway.backends import list_dropped_fields, resume_token_counts
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import RequestContext
from argosy.protocol import (
    IGNORED_FIELDS_HEADER,
    RELAXED_SCHEMA_HEADER,
    REPORT_CONTENT,
    REPORT_HEADER,
    format_names,
)

_COMMON_HEADERS = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
_ARITHMETIC_HEADER = b"x-argosy-arithmetic-id"
"""Header in which a native replica reports its arithmetic identity, and by which a resume requires the same one."""
_MAX_GIVEN_CHOICES = 1000
"""Maximum choices in `x-argosy-resume-given`, since headers are limited in size."""
_ARITHMETIC_ID_PATTERN = re.compile(rb"[0-9a-f]{1,64}")
_TRACEPARENT_PATTERN = re.compile(
    rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,64})?"
)
_TRACESTATE_PATTERN = re.compile(rb"[\t -~]{1,1024}")
"""W3C Trace Context. Other values are dropped, because a replica might reject the request and then count as
unhealthy."""
_SAFE_CHARACTERS = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")


REFUSE_UNKNOWN_FIELDS = (b"x-argosy-unknown-fields", b"refuse")
"""Request header by which a native replica refuses unknown fields instead of ignoring them."""
_FORWARDED_HEADER_VALUE = re.compile(rb"[!-~]{1,2048}")


def build_native_headers(
    *, refuse_unknown_fields: bool, log_content: bool
) -> tuple[tuple[bytes, bytes], ...]:
    """Build the headers with the gateway's settings that every request to a native replica carries."""
    report = (REPORT_HEADER, REPORT_CONTENT if log_content else b"1")
    return (report, REFUSE_UNKNOWN_FIELDS) if refuse_unknown_fields else (report,)


def build_request_headers(
    context: RequestContext,
    replica: ReplicaEndpoint,
    *,
    resumable: bool,
    native_headers: Sequence[tuple[bytes, bytes]],
) -> list[tuple[bytes, bytes]]:
    """Build the headers of a request to a replica.

    Args:
        context: The request.
        replica: The replica.
        resumable: Whether a native replica adds resume metadata to its stream.
        native_headers: Headers that a native replica gets in addition.
    """
    exchange, principal = context.exchange, context.principal
    headers = list(_COMMON_HEADERS)
    headers += _trace_headers(exchange.headers)
    if replica.kind != "argosy":
        # Not the client's request id. Engines identify requests by this header, and clients may choose equal ids.
        headers.append((b"x-request-id", context.response_id.rpartition("-")[2].encode()))
        return headers
    headers.append((b"x-request-id", exchange.request_id.encode()))
    headers.append(
        (b"x-argosy-response-id", b"%b %d" % (context.response_id.encode(), context.started_at))
    )
    headers.append(replica.gateway_header)
    headers += _principal_headers(
        principal.tier, principal.weight, principal.tenant, principal.cache_domain
    )
    headers += native_headers
    if resumable:
        headers.append((b"x-argosy-resume-metadata", b"1"))
        if (
            context.delivered.token_id_pieces
        ):  # a resume: the usage continues with the reported value
            headers.append((b"x-argosy-cached-tokens", b"%d" % context.delivered.cached_tokens))
        given_tokens = resume_token_counts(context.fields)[:_MAX_GIVEN_CHOICES]
        if given_tokens:
            headers.append((b"x-argosy-resume-given", ",".join(map(str, given_tokens)).encode()))
    if context.delivered.arithmetic_id:
        headers.append((_ARITHMETIC_HEADER, context.delivered.arithmetic_id.encode()))
    return headers


def parse_arithmetic_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the id of the arithmetic identity in a native replica's response, or "" if there is none.

    An invalid value counts as none, since another replica would reject every request with it.
    """
    arithmetic_id = headers.get(_ARITHMETIC_HEADER, b"")
    return arithmetic_id.decode() if _ARITHMETIC_ID_PATTERN.fullmatch(arithmetic_id) else ""


def forward_request_notes(
    context: RequestContext, replica: ReplicaEndpoint, upstream_headers: Mapping[bytes, bytes]
) -> None:
    """Name the parts of the request that have no effect at the replica in the headers of the client's response."""
    if replica.adapter.is_native:
        forward_notes(upstream_headers, context.response_headers)
        return
    dropped = format_names(list_dropped_fields(context.fields))
    forward_notes({IGNORED_FIELDS_HEADER: dropped}, context.response_headers)


def forward_notes(
    upstream_headers: Mapping[bytes, bytes], headers: list[tuple[bytes, bytes]]
) -> None:
    """Add the replica's headers about parts of the request without effect to `headers`, once."""
    for name in (IGNORED_FIELDS_HEADER, RELAXED_SCHEMA_HEADER):
        entry = (name, upstream_headers.get(name, b""))
        if _FORWARDED_HEADER_VALUE.fullmatch(entry[1]) and entry not in headers:
            headers.append(entry)


def _trace_headers(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the client's W3C trace headers that are valid."""
    parent, state = headers.get(b"traceparent", b""), headers.get(b"tracestate", b"")
    if not parent or not _TRACEPARENT_PATTERN.fullmatch(parent):
        return []
    trace_headers = [(b"traceparent", parent)]
    return (
        [*trace_headers, (b"tracestate", state)]
        if _TRACESTATE_PATTERN.fullmatch(state)
        else trace_headers
    )


@lru_cache(maxsize=4096)
def _principal_headers(
    tier: int, weight: float, tenant: str, cache_domain: str
) -> tuple[tuple[bytes, bytes], ...]:
    """Build the headers that depend only on the principal."""
    headers = [(b"x-argosy-tier", b"%d" % tier), (b"x-argosy-weight", b"%g" % weight)]
    if tenant:
        headers.append((b"x-argosy-tenant", _quote_value(tenant)))
    if cache_domain:
        headers.append((b"x-argosy-cache-domain", _quote_value(cache_domain)))
    return tuple(headers)


def _quote_value(text: str) -> bytes:
    """Percent-encode a text for a header. Different texts have different encodings."""
    return quote(text, safe=_SAFE_CHARACTERS).encode()
