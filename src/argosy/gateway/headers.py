"""What a replica is told beside the body: whose request it is, and for ours the answer's identity and the order."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from argosy.gateway.journey import Journey
from argosy.gateway.replicas import Replica

_FIXED = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
_TRACE = (b"traceparent", b"tracestate")
_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")


def request_headers(
    journey: Journey, replica: Replica, *, journaled: bool
) -> list[tuple[bytes, bytes]]:
    """The headers of a request; `journaled`: a replica of ours is to tell where it can be carried on."""
    exchange, caller = journey.exchange, journey.caller
    headers = [*_FIXED, (b"x-request-id", exchange.request_id.encode())]
    headers += [(name, exchange.headers[name]) for name in _TRACE if name in exchange.headers]
    if replica.kind != "argosy":
        return headers
    headers.append((b"x-argosy-answer", journey.identity))
    headers += _of(caller.tier, caller.weight, caller.tenant, caller.domain)
    if journaled:
        headers.append((b"x-argosy-journal", b"1"))
    return headers


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
