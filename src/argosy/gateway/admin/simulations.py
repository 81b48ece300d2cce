"""Endpoints that simulate: what a change of the fleet does to requests, and the lessons of the console.

Each run is a process of its own with bounds (`SimulationRunner`), and ends when its caller disconnects.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.deployment import ChangeForecast, PoolVariation
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.fleet import Declaration
from argosy.gateway.admin.schemas import Page, build_page
from argosy.gateway.lessons import Lesson, LessonRun
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import default_store_url

endpoints = AdminEndpoints()


class ForecastRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change: a whole declaration, or other settings of one pool."""

    declaration: Declaration | None = None
    variation: PoolVariation | None = None
    since_s: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 86_400
    """How long ago the requests that are replayed begin."""
    seeds: Annotated[int, Meta(ge=1, le=5)] = 3


@endpoints.register(
    "POST",
    "/admin/fleet/forecast",
    "operator",
    "gateway",
    body_type=ForecastRequest,
    is_nonblocking=True,
    is_long_poll=True,
    changes_nothing=True,
)
async def forecast_fleet_change(scope: AdminScope, request: AdminRequest) -> ChangeForecast:
    """Simulate what a change does to the requests of the ledger. Nothing is changed."""
    body, fleet = request.body, scope.declared_fleet
    if (body.declaration is None) == (body.variation is None):
        raise ApiError(400, "invalid_value", "Give either `declaration` or `variation`.")
    prepare = partial(fleet.prepare_forecast, body.declaration, body.variation)
    async with scope.limiter.slot(request.principal):
        present, declared = await run_in_daemon_thread(prepare)
    store = scope.config.store
    with tempfile.NamedTemporaryFile() as file:  # the fleet of `argosy serve` is in no store
        file.write(present.encode())
        file.flush()
        answer = await scope.simulations.run(
            (
                *("argosy.cli", "twin", "plan", "/dev/stdin", "--json", "--present", file.name),
                *("--since", f"{body.since_s}s", "--seeds", str(body.seeds)),
            ),
            declared.encode(),
            request.actor,
            (None if store is None else store.url) or default_store_url(),
        )
    return msgspec.json.decode(answer, type=ChangeForecast)


class RunLesson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lesson, and values of its controls. The others have those of the start."""

    lesson: Annotated[str, Meta(min_length=1, max_length=100)]
    values: Annotated[dict[str, int], Meta(max_length=50)] = {}


@endpoints.register("GET", "/admin/lessons", "user", is_nonblocking=True)
def list_lessons(scope: AdminScope, request: AdminRequest) -> Page[Lesson]:  # noqa: ARG001 - the same for all callers
    """List the lessons of the console with their controls."""
    return build_page(list(scope.lessons))


@endpoints.register(
    "POST",
    "/admin/lessons/run",
    "user",
    body_type=RunLesson,
    is_nonblocking=True,
    is_long_poll=True,
    changes_nothing=True,
)
async def run_lesson(scope: AdminScope, request: AdminRequest) -> LessonRun:
    """Run a lesson: a simulation with the product's own code."""
    body = request.body
    lesson = next((each for each in scope.lessons if each.id == body.lesson), None)
    if lesson is None:
        raise ApiError(404, "not_found", f"There is no lesson '{body.lesson}'.")
    content = msgspec.json.encode(lesson.complete_values(body.values))
    answer = await scope.simulations.run(("argosy.lessons", lesson.id), content, request.actor)
    return msgspec.json.decode(answer, type=LessonRun)
