"""What a replica is told beside the body: whose request it is, and for ours the answer's identity and the order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

from argosy.gateway.backends import resume_token_counts
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import RequestContext

_COMMON_HEADERS = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
_MODEL_DIGEST_HEADER = b"x-argosy-model-digest"
"""By which a replica of ours tells which model it has, and is told which one has to go on with an answer."""
_MAX_GIVEN_CHOICES = 1000
"""Choices of which a replica is told how many tokens the client gave: a header has no room for any number."""
_DIGEST_PATTERN = re.compile(rb"[0-9a-f]{1,64}")
_TRACEPARENT_PATTERN = re.compile(
    rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,64})?"
)
_TRACESTATE_PATTERN = re.compile(rb"[\t -~]{1,1024}")
"""W3C Trace Context. What is not like this may be more than a replica takes, which would then count as ill."""
_SAFE_CHARACTERS = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")


def build_request_headers(
    context: RequestContext, replica: ReplicaEndpoint, *, resumable: bool
) -> list[tuple[bytes, bytes]]:
    """The headers of a request; `journaled`: a replica of ours is to tell where it can be carried on."""
    exchange, principal = context.exchange, context.principal
    headers = list(_COMMON_HEADERS)
    headers += _trace_headers(exchange.headers)
    if replica.kind != "argosy":
        # Engines know their requests by it, and clients choose theirs: two that are the same would meet there.
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
    if resumable:
        headers.append((b"x-argosy-resume-metadata", b"1"))
        if context.delivered.token_id_pieces:  # it goes on, and its usage with what was told
            headers.append((b"x-argosy-cached-tokens", b"%d" % context.delivered.cached_tokens))
        given = resume_token_counts(context.fields)[:_MAX_GIVEN_CHOICES]
        if given:
            headers.append((b"x-argosy-resume-given", ",".join(map(str, given)).encode()))
    if context.delivered.model_digest:
        headers.append((_MODEL_DIGEST_HEADER, context.delivered.model_digest))
    return headers


def parse_model_digest(headers: Mapping[bytes, bytes]) -> bytes:
    """Which model a replica says that it has; empty where it does not."""
    digest = headers.get(_MODEL_DIGEST_HEADER, b"")
    return digest if _DIGEST_PATTERN.fullmatch(digest) else b""


def _trace_headers(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """What the client says of its trace, as far as it is that."""
    parent, state = headers.get(b"traceparent", b""), headers.get(b"tracestate", b"")
    if not parent or not _TRACEPARENT_PATTERN.fullmatch(parent):
        return []
    found = [(b"traceparent", parent)]
    return [*found, (b"tracestate", state)] if _TRACESTATE_PATTERN.fullmatch(state) else found


@lru_cache(maxsize=4096)
def _principal_headers(
    tier: int, weight: float, tenant: str, cache_domain: str
) -> tuple[tuple[bytes, bytes], ...]:
    """What all requests of a caller are told."""
    headers = [(b"x-argosy-tier", b"%d" % tier), (b"x-argosy-weight", b"%g" % weight)]
    if tenant:
        headers.append((b"x-argosy-tenant", _quote_value(tenant)))
    if cache_domain:
        headers.append((b"x-argosy-cache-domain", _quote_value(cache_domain)))
    return tuple(headers)


def _quote_value(text: str) -> bytes:
    """As a header can carry it, different texts staying different."""
    return quote(text, safe=_SAFE_CHARACTERS).encode()
