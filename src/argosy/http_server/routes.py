"""Routes: which handler answers a method at a path, and what it accepts and answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from argosy.protocol import ApiError, Operation

ANY_METHOD = "*"
API_PREFIX = "/v1"
CHAT_COMPLETIONS_PATH = f"{API_PREFIX}/chat/completions"
_OTHER_API_PATHS = re.compile(rf"({API_PREFIX}/(?:responses|messages))(?:/|$)")
"""Paths of OpenAI's Responses API and Anthropic's Messages API, which only gateways have."""
_PARAMETER = re.compile(r"\{(\w+)(\.\.\.)?\}")


@dataclass(frozen=True, slots=True)
class Route:
    """Handler of one method at one path."""

    method: str
    """HTTP method, or `ANY_METHOD` if the handler checks it."""
    path: str
    """Path, or a template. `{id}` stands for a segment, and `{model...}` for one or more."""
    handler: Callable[..., Awaitable[None]]
    operation: Operation | None = None
    """Description for the OpenAPI document. None leaves the route out."""


R = TypeVar("R", bound=Route)


@dataclass(frozen=True, slots=True)
class RouteMatch(Generic[R]):
    """Routes of a path, by method, and the parameters in the path."""

    route: R
    """The first of them. What does not depend on the method is the same for all."""
    label: str
    """Value of the label `route` in metrics."""
    methods: Mapping[str, R]
    parameters: Mapping[str, str]


class RouteTable(Generic[R]):
    """All routes of a server. Of two templates that match a path, the first applies.

    A path that no route has stands for the one with `API_PREFIX` before it, since many clients' base URLs lack it.
    """

    def __init__(self, routes: Iterable[R]) -> None:
        by_path: dict[str, dict[str, R]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        self._fixed: dict[str, RouteMatch[R]] = {}
        self._templates: list[tuple[re.Pattern[str], RouteMatch[R]]] = []
        for path, methods in by_path.items():
            label = path.replace("...", "")
            match = RouteMatch(next(iter(methods.values())), label, methods, {})
            if "{" in path:
                self._templates.append((_compile_template(path), match))
            else:
                self._fixed[path] = match

    def __iter__(self) -> Iterator[R]:
        matches = [*self._fixed.values(), *(match for _, match in self._templates)]
        return (route for match in matches for route in match.methods.values())

    def find(self, path: str) -> RouteMatch[R] | None:
        """Return the routes of a path, or None."""
        fixed = self._fixed.get(path)
        if fixed is not None:
            return fixed
        for pattern, match in self._templates:
            if found := pattern.fullmatch(path):
                return replace(match, parameters=found.groupdict())
        return None if path.startswith(f"{API_PREFIX}/") else self.find(API_PREFIX + path)

    def not_found_error(self, path: str) -> ApiError:
        """Build the 404 error for an unknown path, with the known path that the client probably meant."""
        intended_path = API_PREFIX + path.rpartition(API_PREFIX)[2]
        if self.find(intended_path):
            remedy = f"Use {intended_path[:200]!r}: a client's base URL ends with {API_PREFIX} exactly once"
        elif self.find(path.rstrip("/")):
            remedy = f"Use {path.rstrip('/')[:200]!r}, without a slash at its end"
        elif (
            (api := _OTHER_API_PATHS.match(intended_path))
            and not self.find(api[1])
            and self.find(CHAT_COMPLETIONS_PATH)
        ):
            remedy = f"Send it to a gateway, which has this API, or use {CHAT_COMPLETIONS_PATH!r}"
        else:
            remedy = "See /openapi.json for the paths"
        return ApiError(404, "not_found", f"The path {path[:200]!r} does not exist. {remedy}.")

    def list_operations(self, prefix: str = "") -> list[tuple[str, str, Operation]]:
        """Return path, method and operation of the described routes whose paths have a prefix."""
        return [
            (route.path, route.method, route.operation)
            for route in self
            if route.operation is not None and route.path.startswith(prefix)
        ]


def _compile_template(template: str) -> re.Pattern[str]:
    pattern, position = "", 0
    for parameter in _PARAMETER.finditer(template):
        pattern += re.escape(template[position : parameter.start()])
        pattern += f"(?P<{parameter[1]}>{'.+' if parameter[2] else '[^/]+'})"
        position = parameter.end()
    return re.compile(pattern + re.escape(template[position:]), re.DOTALL)
