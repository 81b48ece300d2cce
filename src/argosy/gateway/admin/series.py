"""Endpoints for time series: of the fleet, a model, a replica or a tenant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.gateway.admin.endpoints import CSV_MEDIA_TYPE, AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.auth import check_role
from argosy.gateway.series_queries import SeriesAnswer
from argosy.process import run_in_daemon_thread
from argosy.store import Timestamp, format_csv, format_csv_time

TENANT_PREFIX = "tenant:"

endpoints = AdminEndpoints()


class SeriesQuery(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"start": "from", "end": "to", "step_s": "step"},
):
    """Parameters of a query for time series."""

    scope: Annotated[str, Meta(max_length=300)] = "fleet"
    """`fleet`, `model:NAME`, `replica:NAME` or `tenant:ID`. An ID is that of a project, or of an organisation for users
    without one."""
    metrics: Annotated[str, Meta(max_length=2000)] = ""
    """Names of metrics, separated by commas. By default all metrics of the scope."""
    start: Timestamp | None = None
    """Begin of the range. By default 15 minutes before its end."""
    end: Timestamp | None = None
    """End of the range. By default the current time."""
    step_s: Annotated[int, Meta(ge=1, le=86400)] | None = None
    """Smallest step in seconds. By default the smallest one with at most 900 steps."""


@endpoints.register("GET", "/admin/series", "viewer", query_type=SeriesQuery, is_nonblocking=True)
async def query_series(scope: AdminScope, request: AdminRequest) -> SeriesAnswer:
    """Query time series, merged over the gateways of the store."""
    query: SeriesQuery = request.query
    await _check_access(scope, request, query.scope)
    metrics = [name.strip() for name in query.metrics.split(",")] if query.metrics else None
    return await scope.series.query(query.scope, metrics, query.start, query.end, query.step_s)


@endpoints.register(
    "GET",
    "/admin/series.csv",
    "viewer",
    query_type=SeriesQuery,
    is_nonblocking=True,
    media_type=CSV_MEDIA_TYPE,
)
async def export_series(scope: AdminScope, request: AdminRequest) -> Iterator[str]:
    """Export time series as CSV, with one row per step. A gap is an empty cell."""
    answer = await query_series(scope, request)
    head = ("time", "scope", *answer.metrics)
    rows = (
        (format_csv_time(answer.start + index * answer.step_s), answer.scope, *values)
        for index, values in enumerate(zip(*answer.metrics.values(), strict=True))
    )
    return iter([format_csv(chain([head], rows))])


async def _check_access(scope: AdminScope, request: AdminRequest, series_scope: str) -> None:
    """Check that the caller may see the series. Only those of its own tenants need no role for the whole gateway.

    Raises:
        ApiError: 403 if they belong to the whole gateway.
        NotFoundError: The tenant belongs to another organisation, or does not exist.
    """
    if scope.organisation_id is None:
        return
    if not series_scope.startswith(TENANT_PREFIX):
        check_role(request.principal, "viewer", "gateway")
    tenant = series_scope.removeprefix(TENANT_PREFIX)
    if tenant != scope.organisation_id:
        await run_in_daemon_thread(scope.accounts.get_project, tenant)
