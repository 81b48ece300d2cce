"""Operations on limits and prices.

An organisation's own limits are what it was given, so they are set and lifted by those who run the whole gateway.
"""

from __future__ import annotations

import time

from argosy.gateway.admin.endpoints import Call, Desk, Operations
from argosy.gateway.admin.schemas import (
    Deleted,
    LimitView,
    NewLimit,
    NewPrice,
    OfModel,
    OfOwner,
    Page,
    PriceView,
    given,
    page,
    view,
)
from argosy.gateway.auth import check_role
from argosy.gateway.principal import Caller
from argosy.store import OwnerKind, Price

api = Operations()

LIMITS = "/admin/limits"
PRICES = "/admin/prices"


@api.add("GET", LIMITS, "viewer", query=OfOwner)
def list_limits(desk: Desk, call: Call) -> Page[LimitView]:
    """Limits."""
    query = call.query
    found = desk.terms.list_limits(query.owner_kind, query.owner, query.part)
    return page(found, LimitView, query)


@api.add("POST", LIMITS, "operator", body=NewLimit)
def set_limit(desk: Desk, call: Call) -> LimitView:
    """Set a limit, in place of the one that its owner has for the same unit, window and model."""
    _check_owner(call.caller, call.body.owner_kind)
    return view(desk.terms.set_limit(**given(call.body), actor=call.actor), LimitView)


@api.add("DELETE", LIMITS + "/{id}", "operator")
def delete_limit(desk: Desk, call: Call) -> Deleted:
    """Lift a limit."""
    _check_owner(call.caller, desk.terms.get_limit(call.id).owner_kind)
    desk.terms.delete_limit(call.id, actor=call.actor)
    return Deleted(id=call.id)


@api.add("GET", PRICES, "viewer", query=OfModel)
def list_prices(desk: Desk, call: Call) -> Page[PriceView]:
    """Prices, those of the past too."""
    query = call.query
    return page(desk.terms.list_prices(query.model, query.part), PriceView, query)


@api.add("POST", PRICES, "admin", "gateway", body=NewPrice)
def set_price(desk: Desk, call: Call) -> PriceView:
    """Set what a model's tokens cost from a moment on."""
    fields = given(call.body) | {
        "since": time.time() if call.body.since is None else call.body.since
    }
    return view(desk.terms.set_price(Price(**fields), actor=call.actor), PriceView)


def _check_owner(caller: Caller, kind: OwnerKind) -> None:
    if kind == "organisation":
        check_role(caller, "operator", "gateway")
