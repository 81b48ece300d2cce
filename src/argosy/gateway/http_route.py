"""Routes of the gateway, each with the permission that it needs, and Azure's paths that stand for them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange, ResponseDialect, Route
from argosy.store import Role, RoleScope

ACCESS_ERRORS = {
    "401": "The key is missing or not accepted.",
    "403": "The key, the client's address or the web page's origin does not permit the request.",
    "429": "A limit is reached, or too many wrong keys were sent. Retry after `Retry-After` seconds.",
    "503": "No replica, or not the keys of the token issuer, are available. Retry after `Retry-After` seconds.",
}
"""Descriptions of the errors of all routes for callers with a key, by status, for the OpenAPI document."""
UTILITY_ERRORS = ACCESS_ERRORS | {
    "400": "The request is invalid. `param` names the parameter to change.",
    "404": "The model does not exist.",
    "408": "The request timed out before its first token or before its body was complete.",
    "413": "The body is too large, or the request can never fit a limit.",
    "415": "Compressed bodies are not supported.",
}
GENERATION_ERRORS = UTILITY_ERRORS | {
    "409": "The first request with the idempotency key is still running.",
    "422": "The idempotency key was used with another request.",
    "499": "The request was cancelled.",
    "502": "All attempts at replicas failed.",
    "504": "The deadline of the request passed before the response began.",
}

_AZURE_PATH = re.compile(
    r"/openai/(?:deployments/(.+?)/((?:chat/)?completions|embeddings)|v1/(.+)|((?:models|responses)(?:/.+)?))"
)
"""Names of deployments may have slashes. Older versions of the API have no `v1`."""

Handler = Callable[[HttpExchange, Principal], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HttpRoute(Route):
    """Route for callers with a permission. All routes of a path have the same checks but the role."""

    is_public: bool = False
    """Whether the route needs no authentication. Other routes authenticate before the body is read."""
    role: Role | None = None
    """Lowest role that may call the route. None leaves it to the handler."""
    scope: RoleScope = "organisation"
    """Where the role must be held."""
    is_same_origin: bool = False
    """Whether pages of other origins may not call the route. It accepts sessions of the console."""
    dialect: ResponseDialect | None = None
    """Shape of errors and headers; None for those of OpenAI."""
    open_session: Callable[[], AbstractContextManager[Handler]] | None = None
    """Opens the session of one WebSocket and gives the handler of its messages, each of them a request. None for routes
    without one."""


def to_openai_path(path: str) -> str:
    """Return the path of OpenAI's API for one of Azure's, and other paths unchanged."""
    parsed = _AZURE_PATH.fullmatch(path)
    return path if parsed is None else f"/v1/{parsed[2] or parsed[3] or parsed[4]}"


def find_deployment(path: str) -> str:
    """Return the deployment in one of Azure's paths, which names the model of a request whose body names none.

    Empty for other paths.
    """
    parsed = _AZURE_PATH.fullmatch(path) if path.startswith("/openai/") else None
    return "" if parsed is None else parsed[1] or ""
