"""Operations on API keys. Nobody can make, rotate or revoke a key that may do more than they may themselves.

Flags, which decide what model answers, are given by those who run the whole gateway.
"""

from __future__ import annotations

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    KeyRotation,
    KeyView,
    NewKey,
    NewKeyView,
    Page,
    ProjectFilter,
    get_given_fields,
    to_page,
    to_view,
)
from argosy.gateway.auth import check_grant, check_role

endpoints = AdminEndpoints()

KEYS = "/admin/keys"


@endpoints.register("GET", KEYS, "viewer", query_type=ProjectFilter)
def list_keys(scope: AdminScope, request: AdminRequest) -> Page[KeyView]:
    """Keys, revoked ones too, oldest first."""
    query = request.query
    return to_page(scope.accounts.list_keys(query.project, query.part), KeyView, query)


@endpoints.register("POST", KEYS, "operator", body_type=NewKey)
def create_key(scope: AdminScope, request: AdminRequest) -> NewKeyView:
    """Make a key. The key itself is in this answer, and never again."""
    check_grant(request.principal, request.body.role, request.body.scope, request.body.models)
    if request.body.flags:
        check_role(request.principal, "admin", "gateway")
    made, plain = scope.accounts.create_key(**get_given_fields(request.body), actor=request.actor)
    return to_view(made, NewKeyView, key=plain)


@endpoints.register("GET", KEYS + "/{id}", "viewer")
def get_key(scope: AdminScope, request: AdminRequest) -> KeyView:
    """A key."""
    return to_view(scope.accounts.get_key(request.resource_id), KeyView)


@endpoints.register("POST", KEYS + "/{id}/rotate", "operator", body_type=KeyRotation)
def rotate_key(scope: AdminScope, request: AdminRequest) -> NewKeyView:
    """Make a key in place of another, which works on for a while. The new key itself is in this answer only."""
    old = scope.accounts.get_key(request.resource_id)
    check_grant(request.principal, old.role, old.scope, old.models)
    made, plain = scope.accounts.rotate_key(
        request.resource_id, request.body.overlap_s, actor=request.actor
    )
    return to_view(made, NewKeyView, key=plain)


@endpoints.register("POST", KEYS + "/{id}/revoke", "operator")
def revoke_key(scope: AdminScope, request: AdminRequest) -> KeyView:
    """End a key at once."""
    key = scope.accounts.get_key(request.resource_id)
    check_role(request.principal, key.role, key.scope)
    return to_view(scope.accounts.revoke_key(request.resource_id, actor=request.actor), KeyView)
