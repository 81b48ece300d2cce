"""Operations that only look: usage, the audit log, what became of a request, and who asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from argosy.gateway.admin.endpoints import CSV_MEDIA_TYPE, AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    AuditEntryView,
    AuditQuery,
    AuditVerificationView,
    OwnReportQuery,
    Page,
    PrincipalView,
    ReportQuery,
    UsageView,
    to_view,
)
from argosy.gateway.auth import has_role
from argosy.protocol import ApiError
from argosy.store import UsageFilter, parse_report_groups

endpoints = AdminEndpoints()


@endpoints.register("GET", "/admin/usage", "viewer", query_type=ReportQuery)
def report_usage(scope: AdminScope, request: AdminRequest) -> Page[UsageView]:
    """What was used and what it cost, summed by what `group_by` names."""
    return _build_report_page(scope, request.query, _to_usage_filter(request.query))


@endpoints.register(
    "GET", "/admin/usage.csv", "viewer", query_type=ReportQuery, media_type=CSV_MEDIA_TYPE
)
def export_usage(scope: AdminScope, request: AdminRequest) -> Iterator[str]:
    """The same as a table; without `group_by` the ledger's rows, one for each request."""
    query = request.query
    if not query.group_by:
        return scope.ledger.export_csv(_to_usage_filter(query))
    return iter(
        [
            scope.ledger.export_report_csv(
                parse_report_groups(query.group_by), _to_usage_filter(query)
            )
        ]
    )


@endpoints.register("GET", "/admin/me", "caller", is_nonblocking=True)
def get_caller(scope: AdminScope, request: AdminRequest) -> PrincipalView:  # noqa: ARG001 - the request says it all
    """Who you are here."""
    principal = request.principal
    return PrincipalView(
        organisation=principal.organisation or None,
        project=principal.project or None,
        key=principal.key or None,
        user=principal.user or None,
        role=principal.role,
        scope=principal.role_scope,
        models=None if principal.allowed_models is None else sorted(principal.allowed_models),
    )


@endpoints.register("GET", "/admin/me/usage", "caller", query_type=OwnReportQuery)
def report_own_usage(scope: AdminScope, request: AdminRequest) -> Page[UsageView]:
    """What your own key or, with a token, you yourself used."""
    principal = request.principal
    own = {"key": principal.key} if principal.key else {"key": "", "user": principal.user}
    where = msgspec.structs.replace(
        _to_usage_filter(request.query), **own, project=principal.project
    )
    return _build_report_page(scope, request.query, where)


@endpoints.register("GET", "/admin/requests/{id}", "caller", is_nonblocking=True)
def explain_request(scope: AdminScope, request: AdminRequest) -> dict[str, Any]:
    """What became of a request, step by step: by its id or its answer's, for a while after its end."""
    card = scope.explain_request(request.resource_id)
    if card is not None:
        own = card["caller"]["project"] == request.principal.project
        if own or has_role(request.principal, "viewer"):
            return card
    why = "there was none, it is too long ago, or another gateway was asked"
    message = f"Nothing is known here of a request {request.resource_id[:200]!r}: {why}."
    raise ApiError(404, "not_found", message)


@endpoints.register("GET", "/admin/audit", "viewer", query_type=AuditQuery)
def list_audit_entries(scope: AdminScope, request: AdminRequest) -> Page[AuditEntryView]:
    """Who changed what, newest first."""
    query = request.query
    entries = scope.audit_log.list_entries(
        subject=query.subject, before=query.before, limit=query.limit + 1
    )
    shown = [to_view(entry, AuditEntryView) for entry in entries[: query.limit]]
    numbers = [str(entry.entry) for entry in shown]
    return Page(
        data=shown,
        has_more=len(entries) > query.limit,
        first_id=numbers[0] if numbers else None,
        last_id=numbers[-1] if numbers else None,
    )


@endpoints.register("GET", "/admin/audit/verify", "viewer", "gateway")
def verify_audit_log(scope: AdminScope, request: AdminRequest) -> AuditVerificationView:  # noqa: ARG001 - the whole log
    """Whether every entry is as it was written, and none is missing."""
    return to_view(scope.audit_log.verify(), AuditVerificationView)


def _to_usage_filter(query: OwnReportQuery) -> UsageFilter:
    asked = msgspec.structs.asdict(query)
    return UsageFilter(**{name: asked.get(name) for name in UsageFilter.__struct_fields__})


def _build_report_page(
    scope: AdminScope, query: OwnReportQuery, where: UsageFilter
) -> Page[UsageView]:
    shown = [
        to_view(row, UsageView)
        for row in scope.ledger.report(parse_report_groups(query.group_by), where)
    ]
    return Page(data=shown, has_more=False, first_id=None, last_id=None)
