"""Operations on limits and prices.

An organisation's own limits are what it was given, so they are set and lifted by those who run the whole gateway.
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
from argosy.gateway.auth import check_role
from argosy.gateway.principal import Principal
from argosy.store import OwnerKind, Price

endpoints = AdminEndpoints()

LIMITS = "/admin/limits"
PRICES = "/admin/prices"


@endpoints.register("GET", LIMITS, "viewer", query_type=OwnerFilter)
def list_limits(scope: AdminScope, request: AdminRequest) -> Page[LimitView]:
    """Limits."""
    query = request.query
    found = scope.limits_and_prices.list_limits(query.owner_kind, query.owner, query.part)
    return to_page(found, LimitView, query)


@endpoints.register("POST", LIMITS, "operator", body_type=NewLimit)
def set_limit(scope: AdminScope, request: AdminRequest) -> LimitView:
    """Set a limit, in place of the one that its owner has for the same unit, window and model."""
    _check_owner_kind(request.principal, request.body.owner_kind)
    return to_view(
        scope.limits_and_prices.set_limit(**get_given_fields(request.body), actor=request.actor),
        LimitView,
    )


@endpoints.register("DELETE", LIMITS + "/{id}", "operator")
def delete_limit(scope: AdminScope, request: AdminRequest) -> DeletedView:
    """Lift a limit."""
    _check_owner_kind(
        request.principal, scope.limits_and_prices.get_limit(request.resource_id).owner_kind
    )
    scope.limits_and_prices.delete_limit(request.resource_id, actor=request.actor)
    return DeletedView(id=request.resource_id)


@endpoints.register("GET", PRICES, "viewer", query_type=ModelFilter)
def list_prices(scope: AdminScope, request: AdminRequest) -> Page[PriceView]:
    """Prices, those of the past too."""
    query = request.query
    return to_page(scope.limits_and_prices.list_prices(query.model, query.part), PriceView, query)


@endpoints.register("POST", PRICES, "admin", "gateway", body_type=NewPrice)
def set_price(scope: AdminScope, request: AdminRequest) -> PriceView:
    """Set what a model's tokens cost from a moment on."""
    fields = get_given_fields(request.body) | {
        "since": time.time() if request.body.since is None else request.body.since
    }
    return to_view(
        scope.limits_and_prices.set_price(Price(**fields), actor=request.actor), PriceView
    )


def _check_owner_kind(principal: Principal, owner_kind: OwnerKind) -> None:
    if owner_kind == "organisation":
        check_role(principal, "operator", "gateway")
