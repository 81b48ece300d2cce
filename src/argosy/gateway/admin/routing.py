"""Endpoints for routing: a preview of what would happen to a request, and the map of cached prefixes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw
from msgspec.structs import replace

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import Page, build_page
from argosy.gateway.auth import check_role
from argosy.gateway.pool import PrefixMap, build_prefix_map
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.proxy import RoutingPreview
from argosy.protocol import ApiError
from argosy.store import Name, NotFoundError, Tier

endpoints = AdminEndpoints()

Id = Annotated[str, Meta(min_length=1, max_length=200)]
HeaderText = Annotated[str, Meta(max_length=1000)]


class PreviewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request that would be sent, and its sender."""

    request: Raw
    """Body of a chat or a text completion, spelled as its client would send it."""
    headers: Annotated[dict[HeaderText, HeaderText], Meta(max_length=32)] = {}
    """Headers of the request, which routes may match."""
    key: Id | None = None
    """Id of the key that would send it."""
    project: Id | None = None
    """Id of the project that would send it, by a key without restrictions. By default the caller would send it."""
    tier: Tier | None = None
    """Tier of its sender. By default that of the project."""


class PrefixesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the maps of cached prefixes."""

    model: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=64)] = 32
    """Maximum number of prefixes of each map."""


@endpoints.register(
    "POST",
    "/admin/routing/preview",
    "viewer",
    "gateway",
    body_type=PreviewRequest,
    is_nonblocking=True,
    changes_nothing=True,
)
def preview_routing(scope: AdminScope, request: AdminRequest) -> RoutingPreview:
    """Preview which model, version and replica a request would get, and why. Limits are not checked.

    A request of another sender needs the role `operator` of the whole gateway, because the answer reveals whether a
    text is in the cache of that tenant.
    """
    body: PreviewRequest = request.body
    if body.key is None and body.project is None:
        principal = request.principal
    else:
        check_role(request.principal, "operator", "gateway")
        principal = _find_sender(scope, body)
    if principal.role not in {"user", "admin"}:
        principal = replace(principal, role="user")
    if body.tier is not None:
        principal = replace(principal, tier=TIERS.index(body.tier))
    headers = {
        name.lower().encode(errors="replace"): value.encode(errors="replace")
        for name, value in body.headers.items()
    }
    return scope.routing.preview(bytes(body.request), principal, headers)


@endpoints.register(
    "GET",
    "/admin/routing/prefixes",
    "viewer",
    "gateway",
    query_type=PrefixesQuery,
    is_nonblocking=True,
)
async def list_prefixes(scope: AdminScope, request: AdminRequest) -> Page[PrefixMap]:
    """List the prefixes that recent prompts share, and the replicas that have them cached.

    There is a map for each version of each model. Texts are unknown here, because the gateway keeps only their hashes.
    """
    query: PrefixesQuery = request.query
    maps = [await build_prefix_map(pool, query.limit) for pool in scope.replicas.pools(query.model)]
    return build_page(maps)


def _find_sender(scope: AdminScope, body: PreviewRequest) -> Principal:
    """Return the sender that the body names.

    Raises:
        NotFoundError: There is no such key or project.
        ApiError: 409 if it may not send requests any more.
    """
    try:
        principal = scope.authenticator.find_principal(key=body.key, project=body.project)
    except ApiError as error:  # a status of 401 would be about the caller
        raise ApiError(409, error.code, error.message) from error
    if principal is None:
        subject = f"key {body.key!r}" if body.key is not None else f"project {body.project!r}"
        raise NotFoundError(f"There is no {subject}. Use the id from the list of keys or projects.")
    return principal
