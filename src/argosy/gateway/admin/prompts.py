"""Endpoints for prompts: versions, their labels, and rendering without a model."""

from __future__ import annotations

import msgspec

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    CheckedPromptView,
    DeletedView,
    NewPromptVersion,
    OrganisationFilter,
    Page,
    PromptLabelChange,
    PromptToRender,
    PromptView,
    RenderedPromptView,
    to_page,
    to_view,
)
from argosy.gateway.prompt_rendering import refuse_variables
from argosy.policy.prompts import PromptError, compile_prompt, decode_prompt
from argosy.protocol import ApiError
from argosy.store import ConflictError, Prompt

endpoints = AdminEndpoints()

PROMPTS = "/admin/prompts"
_ID_PREFIX = "prompt_"


@endpoints.register("GET", PROMPTS, "viewer", query_type=OrganisationFilter)
def list_prompts(scope: AdminScope, request: AdminRequest) -> Page[PromptView]:
    """List the versions of prompts in the registry, oldest first, and on the first page those of the fleet file."""
    query = request.query
    found = scope.prompts.list_prompts(query.organisation, query.page_request)
    page = to_page([_view(prompt) for prompt in found], PromptView, query)
    owner = scope.organisation_id or query.organisation
    if query.after is None:
        page.data.extend(
            _view(prompt)
            for prompt in scope.replicas.models.prompts.declared
            if owner in {None, prompt.organisation}
        )
    return page


@endpoints.register("POST", PROMPTS, "operator", body_type=NewPromptVersion)
def add_prompt_version(scope: AdminScope, request: AdminRequest) -> CheckedPromptView:
    """Add a version of a prompt. It has the next number, and its content never changes."""
    body = request.body
    content = msgspec.json.encode(body.content).decode()
    compile_prompt(content)
    if any(
        each.name == body.name and scope.organisation_id in {None, each.organisation}
        for each in scope.replicas.models.prompts.declared
    ):
        raise ConflictError(f"The fleet file has a prompt {body.name!r}. Change it there.")
    added = scope.prompts.add_version(
        body.name,
        content,
        organisation=body.organisation,
        project=body.project,
        labels=body.labels,
        actor=request.actor,
    )
    return _check(added)


@endpoints.register("GET", PROMPTS + "/{id}", "viewer")
def get_prompt(scope: AdminScope, request: AdminRequest) -> CheckedPromptView:
    """Get a version of a prompt."""
    return _check(scope.prompts.get_prompt(request.resource_id))


@endpoints.register("POST", PROMPTS + "/{id}/label", "operator", body_type=PromptLabelChange)
def label_prompt(scope: AdminScope, request: AdminRequest) -> CheckedPromptView:
    """Move a label to a version, or remove it. All gateways render it for new requests within seconds."""
    body = request.body
    changed = scope.prompts.set_label(
        request.resource_id, body.label, removes=body.removes, actor=request.actor
    )
    return _check(changed)


@endpoints.register("DELETE", PROMPTS + "/{id}", "operator")
def delete_prompt(scope: AdminScope, request: AdminRequest) -> DeletedView:
    """Delete a version of a prompt that has no label, or is the only one. Its number is not used again."""
    scope.prompts.delete(request.resource_id, actor=request.actor)
    return DeletedView(id=request.resource_id)


@endpoints.register(
    "POST", PROMPTS + "/render", "viewer", body_type=PromptToRender, changes_nothing=True
)
def render_prompt(scope: AdminScope, request: AdminRequest) -> RenderedPromptView:
    """Render a prompt without sending it to a model."""
    body = request.body
    prompt = _find_prompt(scope, request)
    try:
        compiled = compile_prompt(prompt.content)
        rendered = compiled.render(body.prompt_variables, body.messages)
    except PromptError as error:
        raise refuse_variables(prompt, error) from error
    return RenderedPromptView(
        id=prompt.id,
        prompt=prompt.reference,
        text=rendered.text,
        messages=rendered.messages,
        parameters=compiled.content.parameters,
    )


def _find_prompt(scope: AdminScope, request: AdminRequest) -> Prompt:
    """Return the version with an id, or that which requests of the caller get. Raises ApiError or NotFoundError."""
    body = request.body
    try:
        return scope.replicas.models.prompts.find(
            body.prompt_id, str(body.prompt_version), request.principal
        )
    except ApiError:
        if not body.prompt_id.startswith(_ID_PREFIX):
            raise
        return scope.prompts.get_prompt(body.prompt_id)


def _view(prompt: Prompt) -> PromptView:
    content = None if prompt.deleted_at else decode_prompt(prompt.content)
    return to_view(prompt, PromptView, labels=list(prompt.labels), content=content)


def _check(prompt: Prompt) -> CheckedPromptView:
    compiled = None if prompt.deleted_at else compile_prompt(prompt.content)
    return to_view(
        _view(prompt),
        CheckedPromptView,
        variables=[] if compiled is None else sorted(compiled.variables),
        warnings=[] if compiled is None else list(compiled.warnings),
    )
