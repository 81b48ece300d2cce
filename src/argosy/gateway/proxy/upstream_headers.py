"""What a replica is told beside the body: whose request it is, and for ours the answer's identity and the order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

from argosy.gateway.backends import resumed
from argosy.gateway.pool import Replica
from argosy.gateway.request_context import Journey

_FIXED = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
_DIGEST = b"x-argosy-model-digest"
"""By which a replica of ours tells which model it has, and is told which one has to go on with an answer."""
_MOST_GIVEN = 1000
"""Choices of which a replica is told how many tokens the client gave: a header has no room for any number."""
_IS_DIGEST = re.compile(rb"[0-9a-f]{1,64}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,64})?")
_TRACESTATE = re.compile(rb"[\t -~]{1,1024}")
"""W3C Trace Context. What is not like this may be more than a replica takes, which would then count as ill."""
_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")


def request_headers(
    journey: Journey, replica: Replica, *, journaled: bool
) -> list[tuple[bytes, bytes]]:
    """The headers of a request; `journaled`: a replica of ours is to tell where it can be carried on."""
    exchange, caller = journey.exchange, journey.caller
    headers = list(_FIXED)
    headers += _trace(exchange.headers)
    if replica.kind != "argosy":
        # Engines know their requests by it, and clients choose theirs: two that are the same would meet there.
        headers.append((b"x-request-id", journey.id.rpartition("-")[2].encode()))
        return headers
    headers.append((b"x-request-id", exchange.request_id.encode()))
    headers.append((b"x-argosy-answer", b"%b %d" % (journey.id.encode(), journey.started_at)))
    headers.append(replica.sender)
    headers += _of(caller.tier, caller.weight, caller.tenant, caller.domain)
    if journaled:
        headers.append((b"x-argosy-journal", b"1"))
        if journey.delivered.tokens:  # it goes on, and its usage with what was told
            headers.append((b"x-argosy-cached", b"%d" % journey.delivered.cached_tokens))
        given = resumed(journey.ask)[:_MOST_GIVEN]
        if given:
            headers.append((b"x-argosy-given", ",".join(map(str, given)).encode()))
    if journey.delivered.digest:
        headers.append((_DIGEST, journey.delivered.digest))
    return headers


def model_digest(told: Mapping[bytes, bytes]) -> bytes:
    """Which model a replica says that it has; empty where it does not."""
    digest = told.get(_DIGEST, b"")
    return digest if _IS_DIGEST.fullmatch(digest) else b""


def _trace(sent: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """What the client says of its trace, as far as it is that."""
    parent, state = sent.get(b"traceparent", b""), sent.get(b"tracestate", b"")
    if not parent or not _TRACEPARENT.fullmatch(parent):
        return []
    found = [(b"traceparent", parent)]
    return [*found, (b"tracestate", state)] if _TRACESTATE.fullmatch(state) else found


@lru_cache(maxsize=4096)
def _of(tier: int, weight: float, tenant: str, domain: str) -> tuple[tuple[bytes, bytes], ...]:
    """What all requests of a caller are told."""
    headers = [(b"x-argosy-tier", b"%d" % tier), (b"x-argosy-weight", b"%g" % weight)]
    if tenant:
        headers.append((b"x-argosy-tenant", _value(tenant)))
    if domain:
        headers.append((b"x-argosy-domain", _value(domain)))
    return tuple(headers)


def _value(text: str) -> bytes:
    """As a header can carry it, different texts staying different."""
    return quote(text, safe=_SAFE).encode()
