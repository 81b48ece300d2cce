"""Read-only endpoints: usage, time series, the audit log, explanations of requests, and the caller's identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.admin.endpoints import (
    CSV_MEDIA_TYPE,
    EXPORT_TIME_LIMIT_S,
    AdminEndpoints,
    AdminRequest,
    AdminScope,
)
from argosy.gateway.admin.schemas import (
    AuditEntryView,
    AuditQuery,
    AuditVerificationView,
    OwnReportQuery,
    Page,
    PrincipalView,
    RequestColumns,
    RequestsQuery,
    RequestTableView,
    UsageExportQuery,
    UsageQuery,
    UsageView,
    split_names,
    to_view,
)
from argosy.gateway.auth import check_role, has_role
from argosy.gateway.principal import describe_principal
from argosy.gateway.series_queries import SeriesAnswer
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import (
    FOCUS_VERSIONS,
    Accounts,
    FocusExport,
    RecordOrder,
    Timestamp,
    UsageFilter,
    UsageRecord,
    format_csv,
    format_csv_time,
    parse_report_groups,
)

endpoints = AdminEndpoints()

_BAD_CURSOR = "before must be the value of `next` of the previous page."
TENANT_PREFIX = "tenant:"
FOCUS_FORMATS = {f"focus-{version}": version for version in FOCUS_VERSIONS}


@endpoints.register("GET", "/admin/usage", "viewer", query_type=UsageQuery)
def report_usage(scope: AdminScope, request: AdminRequest) -> Page[UsageView]:
    """Report usage and cost, summed by the fields in `group_by`."""
    return _build_report_page(scope, request.query, _to_usage_filter(request.query))


@endpoints.register(
    "GET",
    "/admin/usage.csv",
    "viewer",
    query_type=UsageExportQuery,
    query_time_limit_s=EXPORT_TIME_LIMIT_S,
    media_type=CSV_MEDIA_TYPE,
)
def export_usage(scope: AdminScope, request: AdminRequest) -> Iterator[str]:
    """Export usage as CSV. Without `group_by` the table has one row for each request, or the charges of FOCUS."""
    query = request.query
    version = FOCUS_FORMATS.get(query.format)
    if version is not None:
        if query.group_by:
            raise ValueError(f"{query.format} has groups of its own. Leave out group_by.")
        return FocusExport(
            scope.ledger,
            scope.accounts,
            scope.limits_and_prices,
            version,
            _to_usage_filter(query),
            hardware=scope.hardware_costs if scope.organisation_id is None else None,
        ).iter_csv()
    if not query.group_by:
        return scope.ledger.export_csv(_to_usage_filter(query))
    return iter(
        [
            scope.ledger.export_report_csv(
                parse_report_groups(query.group_by), _to_usage_filter(query)
            )
        ]
    )


@endpoints.register("GET", "/admin/me", "user", is_nonblocking=True)
def get_caller(scope: AdminScope, request: AdminRequest) -> PrincipalView:  # noqa: ARG001 - the request suffices
    """Get the identity and role of the caller."""
    principal = request.principal
    models = None if principal.allowed_models is None else sorted(principal.allowed_models)
    return PrincipalView(**describe_principal(principal), models=models)


@endpoints.register("GET", "/admin/me/usage", "user", query_type=OwnReportQuery)
def report_own_usage(scope: AdminScope, request: AdminRequest) -> Page[UsageView]:
    """Report usage of the caller's key, or of the caller's user with a token."""
    principal = request.principal
    owner = {"key": principal.key} if principal.key else {"key": "", "user": principal.user}
    where = msgspec.structs.replace(
        _to_usage_filter(request.query), **owner, project=principal.project
    )
    return _build_report_page(scope, request.query, where)


@endpoints.register("GET", "/admin/requests", "viewer", query_type=RequestsQuery)
def list_requests(scope: AdminScope, request: AdminRequest) -> RequestTableView:
    """List ended requests of the ledger as columns, latest first or sorted by a quantity."""
    query = request.query
    where = _to_usage_filter(query)
    if query.sort != "ended_at":
        return _list_sorted_requests(scope, query, query.sort, where)
    page = scope.ledger.list_latest(
        where,
        status=query.status,
        min_duration_s=query.min_duration_s,
        before=None if query.before is None else _parse_cursor(query.before),
        limit=query.limit,
    )
    is_short = page.before is not None and len(page.records) < query.limit
    return RequestTableView(
        columns=_to_columns(page.records, scope.accounts),
        next=None if page.before is None else f"{page.before[0]!r}/{page.before[1]}",
        searched_from=page.before[0] if page.before is not None and is_short else None,
    )


def _list_sorted_requests(
    scope: AdminScope, query: RequestsQuery, order: RecordOrder, where: UsageFilter
) -> RequestTableView:
    """List the requests of a quantity's order. The cursor is the id of a page's last request."""
    after = None
    if query.before is not None:
        after = scope.ledger.find_record([query.before])
        if after is None:
            raise ValueError(_BAD_CURSOR)
    page = scope.ledger.list_sorted(
        where,
        order,
        is_descending=query.order == "desc",
        status=query.status,
        min_duration_s=query.min_duration_s,
        after=after,
        limit=query.limit,
    )
    return RequestTableView(
        columns=_to_columns(page.records, scope.accounts),
        next=page.records[-1].request if page.has_more else None,
        searched_from=page.searched_from,
    )


def _to_columns(records: Sequence[UsageRecord], accounts: Accounts) -> RequestColumns:
    owners = ("project", "key", "user")
    columns: dict[str, list[Any]] = {
        name: [getattr(record, name) for record in records]
        for name in RequestColumns.__struct_fields__
        if name != "duration_s" and not name.endswith("_name")
    }
    names = accounts.find_names({*chain(*(columns[owner] for owner in owners))})
    for owner in owners:
        columns[f"{owner}_name"] = [names.get(each, each) for each in columns[owner]]
    columns["started_at"] = [round(record.started_at, 3) for record in records]
    columns["duration_s"] = [round(record.ended_at - record.started_at, 4) for record in records]
    return RequestColumns(**columns)


def _parse_cursor(cursor: str) -> tuple[float, str]:
    """Return the end time and the id of the request that ends the previous page. Raises ValueError."""
    ended_at, _, request = cursor.partition("/")
    try:
        return float(ended_at), request
    except ValueError as error:
        raise ValueError(_BAD_CURSOR) from error


@endpoints.register("GET", "/admin/requests/{id}", "user", is_nonblocking=True)
async def explain_request(scope: AdminScope, request: AdminRequest) -> dict[str, Any]:
    """Explain the steps of a recent request, by its id or the id of its response.

    If the gateway that served it is gone, the explanation has only what the ledger knows.
    """
    principal = request.principal
    sees_all = has_role(principal, "viewer")
    explanation = await scope.explain_request(
        request.resource_id, None if sees_all else principal.project
    )
    if explanation is not None and (
        sees_all or explanation["caller"]["project"] == principal.project
    ):
        caller, report = explanation["caller"], explanation.get("replica_report") or {}
        is_own = (caller["key"], caller["user"]) == (principal.key, principal.user)
        if not is_own and (report.get("prompts") or report.get("outputs")):
            await scope.record_content_read(
                request,
                "explanation",
                request.resource_id,
                caller["organisation"],
                project=caller["project"],
            )
        return explanation
    reasons = "The id may be wrong, the request too old, or another gateway may have served it that is gone."
    message = f"There is no record of the request {request.resource_id[:200]!r}. {reasons}"
    raise ApiError(404, "not_found", message)


@endpoints.register("GET", "/admin/audit", "viewer", query_type=AuditQuery)
def list_audit_entries(scope: AdminScope, request: AdminRequest) -> Page[AuditEntryView]:
    """List audit log entries, newest first."""
    query = request.query
    entries = scope.audit_log.list_entries(
        subject=query.subject,
        action_prefix=split_names(query.action),
        before=query.before,
        since=query.since,
        until=query.until,
        limit=query.limit + 1,
    )
    entries, has_more = entries[: query.limit], len(entries) > query.limit
    names = scope.accounts.find_names({*chain(*(entry.mentioned for entry in entries))})
    views = [
        to_view(
            entry,
            AuditEntryView,
            names={each: names[each] for each in entry.mentioned if each in names},
        )
        for entry in entries
    ]
    numbers = [str(entry.entry) for entry in views]
    return Page(
        data=views,
        has_more=has_more,
        first_id=numbers[0] if numbers else None,
        last_id=numbers[-1] if numbers else None,
    )


@endpoints.register(
    "GET", "/admin/audit/verify", "viewer", "gateway", query_time_limit_s=EXPORT_TIME_LIMIT_S
)
def verify_audit_log(scope: AdminScope, request: AdminRequest) -> AuditVerificationView:  # noqa: ARG001 - verifies the whole log
    """Verify that no audit log entry is missing or altered."""
    return to_view(scope.audit_log.verify(), AuditVerificationView)


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


def _to_usage_filter(query: OwnReportQuery | RequestsQuery) -> UsageFilter:
    fields = msgspec.structs.asdict(query)
    return UsageFilter(**{name: fields.get(name) for name in UsageFilter.__struct_fields__})


def _build_report_page(
    scope: AdminScope, query: OwnReportQuery, where: UsageFilter
) -> Page[UsageView]:
    rows = scope.ledger.report(parse_report_groups(query.group_by), where)
    start, end = 0, len(rows)
    if isinstance(query, UsageQuery):
        if query.sort is not None:
            rows.sort(key=attrgetter(query.sort), reverse=query.order == "desc")
        start = query.after
        end = end if query.limit is None else start + query.limit
    views = [to_view(row, UsageView) for row in rows[start:end]]
    has_more = len(rows) > end
    return Page(
        data=views, has_more=has_more, first_id=None, last_id=str(end) if has_more else None
    )
