"""Endpoints of the diagnosis of prompts that miss the prefix cache: reports, and examinations of all prompts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.prefix_doctor import MAX_WATCH_S, PrefixWatch
from argosy.policy.prefix_diagnosis import PrefixReport
from argosy.process import run_in_daemon_thread
from argosy.store import Name

endpoints = AdminEndpoints()
Id = Annotated[str, Meta(min_length=1, max_length=200)]


class PrefixReportsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which reports are listed."""

    project: Id | None = None
    """Id of the project. By default all of the caller's organisation, or of the gateway."""
    model: Name | None = None


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests whose prompts are all examined."""

    project: Id | None = None
    """Id of the project. By default all of the caller's organisation, or of the gateway."""
    model: Name | None = None
    """Name of the model that answers. By default all."""
    duration_s: Annotated[float, Meta(ge=1, le=MAX_WATCH_S)] = 600.0


class PrefixReports(msgspec.Struct, frozen=True, kw_only=True):
    """Reports of one gateway since it started, or since the latest examination of all prompts began."""

    object: Literal["prefix.reports"] = "prefix.reports"
    organisation: str | None
    """Id of the organisation to which the caller is restricted."""
    project: str | None
    """Id of the project that was asked for."""
    sample_ratio: float
    """Share of the time in which prompts are examined without an examination of all."""
    watches: list[PrefixWatch]
    """Examinations of all prompts that run."""
    data: list[PrefixReport]
    """A report for each project and model, those with most input first."""


@endpoints.register(
    "GET",
    "/admin/prefix-doctor",
    "viewer",
    query_type=PrefixReportsQuery,
    is_nonblocking=True,
)
async def list_prefix_reports(scope: AdminScope, request: AdminRequest) -> PrefixReports:
    """List how prompts use the prefix cache at this gateway, and why they miss it."""
    query: PrefixReportsQuery = request.query
    await _check_project(scope, query.project)
    doctor, organisation = scope.prefixes, scope.organisation_id
    return PrefixReports(
        organisation=organisation,
        project=query.project,
        sample_ratio=doctor.sample_ratio,
        watches=doctor.list_watches(organisation),
        data=doctor.list_reports(organisation, query.project, query.model),
    )


@endpoints.register(
    "POST",
    "/admin/prefix-doctor",
    "operator",
    body_type=WatchRequest,
    is_nonblocking=True,
)
async def watch_prefixes(scope: AdminScope, request: AdminRequest) -> PrefixWatch:
    """Examine all prompts of a project or a model at this gateway for a limited time."""
    body: WatchRequest = request.body
    await _check_project(scope, body.project)
    organisation = scope.organisation_id
    watch = scope.prefixes.watch(
        organisation, body.project, body.model, body.duration_s, request.actor
    )
    if scope.store is not None:
        details = {"project": body.project, "model": body.model, "duration_s": body.duration_s}
        subject = body.project or organisation or "all"
        record = scope.accounts.record_decision
        await run_in_daemon_thread(record, "prefix.examine", subject, details, request.actor)
    return watch


async def _check_project(scope: AdminScope, project: str | None) -> None:
    """Raise NotFoundError unless the caller may see the project."""
    if project is not None:
        await run_in_daemon_thread(scope.accounts.get_project, project)
