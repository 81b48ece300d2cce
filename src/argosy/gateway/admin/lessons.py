"""Endpoints for the console's lessons, which run the product's policy code in a short simulation."""

from __future__ import annotations

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.lessons import (
    BatchingFrame,
    BatchingParameters,
    CircuitBreakerFrame,
    CircuitBreakerParameters,
    FairQueueFrame,
    FairQueueParameters,
    KvBlocksFrame,
    KvBlocksParameters,
    LessonRun,
    LimitsFrame,
    LimitsParameters,
    run_batching,
    run_circuit_breaker,
    run_fair_queue,
    run_kv_blocks,
    run_limits,
)

endpoints = AdminEndpoints()
_PATH = "/admin/lessons/"


@endpoints.register("GET", f"{_PATH}kv-blocks", "user", query_type=KvBlocksParameters)
def run_kv_blocks_lesson(scope: AdminScope, request: AdminRequest) -> LessonRun[KvBlocksFrame]:  # noqa: ARG001 - the same for all
    """Run the lesson on the paged KV cache and prefix sharing."""
    return run_kv_blocks(request.query)


@endpoints.register("GET", f"{_PATH}batching", "user", query_type=BatchingParameters)
def run_batching_lesson(scope: AdminScope, request: AdminRequest) -> LessonRun[BatchingFrame]:  # noqa: ARG001 - the same for all
    """Run the lesson on continuous and static batching."""
    return run_batching(request.query)


@endpoints.register("GET", f"{_PATH}fair-queue", "user", query_type=FairQueueParameters)
def run_fair_queue_lesson(scope: AdminScope, request: AdminRequest) -> LessonRun[FairQueueFrame]:  # noqa: ARG001 - the same for all
    """Run the lesson on fair queueing."""
    return run_fair_queue(request.query)


@endpoints.register("GET", f"{_PATH}limits", "user", query_type=LimitsParameters)
def run_limits_lesson(scope: AdminScope, request: AdminRequest) -> LessonRun[LimitsFrame]:  # noqa: ARG001 - the same for all
    """Run the lesson on limits and budgets."""
    return run_limits(request.query)


@endpoints.register("GET", f"{_PATH}circuit-breaker", "user", query_type=CircuitBreakerParameters)
def run_circuit_breaker_lesson(
    scope: AdminScope,  # noqa: ARG001 - the same for all
    request: AdminRequest,
) -> LessonRun[CircuitBreakerFrame]:
    """Run the lesson on the circuit breaker."""
    return run_circuit_breaker(request.query)
