"""Endpoints of the response cache: figures by rule, and purging."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import Page, build_page
from argosy.gateway.cache_admin import CacheRuleView, PurgeView
from argosy.process import run_in_daemon_thread
from argosy.store import Name

endpoints = AdminEndpoints()


class PurgeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers to remove."""

    project: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """Id of the project that asked. By default all."""
    model: Name | None = None
    """Name of the model that answered. By default all."""


@endpoints.register("GET", "/admin/cache", "viewer", "gateway", is_nonblocking=True)
def list_cache_rules(scope: AdminScope, request: AdminRequest) -> Page[CacheRuleView]:  # noqa: ARG001 - the scope suffices
    """List the cache rules that have matched requests of this gateway, with hit rates."""
    return build_page(scope.caches.describe_rules())


@endpoints.register(
    "POST",
    "/admin/cache/purge",
    "operator",
    "gateway",
    body_type=PurgeRequest,
    is_nonblocking=True,
)
async def purge_cache(scope: AdminScope, request: AdminRequest) -> PurgeView:
    """Remove kept answers at all gateways of the store. Answers that are being computed are not kept either."""
    body: PurgeRequest = request.body
    tenant = None
    if body.project is not None:
        project = await run_in_daemon_thread(scope.accounts.get_project, body.project)
        tenant = project.organisation, project.id
    result = await scope.caches.purge(tenant, body.model, request.actor)
    if scope.store is not None:
        details = {"project": body.project, "model": body.model, "purged": result.purged}
        subject = body.project or body.model or "all"
        record = scope.accounts.record_decision
        await run_in_daemon_thread(record, "cache.purge", subject, details, request.actor)
    return result
