"""Endpoints for golden sets and the results of their runs. `argosy quality` adds both."""

from __future__ import annotations

from msgspec import Raw

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    OrganisationFilter,
    Page,
    QualityRunView,
    QualitySetView,
    to_page,
    to_view,
)

endpoints = AdminEndpoints()


@endpoints.register("GET", "/admin/quality/sets", "viewer", query_type=OrganisationFilter)
def list_golden_sets(scope: AdminScope, request: AdminRequest) -> Page[QualitySetView]:
    """List the versions of golden sets, oldest first, without their items."""
    query = request.query
    found = scope.quality.list_sets(query.organisation, query.page_request)
    return to_page(found, QualitySetView, query)


@endpoints.register("GET", "/admin/quality/runs", "viewer", query_type=OrganisationFilter)
def list_quality_runs(scope: AdminScope, request: AdminRequest) -> Page[QualityRunView]:
    """List the results of runs of golden sets, oldest first."""
    query = request.query
    found = scope.quality.list_runs(query.organisation, page=query.page_request)
    views = [to_view(run, QualityRunView, result=Raw(run.result.encode())) for run in found]
    return to_page(views, QualityRunView, query)
