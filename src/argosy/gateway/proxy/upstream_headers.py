"""Headers of requests to replicas. Native replicas also get tenant, scheduling and resume headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

from argosy.gateway.backends import list_dropped_fields, resume_token_counts
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import RequestContext
from argosy.gateway.upstream import encode_headers
from argosy.protocol import (
    ADAPTER_HEADER,
    IGNORED_FIELDS_HEADER,
    PUBLIC_MODEL_HEADER,
    RELAXED_SCHEMA_HEADER,
    REPORT_CONTENT,
    REPORT_HEADER,
    format_names,
)

_COMMON_LINES = b"content-type: application/json\r\naccept-encoding: identity\r\n"
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


def encode_request_headers(
    context: RequestContext,
    replica: ReplicaEndpoint,
    *,
    resumable: bool,
    native_headers: tuple[tuple[bytes, bytes], ...],
) -> bytes:
    """Encode the headers of a request to a replica, as lines.

    Args:
        context: The request.
        replica: The replica.
        resumable: Whether a native replica adds resume metadata to its stream.
        native_headers: Headers that a native replica gets in addition.
    """
    exchange, delivered = context.exchange, context.delivered
    headers = _trace_headers(context)
    if replica.kind != "argosy":
        # Not the client's request id. Engines identify requests by this header, and clients may choose equal ids.
        request_id = context.response_id.rpartition("-")[2]
        return b"%bx-request-id: %b\r\n%b" % (
            _COMMON_LINES,
            request_id.encode(),
            encode_headers(headers),
        )
    principal = context.principal
    if context.content is not None:  # explanations would show what is removed
        native_headers = tuple(
            (name, b"1" if name == REPORT_HEADER else value) for name, value in native_headers
        )
    if context.adapter is not None:
        headers.append((PUBLIC_MODEL_HEADER, _quote_value(context.adapter.name)))
    if resumable:
        if delivered.token_id_pieces:  # a resume: the usage continues with the reported value
            headers.append((b"x-argosy-cached-tokens", b"%d" % delivered.cached_tokens))
        given_tokens = resume_token_counts(context.fields)[:_MAX_GIVEN_CHOICES]
        if given_tokens:
            headers.append((b"x-argosy-resume-given", ",".join(map(str, given_tokens)).encode()))
        if delivered.token_id_pieces and context.adapter is not None:
            headers.append((ADAPTER_HEADER, context.adapter.digest.encode()))
    if delivered.arithmetic_id:
        headers.append((_ARITHMETIC_HEADER, delivered.arithmetic_id.encode()))
    fixed = _native_lines(
        (replica.gateway_header, *native_headers),
        principal.tier,
        principal.weight,
        principal.tenant,
        principal.cache_domain,
        resumable=resumable,
    )
    return b"%bx-request-id: %b\r\nx-argosy-response-id: %b %d\r\n%b" % (
        fixed,
        exchange.request_id.encode(),
        context.response_id.encode(),
        context.started_at,
        encode_headers(headers) if headers else b"",
    )


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
    if replica.is_native:
        forward_notes(upstream_headers, context.response_headers)
        return
    dropped = format_names(list_dropped_fields(context.fields))
    forward_notes({IGNORED_FIELDS_HEADER: dropped}, context.response_headers)


def forward_notes(
    upstream_headers: Mapping[bytes, bytes], headers: list[tuple[bytes, bytes]]
) -> None:
    """Add the replica's headers about parts of the request without effect to `headers`, once."""
    for name in (IGNORED_FIELDS_HEADER, RELAXED_SCHEMA_HEADER):
        if name in upstream_headers:
            entry = (name, upstream_headers[name])
            if _FORWARDED_HEADER_VALUE.fullmatch(entry[1]) and entry not in headers:
                headers.append(entry)


def _trace_headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    """Return the W3C trace headers of an attempt: the client's if they are valid, or those of its exported span."""
    trace, headers = context.trace, context.exchange.headers
    if trace.trace_context is not None:
        attempt = len(trace.earlier_attempts) + len(trace.attempts) - 1
        return trace.trace_context.upstream_headers(context.response_id, attempt)
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
def _native_lines(
    headers: tuple[tuple[bytes, bytes], ...],
    tier: int,
    weight: float,
    tenant: str,
    cache_domain: str,
    *,
    resumable: bool,
) -> bytes:
    """Encode the headers to a native replica that all requests of a principal share."""
    lines = [*headers, (b"x-argosy-tier", b"%d" % tier), (b"x-argosy-weight", b"%g" % weight)]
    if tenant:
        lines.append((b"x-argosy-tenant", _quote_value(tenant)))
    if cache_domain:
        lines.append((b"x-argosy-cache-domain", _quote_value(cache_domain)))
    if resumable:
        lines.append((b"x-argosy-resume-metadata", b"1"))
    return _COMMON_LINES + encode_headers(lines)


def _quote_value(text: str) -> bytes:
    """Percent-encode a text for a header. Different texts have different encodings."""
    return quote(text, safe=_SAFE_CHARACTERS).encode()
