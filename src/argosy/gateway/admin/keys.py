"""Endpoints for API keys. Callers cannot create, rotate or revoke a key with more permissions than their own.

Flags select which model answers, so only admins of the whole gateway may set them.
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
    """List keys, including revoked ones, oldest first."""
    query = request.query
    return to_page(scope.accounts.list_keys(query.project, query.page_request), KeyView, query)


@endpoints.register("POST", KEYS, "operator", body_type=NewKey)
def create_key(scope: AdminScope, request: AdminRequest) -> NewKeyView:
    """Create a key. Only this response contains the plain key."""
    check_grant(request.principal, request.body.role, request.body.scope, request.body.models)
    if request.body.flags:
        check_role(request.principal, "admin", "gateway")
    created, plain_key = scope.accounts.create_key(
        **get_given_fields(request.body), actor=request.actor
    )
    return to_view(created, NewKeyView, key=plain_key)


@endpoints.register("GET", KEYS + "/{id}", "viewer")
def get_key(scope: AdminScope, request: AdminRequest) -> KeyView:
    """Get a key."""
    return to_view(scope.accounts.get_key(request.resource_id), KeyView)


@endpoints.register("POST", KEYS + "/{id}/rotate", "operator", body_type=KeyRotation)
def rotate_key(scope: AdminScope, request: AdminRequest) -> NewKeyView:
    """Replace a key, which stays valid for a while. Only this response contains the new plain key."""
    old = scope.accounts.get_key(request.resource_id)
    check_grant(request.principal, old.role, old.scope, old.models)
    created, plain_key = scope.accounts.rotate_key(
        request.resource_id, request.body.overlap_s, actor=request.actor
    )
    return to_view(created, NewKeyView, key=plain_key)


@endpoints.register("POST", KEYS + "/{id}/revoke", "operator")
def revoke_key(scope: AdminScope, request: AdminRequest) -> KeyView:
    """Revoke a key with immediate effect."""
    key = scope.accounts.get_key(request.resource_id)
    check_role(request.principal, key.role, key.scope)
    return to_view(scope.accounts.revoke_key(request.resource_id, actor=request.actor), KeyView)
