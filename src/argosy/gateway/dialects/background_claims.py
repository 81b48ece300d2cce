"""Idempotency keys of background responses: a repeated request gets the response of the first one, as it is now."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from argosy.gateway.filters import IDEMPOTENCY_KEY_HEADER, check_existing_claim, scope_key
from argosy.gateway.principal import Principal
from argosy.http_server import JSON_CONTENT_TYPE, HttpExchange
from argosy.protocol.dialects import ResponsesRequest
from argosy.store import CachedResponse, IdempotencyStore, InFlightClaim


class BackgroundClaim(NamedTuple):
    """Claim on a key by the first request that has it, until its response is stored."""

    store: IdempotencyStore
    scoped_key: str
    claim: InFlightClaim

    def settle(self, *, is_started: bool) -> None:
        """Keep the id of the response for repeated requests, or free the key."""
        claim = self.claim
        started = CachedResponse(claim.request_id, claim.request_digest, JSON_CONTENT_TYPE, b"")
        self.store.settle_claim(self.scoped_key, claim, started if is_started else None)


async def claim_background_key(
    store: IdempotencyStore | None,
    exchange: HttpExchange,
    principal: Principal,
    request: ResponsesRequest,
    response_id: str,
) -> BackgroundClaim | str | None:
    """Claim the key of a request for a background response.

    Args:
        store: Keys in use; None to ignore keys.
        exchange: The request.
        principal: Sender of the request.
        request: Its body.
        response_id: Id of the response if the request is the first with its key.

    Returns:
        The claim; the id of the first request's response; or None for a request without a key.

    Raises:
        ApiError: 400 if the key is invalid. 409 while the first request starts its response. 422 if the first request
            was a different one.
    """
    key = exchange.headers.get(IDEMPOTENCY_KEY_HEADER)
    if key is None or store is None:
        return None
    digest = hashlib.sha256(exchange.path.encode() + b"\0" + msgspec.json.encode(request)).digest()
    scoped_key, claim = scope_key(principal, key), InFlightClaim(response_id, digest)
    existing = await store.claim(scoped_key, claim)
    if existing is None:
        return BackgroundClaim(store, scoped_key, claim)
    return check_existing_claim(existing, claim).request_id
