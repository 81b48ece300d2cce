"""Endpoints for the settings in force, and for checks of the gateway with remedies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from argosy.deployment import GatewayConfig
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.replica_schemas import to_replica_view
from argosy.gateway.admin.schemas import Page, build_page
from argosy.gateway.auth import is_loopback

endpoints = AdminEndpoints()

MAX_REPORT_AGE_S = 10.0
"""Age of a load report beyond which a replica is routed by guesses."""
HIDDEN = "(hidden)"
_PASSWORDS_IN_URL = re.compile(r"(?<=://)([^/@:]*:)[^@]*(?=@)|([?&]\w*password=)[^&]*")
"""Passwords of URLs, in which `/` and `:` need no escape, and of their parameters."""


class SettingView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="setting"):
    """A setting in force. Passwords and the values of headers are hidden."""

    path: str
    """Names from the root to the setting, with indexes of lists, joined by dots."""
    value: str | int | float | bool | None
    is_default: bool
    """Whether the value is the default. Others come from the declaration of the fleet, or else from the settings file
    or the command line."""


class CheckView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="check"):
    """Result of a check."""

    subject: str
    result: Literal["ok", "warning", "problem"]
    message: str
    """The finding and, unless the result is `ok`, the change that remedies it."""


@endpoints.register("GET", "/admin/settings", "viewer", "gateway", is_nonblocking=True)
def list_settings(scope: AdminScope, request: AdminRequest) -> Page[SettingView]:  # noqa: ARG001 - lists all
    """List the settings in force, with those that differ from their defaults marked."""
    views = [
        SettingView(path=path, value=_hide_secret(path, value), is_default=is_default)
        for path, value, is_default in _flatten(scope.config, GatewayConfig(), "")
    ]
    return build_page(views)


@endpoints.register("GET", "/admin/checks", "viewer", "gateway")
def list_checks(scope: AdminScope, request: AdminRequest) -> Page[CheckView]:  # noqa: ARG001 - runs all
    """Check replicas, settings and the store, with a remedy for each problem.

    The check of the store tries one write that changes nothing.
    """
    config = scope.config
    checks = [*_check_replicas(scope), *_check_access(config), *_check_records(scope, config)]
    return build_page(checks)


def _flatten(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any, bool]]:  # noqa: ANN401 - of any type
    """Yield the path of each setting, its value and whether it is the default. Items have those of their type."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            part = (
                getattr(default, field.name) if type(default) is type(value) else _default_of(field)
            )
            yield from _flatten(
                getattr(value, field.name),
                part,
                f"{path}.{field.encode_name}" if path else field.encode_name,
            )
    elif isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flatten(part, None, f"{path}.{name}")
    elif isinstance(value, (list, tuple)) and value:
        for index, part in enumerate(value):
            yield from _flatten(part, None, f"{path}.{index}")
    else:
        plain = msgspec.to_builtins(value)
        shown = None if isinstance(plain, (dict, list, tuple)) else plain
        yield path, shown, value == default


def _default_of(field: msgspec.structs.FieldInfo) -> Any:  # noqa: ANN401 - of any type
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _hide_secret(path: str, value: Any) -> Any:  # noqa: ANN401 - JSON
    if ".headers." in path:
        return HIDDEN
    return _PASSWORDS_IN_URL.sub(rf"\1\2{HIDDEN}", value) if isinstance(value, str) else value


def _check_replicas(scope: AdminScope) -> Iterator[CheckView]:
    if not scope.replicas.pools():
        message = (
            "No model is served. Add `models` to the settings, or start the fleet's controller."
        )
        yield CheckView(subject="models", result="problem", message=message)
    for pool in scope.replicas.pools():
        views = [to_replica_view(pool, replica) for replica in pool.replicas.values()]
        ready = [view for view in views if view.status == "ready"]
        subject = f"model {pool.model}"
        if not (ready or pool.is_answered_by_others):
            reasons = sorted({view.reason for view in views if view.reason})
            message = f"None of {len(views)} replicas is ready. {' '.join(reasons) or 'Start one.'}"
            yield CheckView(subject=subject, result="problem", message=message)
        elif len(ready) < len(views):
            message = f"{len(ready)} of {len(views)} replicas are ready. See the reasons under Models and replicas."
            yield CheckView(subject=subject, result="warning", message=message)
        else:
            message = f"{len(views)} of {len(views)} replicas are ready."
            yield CheckView(subject=subject, result="ok", message=message)
        silent = [
            view.replica
            for view in ready
            if view.report_age_s is not None and view.report_age_s > MAX_REPORT_AGE_S
        ]
        if silent:
            message = f"{', '.join(silent)} sent no load report for {MAX_REPORT_AGE_S:g} s. Check the network to it."
            yield CheckView(subject=subject, result="warning", message=message)


def _check_access(config: GatewayConfig) -> Iterator[CheckView]:
    is_local = config.uds is not None or is_loopback(config.host)
    if config.auth.mode == "disabled" and not is_local:
        message = (
            "Everybody who reaches the gateway may use it. Set auth.mode to auto, and create keys."
        )
        yield CheckView(subject="auth.mode", result="problem", message=message)
    if config.tls is None and not (is_local or config.auth.trusted_proxies):
        message = "Keys and prompts cross the network as plain text. Set `tls`, or put a proxy with TLS in front."
        yield CheckView(subject="tls", result="warning", message=message)
    if config.console.insecure_http:
        message = "People may sign in to the console over plain HTTP. Use HTTPS, and remove console.insecure_http."
        yield CheckView(subject="console.insecure_http", result="warning", message=message)
    if "*" in config.auth.allowed_origins:
        message = (
            "Pages of all web sites may call the API. Name the origins in auth.allowed_origins."
        )
        yield CheckView(subject="auth.allowed_origins", result="warning", message=message)


def _check_records(scope: AdminScope, config: GatewayConfig) -> Iterator[CheckView]:
    if scope.store is None:
        message = "Without a store there are no keys, limits and prices, and usage is not recorded. Add `store`."
        yield CheckView(subject="store", result="warning", message=message)
    elif problem := scope.store.fleets.find_write_problem():
        yield CheckView(subject="store", result="problem", message=problem)
    if config.log_content:
        message = "Explanations contain prompts and outputs. Remove log_content if users should not see each other's."
        yield CheckView(subject="log_content", result="warning", message=message)
    if not config.explain.max_requests:
        message = "No request can be explained. Raise explain.max_requests."
        yield CheckView(subject="explain.max_requests", result="warning", message=message)
