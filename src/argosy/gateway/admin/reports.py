"""Operations that only look: usage, the audit log, what became of a request, and who asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from argosy.gateway.admin.endpoints import CSV, Call, Desk, Operations
from argosy.gateway.admin.schemas import (
    AuditQuery,
    AuditView,
    CallerView,
    OwnReportQuery,
    Page,
    ReportQuery,
    UsageView,
    VerdictView,
    view,
)
from argosy.gateway.auth import allows
from argosy.protocol import ApiError
from argosy.store import UsageFilter, read_groups

api = Operations()


@api.add("GET", "/admin/usage", "viewer", query=ReportQuery)
def report_usage(desk: Desk, call: Call) -> Page[UsageView]:
    """What was used and what it cost, summed by what `group_by` names."""
    return _report(desk, call.query, _where(call.query))


@api.add("GET", "/admin/usage.csv", "viewer", query=ReportQuery, media_type=CSV)
def export_usage(desk: Desk, call: Call) -> Iterator[str]:
    """The same as a table; without `group_by` the ledger's rows, one for each request."""
    query = call.query
    if not query.group_by:
        return desk.usage.csv(_where(query))
    return iter([desk.usage.csv_report(read_groups(query.group_by), _where(query))])


@api.add("GET", "/admin/me", "caller", quick=True)
def get_caller(desk: Desk, call: Call) -> CallerView:  # noqa: ARG001 - the request says it all
    """Who you are here."""
    caller = call.caller
    return CallerView(
        organisation=caller.organisation or None,
        project=caller.project or None,
        key=caller.key or None,
        user=caller.user or None,
        role=caller.role,
        scope=caller.scope,
        models=None if caller.models is None else sorted(caller.models),
    )


@api.add("GET", "/admin/me/usage", "caller", query=OwnReportQuery)
def report_own_usage(desk: Desk, call: Call) -> Page[UsageView]:
    """What your own key or, with a token, you yourself used."""
    caller = call.caller
    own = {"key": caller.key} if caller.key else {"key": "", "user": caller.user}
    where = msgspec.structs.replace(_where(call.query), **own, project=caller.project)
    return _report(desk, call.query, where)


@api.add("GET", "/admin/requests/{id}", "caller", quick=True)
def explain_request(desk: Desk, call: Call) -> dict[str, Any]:
    """What became of a request, step by step: by its id or its answer's, for a while after its end."""
    card = desk.card(call.id)
    if card is not None:
        own = card["caller"]["project"] == call.caller.project
        if own or allows(call.caller, "viewer"):
            return card
    why = "there was none, it is too long ago, or another gateway was asked"
    message = f"Nothing is known here of a request {call.id[:200]!r}: {why}."
    raise ApiError(404, "not_found", message)


@api.add("GET", "/admin/audit", "viewer", query=AuditQuery)
def list_audit_entries(desk: Desk, call: Call) -> Page[AuditView]:
    """Who changed what, newest first."""
    query = call.query
    entries = desk.audit.entries(subject=query.subject, before=query.before, limit=query.limit + 1)
    shown = [view(entry, AuditView) for entry in entries[: query.limit]]
    numbers = [str(entry.entry) for entry in shown]
    return Page(
        data=shown,
        has_more=len(entries) > query.limit,
        first_id=numbers[0] if numbers else None,
        last_id=numbers[-1] if numbers else None,
    )


@api.add("GET", "/admin/audit/verify", "viewer", "gateway")
def verify_audit_log(desk: Desk, call: Call) -> VerdictView:  # noqa: ARG001 - the whole log
    """Whether every entry is as it was written, and none is missing."""
    return view(desk.audit.verify(), VerdictView)


def _where(query: OwnReportQuery) -> UsageFilter:
    asked = msgspec.structs.asdict(query)
    return UsageFilter(**{name: asked.get(name) for name in UsageFilter.__struct_fields__})


def _report(desk: Desk, query: OwnReportQuery, where: UsageFilter) -> Page[UsageView]:
    shown = [view(row, UsageView) for row in desk.usage.report(read_groups(query.group_by), where)]
    return Page(data=shown, has_more=False, first_id=None, last_id=None)
