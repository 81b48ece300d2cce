"""Endpoints of the console's lessons. A package above the gateway offers them, since they also run the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from argosy.gateway.admin.endpoints import AdminEndpoint, AdminEndpoints, AdminRequest, AdminScope


@dataclass(frozen=True, slots=True)
class Lesson:
    """Simulation with which the console shows how a part of the product decides."""

    name: str
    """Last segment of the path."""
    summary: str
    parameters: type[msgspec.Struct]
    """Parameters of the query. All have defaults."""
    result: Any
    """Type of what `run` returns."""
    run: Callable[[Any], Any]
    """Runs the simulation. Called in worker threads."""


def build_lesson_endpoints(lessons: Iterable[Lesson]) -> list[AdminEndpoint]:
    """Return an endpoint for each lesson."""
    endpoints = AdminEndpoints()
    for lesson in lessons:
        _register(endpoints, lesson)
    return list(endpoints)


def _register(endpoints: AdminEndpoints, lesson: Lesson) -> None:
    def run_lesson(scope: AdminScope, request: AdminRequest) -> Any:  # noqa: ANN401, ARG001 - the same for all callers
        return lesson.run(request.query)

    run_lesson.__name__ = f"run_{lesson.name.replace('-', '_')}_lesson"
    run_lesson.__doc__ = lesson.summary
    run_lesson.__annotations__["return"] = lesson.result
    path = f"/admin/lessons/{lesson.name}"
    endpoints.register("GET", path, "user", query_type=lesson.parameters)(run_lesson)
