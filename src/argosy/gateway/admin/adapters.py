"""Endpoints for adapters: the registry, and vLLM's calls that load and unload them in the whole fleet.

An entry of the registry names an adapter by its digest. Replicas load it when a request first names it, so that these
calls send nothing to replicas, and never read a path that a client gives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from argosy.gateway.adapter_rollouts import describe_rollout, read_verdict
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    AdapterChange,
    AdapterView,
    DeletedView,
    LoadAdapter,
    NewAdapterVersion,
    OrganisationFilter,
    Page,
    UnloadAdapter,
    get_given_fields,
    to_page,
    to_view,
)
from argosy.gateway.auth import can_use_model
from argosy.gateway.request_context import GENERATE
from argosy.protocol import invalid_request
from argosy.store import Adapter, ConflictError, NotFoundError

endpoints = AdminEndpoints()

ADAPTERS = "/admin/adapters"
TEXT_MEDIA_TYPE = "text/plain; charset=utf-8"
_DIGEST_PREFIX = "sha256:"


@endpoints.register("GET", ADAPTERS, "viewer", query_type=OrganisationFilter)
def list_adapters(scope: AdminScope, request: AdminRequest) -> Page[AdapterView]:
    """List the adapters of the registry, oldest first, and on the first page those of the fleet file."""
    query, models = request.query, scope.replicas.models
    found = scope.adapters.list_adapters(query.organisation, query.page_request)
    page = to_page(_view_all(scope, found), AdapterView, query)
    owner = scope.organisation_id or query.organisation
    if query.after is None:
        declared = [each for each in models.declared_adapters if owner in {None, each.organisation}]
        page.data.extend(_view_all(scope, declared))
    return page


@endpoints.register("POST", ADAPTERS, "operator", body_type=NewAdapterVersion)
def add_adapter_version(scope: AdminScope, request: AdminRequest) -> AdapterView:
    """Add an adapter, or a candidate version of one."""
    fields = get_given_fields(request.body)
    _check_name(scope, request, fields["name"], fields["base_model"])
    added = scope.adapters.add_version(**fields, actor=request.actor)
    return _view(scope, added)


@endpoints.register("GET", ADAPTERS + "/{id}", "viewer")
def get_adapter(scope: AdminScope, request: AdminRequest) -> AdapterView:
    """Get an adapter."""
    return _view(scope, scope.adapters.get_adapter(request.resource_id))


@endpoints.register("PATCH", ADAPTERS + "/{id}", "operator", body_type=AdapterChange)
def change_adapter(scope: AdminScope, request: AdminRequest) -> AdapterView:
    """Change how an adapter is served."""
    changed = scope.adapters.change_adapter(
        request.resource_id, **get_given_fields(request.body), actor=request.actor
    )
    return _view(scope, changed)


@endpoints.register("POST", ADAPTERS + "/{id}/promote", "operator")
def promote_adapter(scope: AdminScope, request: AdminRequest) -> AdapterView:
    """Let the candidate version answer all requests. Running ones keep the version that they began with."""
    return _view(scope, scope.adapters.promote(request.resource_id, actor=request.actor))


@endpoints.register("DELETE", ADAPTERS + "/{id}", "operator")
def remove_adapter(scope: AdminScope, request: AdminRequest) -> DeletedView:
    """Remove an adapter. Running requests end as they began."""
    scope.adapters.remove(request.resource_id, actor=request.actor)
    return DeletedView(id=request.resource_id)


@endpoints.register(
    "POST",
    "/v1/load_lora_adapter",
    "operator",
    body_type=LoadAdapter,
    media_type=TEXT_MEDIA_TYPE,
)
def load_lora_adapter(scope: AdminScope, request: AdminRequest) -> Iterator[str]:
    """Add an adapter by its digest, or replace its version, for all replicas (vLLM's call).

    It is that of the caller's organisation. An operator of the whole gateway adds it for all callers.
    """
    body = request.body
    if not body.lora_path.startswith(_DIGEST_PREFIX):
        message = (
            "'lora_path' must be the digest of an adapter, such as sha256:..., since a gateway opens no paths. "
            "`argosy models pull` stores an adapter where replicas find it, and prints its digest."
        )
        raise invalid_request(message, "lora_path")
    base_model = body.base_model_name or scope.replicas.models.find_only_model(
        request.principal, GENERATE
    )
    _check_name(scope, request, body.lora_name, base_model)
    known = _find_adapter(scope, body.lora_name)
    if known is not None and known.digest != body.lora_path and not body.load_inplace:
        message = f"The adapter {body.lora_name!r} is already loaded. Set load_inplace to replace its version."
        raise invalid_request(message, "lora_name")
    scope.adapters.add_version(
        body.lora_name,
        base_model,
        body.lora_path,
        replaces=True,
        actor=request.actor,
    )
    return iter([f"Success: LoRA adapter '{body.lora_name}' added successfully."])


@endpoints.register(
    "POST",
    "/v1/unload_lora_adapter",
    "operator",
    body_type=UnloadAdapter,
    media_type=TEXT_MEDIA_TYPE,
)
def unload_lora_adapter(scope: AdminScope, request: AdminRequest) -> Iterator[str]:
    """Remove an adapter by its name or id from all replicas (vLLM's call)."""
    name = request.body.lora_name
    known = _find_adapter(scope, name)
    if known is None:
        raise NotFoundError(f"The adapter {name!r} cannot be found. See /admin/adapters.")
    scope.adapters.remove(known.id, actor=request.actor)
    return iter([f"Success: LoRA adapter '{name}' removed successfully."])


def _view(scope: AdminScope, adapter: Adapter) -> AdapterView:
    return _view_all(scope, [adapter])[0]


def _view_all(scope: AdminScope, adapters: Sequence[Adapter]) -> list[AdapterView]:
    compared = [each.id for each in adapters if each.candidate is not None]
    documents = scope.adapters.read_evidence(compared) if compared else {}
    now, views = time.time(), []
    for adapter in adapters:
        replicas = scope.replicas.models.list_adapter_replicas(adapter)
        verdict = read_verdict(adapter, documents.get(adapter.id), now)
        views.append(
            to_view(
                adapter,
                AdapterView,
                wanted_replicas=sum(each.is_wanted for each in replicas),
                resident_replicas=sum(each.is_loaded for each in replicas),
                size_bytes=max((each.size_bytes for each in replicas), default=0),
                replicas=() if scope.organisation_id else tuple(replicas),
                rollout_status=describe_rollout(adapter, verdict),
                evidence=() if verdict is None else verdict.metrics,
            )
        )
    return views


def _find_adapter(scope: AdminScope, reference: str) -> Adapter | None:
    """Return the adapter with an id, or with a name in the whole reach of the caller's role."""
    return next(
        (
            adapter
            for adapter in scope.adapters.list_adapters()
            if adapter.id == reference
            or (adapter.organisation, adapter.project, adapter.name)
            == (scope.organisation_id, None, reference)
        ),
        None,
    )


def _check_name(scope: AdminScope, request: AdminRequest, name: str, base_model: str) -> None:
    """Check that a request that names an adapter reaches it, and that its base model is served.

    Raises:
        ConflictError: A model or an alias has the name.
        NotFoundError: There is no such base model that the caller may use.
    """
    models = scope.replicas.models
    if models.has_model(name):
        raise ConflictError(f"A model is called {name!r}. Choose another name.")
    if any(
        adapter.name == name and scope.organisation_id in {None, adapter.organisation}
        for adapter in models.declared_adapters
    ):
        raise ConflictError(f"The fleet file has an adapter {name!r}. Change it there.")
    if base_model not in {pool.model for pool in models.pools} or not can_use_model(
        request.principal, base_model
    ):
        raise NotFoundError(f"There is no model {base_model[:200]!r}. See /v1/models.")
