"""Endpoints for golden sets, the results of their runs, and samples of answers. `argosy quality` adds the sets."""

from __future__ import annotations

import time

import msgspec
from msgspec import Raw

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    OrganisationFilter,
    Page,
    ProjectFilter,
    QualityRunView,
    QualitySampleView,
    QualitySetView,
    SampleSummaries,
    SampleTextsView,
    to_page,
    to_view,
)
from argosy.policy.quality import SampleCounts, compare_samples
from argosy.process import run_in_daemon_thread

endpoints = AdminEndpoints()
SUMMARY_S = 7 * 86_400.0
"""Time of which samples are summarised."""


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


@endpoints.register("GET", "/admin/quality/samples", "viewer", query_type=ProjectFilter)
def list_quality_samples(scope: AdminScope, request: AdminRequest) -> Page[QualitySampleView]:
    """List the grades of sampled answers without their texts, oldest first."""
    query = request.query
    found = scope.quality.list_samples(project=query.project, page=query.page_request)
    return to_page(found, QualitySampleView, query)


@endpoints.register("GET", "/admin/quality/summary", "viewer")
def summarise_quality_samples(scope: AdminScope, request: AdminRequest) -> SampleSummaries:  # noqa: ARG001
    """Return how many sampled answers of the last 7 days passed, by model, version and judge, and compare versions."""
    found = scope.quality.summarise_samples(time.time() - SUMMARY_S)
    counts = [
        SampleCounts(
            model=each.model,
            version=each.version,
            judge=each.judge,
            samples=each.samples,
            passed=each.passed,
            first_at=each.first_at,
        )
        for each in found
    ]
    return SampleSummaries(data=found, comparisons=compare_samples(counts))


@endpoints.register("GET", "/admin/quality/samples/{id}", "operator", is_nonblocking=True)
async def read_quality_sample(scope: AdminScope, request: AdminRequest) -> SampleTextsView:
    """Read the texts of a sampled answer, which the audit log records."""
    quality = scope.quality
    sample = await run_in_daemon_thread(quality.get_sample, request.resource_id)
    await scope.record_content_read(
        request, "sample", sample.id, sample.organisation, project=sample.project
    )
    texts = await run_in_daemon_thread(quality.read_texts, sample)
    return SampleTextsView(**msgspec.structs.asdict(texts))
