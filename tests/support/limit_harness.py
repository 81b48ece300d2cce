"""Principals with limits, and requests that pass through a limit filter without a server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from argosy.gateway.filters import LimitFilter
from argosy.gateway.pool import Pool
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import CHAT, EMBEDDINGS, RequestContext
from argosy.gateway.request_fields import parse_pooled_fields, parse_request_fields
from argosy.http_server import HttpExchange
from argosy.policy import RequestStatus
from argosy.protocol import ApiError
from argosy.store import (
    AccountSnapshot,
    Limit,
    LimitUnit,
    LimitWindow,
    OwnerKind,
    Price,
    Project,
    QuotaFailureMode,
)

PRINCIPAL = Principal(organisation="org", project="shop", key="k1", user="ann")
OTHER_PRINCIPAL = Principal(organisation="org", project="shop", key="k2", user="bob")
OWNERS: dict[OwnerKind, str] = {
    "organisation": "org",
    "project": "shop",
    "user": "ann",
    "key": "k1",
}


def make_limit(
    unit: LimitUnit,
    amount: int,
    window: LimitWindow | None = "minute",
    owner_kind: OwnerKind = "key",
    model: str | None = None,
) -> Limit:
    """Return a limit of `PRINCIPAL` or of its user, project or organisation."""
    return Limit(
        id=f"{owner_kind}-{unit}-{window}-{model}",
        owner_kind=owner_kind,
        owner=OWNERS[owner_kind],
        unit=unit,
        amount=amount,
        window=None if unit == "concurrency" else window,
        model=model,
    )


def make_snapshot(
    *limits: Limit, failure_mode: QuotaFailureMode = "open", prices: Iterable[Price] = ()
) -> AccountSnapshot:
    """Return a snapshot with one project and these limits and prices."""
    project = Project(
        id="shop", organisation="org", name="shop", quota_failure_mode=failure_mode, created_at=0.0
    )
    return AccountSnapshot(projects=(project,), limits=limits, prices=tuple(prices))


def make_context(
    principal: Principal = PRINCIPAL,
    *,
    prompt_tokens: int = 10,
    max_tokens: int | None = 5,
    choices: int = 1,
) -> RequestContext:
    """Return a request whose prompt is estimated at about `prompt_tokens`."""
    content = "x" * (4 * prompt_tokens - 31)
    body: dict[str, Any] = {"model": "big", "messages": [{"role": "user", "content": content}]}
    body |= {} if max_tokens is None else {"max_tokens": max_tokens}
    body |= {} if choices == 1 else {"n": choices}
    fields = parse_request_fields(json.dumps(body).encode(), "messages")
    pool = Pool("big", [], "round-robin")
    return RequestContext(
        cast("HttpExchange", None), fields, CHAT, pool, "id", principal, principal.tier
    )


def make_embedding_context(principal: Principal = PRINCIPAL) -> RequestContext:
    """Return a request for embeddings of about 10 tokens."""
    body = json.dumps({"model": "big", "input": "x" * 38}).encode()
    fields = parse_pooled_fields(body, EMBEDDINGS.prompt_fields)
    pool = Pool("big", [], "round-robin")
    return RequestContext(
        cast("HttpExchange", None), fields, EMBEDDINGS, pool, "id", principal, principal.tier
    )


def deliver(
    limits: LimitFilter, context: RequestContext, output_tokens: int, prompt_tokens: int = 10
) -> str | None:
    """Report delivered tokens. Returns the stop reason if a limit ends the stream."""
    context.delivered.prompt_tokens = prompt_tokens
    context.delivered.output_tokens += output_tokens
    return limits.on_tokens(context, (0.0,))


def complete(
    limits: LimitFilter,
    context: RequestContext,
    status: RequestStatus = "completed",
) -> None:
    """End an admitted request that was sent to a replica, and whose output the client got."""
    context.status, context.replica_name = status, "replica"
    context.close_bill(is_response_started=True, is_output_sent=True)
    limits.on_complete(context)


async def find_rejection(limits: LimitFilter, context: RequestContext) -> ApiError | None:
    """Return the error with which the filter rejects a request, or None if the request is admitted."""
    try:
        await limits.on_request(context)
    except ApiError as error:
        return error
    return None


async def expect_rejection(limits: LimitFilter, context: RequestContext) -> ApiError:
    """Return the error with which the filter rejects a request. Fail if the request is admitted."""
    error = await find_rejection(limits, context)
    assert error is not None
    return error


async def is_admitted(limits: LimitFilter) -> bool:
    """Send one request and return whether the filter admits it."""
    return await find_rejection(limits, make_context()) is None
