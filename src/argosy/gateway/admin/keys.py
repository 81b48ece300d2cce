"""Operations on API keys. Nobody can make, rotate or revoke a key that may do more than they may themselves.

Flags, which decide what model answers, are given by those who run the whole gateway.
"""

from __future__ import annotations

from argosy.gateway.admin.endpoints import Call, Desk, Operations
from argosy.gateway.admin.schemas import (
    KeyView,
    NewKey,
    NewKeyView,
    OfProject,
    Page,
    Rotation,
    given,
    page,
    view,
)
from argosy.gateway.auth import check_grant, check_role

api = Operations()

KEYS = "/admin/keys"


@api.add("GET", KEYS, "viewer", query=OfProject)
def list_keys(desk: Desk, call: Call) -> Page[KeyView]:
    """Keys, revoked ones too, oldest first."""
    query = call.query
    return page(desk.accounts.list_keys(query.project, query.part), KeyView, query)


@api.add("POST", KEYS, "operator", body=NewKey)
def create_key(desk: Desk, call: Call) -> NewKeyView:
    """Make a key. The key itself is in this answer, and never again."""
    check_grant(call.caller, call.body.role, call.body.scope, call.body.models)
    if call.body.flags:
        check_role(call.caller, "admin", "gateway")
    made, plain = desk.accounts.create_key(**given(call.body), actor=call.actor)
    return view(made, NewKeyView, key=plain)


@api.add("GET", KEYS + "/{id}", "viewer")
def get_key(desk: Desk, call: Call) -> KeyView:
    """A key."""
    return view(desk.accounts.get_key(call.id), KeyView)


@api.add("POST", KEYS + "/{id}/rotate", "operator", body=Rotation)
def rotate_key(desk: Desk, call: Call) -> NewKeyView:
    """Make a key in place of another, which works on for a while. The new key itself is in this answer only."""
    old = desk.accounts.get_key(call.id)
    check_grant(call.caller, old.role, old.scope, old.models)
    made, plain = desk.accounts.rotate_key(call.id, call.body.overlap_s, actor=call.actor)
    return view(made, NewKeyView, key=plain)


@api.add("POST", KEYS + "/{id}/revoke", "operator")
def revoke_key(desk: Desk, call: Call) -> KeyView:
    """End a key at once."""
    key = desk.accounts.get_key(call.id)
    check_role(call.caller, key.role, key.scope)
    return view(desk.accounts.revoke_key(call.id, actor=call.actor), KeyView)
