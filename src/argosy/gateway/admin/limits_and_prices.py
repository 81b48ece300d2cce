"""Endpoints for limits and prices.

Limits of a whole organisation, and of stored bytes, are set by those who run the gateway, so they need a role for the
whole gateway.
"""

from __future__ import annotations

import time

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    DeletedView,
    LimitView,
    ModelFilter,
    NewLimit,
    NewPrice,
    OwnerFilter,
    Page,
    PriceView,
    get_given_fields,
    to_page,
    to_view,
)
from argosy.store import Price

endpoints = AdminEndpoints()

LIMITS = "/admin/limits"
PRICES = "/admin/prices"


@endpoints.register("GET", LIMITS, "viewer", query_type=OwnerFilter)
def list_limits(scope: AdminScope, request: AdminRequest) -> Page[LimitView]:
    """List limits."""
    query = request.query
    limits = scope.limits_and_prices.list_limits(query.owner_kind, query.owner, query.page_request)
    return to_page(limits, LimitView, query)


@endpoints.register("POST", LIMITS, "operator", body_type=NewLimit)
def set_limit(scope: AdminScope, request: AdminRequest) -> LimitView:
    """Set a limit, replacing the owner's limit for the same unit, window and model."""
    return to_view(
        scope.limits_and_prices.set_limit(**get_given_fields(request.body), actor=request.actor),
        LimitView,
    )


@endpoints.register("DELETE", LIMITS + "/{id}", "operator")
def delete_limit(scope: AdminScope, request: AdminRequest) -> DeletedView:
    """Delete a limit."""
    scope.limits_and_prices.delete_limit(request.resource_id, actor=request.actor)
    return DeletedView(id=request.resource_id)


@endpoints.register("GET", PRICES, "viewer", query_type=ModelFilter)
def list_prices(scope: AdminScope, request: AdminRequest) -> Page[PriceView]:
    """List prices, including past ones."""
    query = request.query
    return to_page(
        scope.limits_and_prices.list_prices(query.model, query.page_request), PriceView, query
    )


@endpoints.register("POST", PRICES, "admin", "gateway", body_type=NewPrice)
def set_price(scope: AdminScope, request: AdminRequest) -> PriceView:
    """Set the token prices of a model from a time on."""
    fields = get_given_fields(request.body) | {
        "since": time.time() if request.body.since is None else request.body.since
    }
    return to_view(
        scope.limits_and_prices.set_price(Price(**fields), actor=request.actor), PriceView
    )
