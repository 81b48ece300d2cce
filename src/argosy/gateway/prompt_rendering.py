"""Prompts of requests: finds the prompt that a request names or a rule selects, and renders it into the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from argosy.deployment import PromptRule
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.model_routes import RequestRule
from argosy.gateway.principal import Principal
from argosy.gateway.request_fields import PROMPT_ID, RequestFields
from argosy.http_server import HttpExchange
from argosy.policy.prompts import PromptContent, PromptError, compile_prompt, is_compiled
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, invalid_request
from argosy.store import PRODUCTION, Prompt

MAX_VARIABLE_BYTES = 1 << 20
"""Maximum size of the variables of a request as JSON."""
PROMPT_HEADER = b"x-argosy-prompt"
"""Response header with the name and number of the version of the prompt, such as `support@3`."""
_VARIABLES = "prompt_variables"
_NULL = Raw(b"null")


class PromptReference(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that name a prompt."""

    prompt_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    """Name of the prompt."""
    prompt_version: int | Annotated[str, Meta(min_length=1, max_length=40)] | None = None
    """Number or label of its version, by default `production`. `latest` is the highest number."""
    prompt_variables: dict[str, Any] = {}
    """Values of its variables, and messages for its placeholders."""


class RenderedBody(NamedTuple):
    """Body of a request with its prompt, and the version that was rendered."""

    body: bytes
    version: str


def parse_reference(raw: Mapping[str, Raw]) -> PromptReference:
    """Return the fields that name a prompt. Raises ApiError 400 if one is invalid, or the variables are too large."""
    if len(bytes(raw.get(_VARIABLES, b""))) > MAX_VARIABLE_BYTES:
        message = f"'{_VARIABLES}' has more than {MAX_VARIABLE_BYTES:,} bytes. Send less."
        raise invalid_request(message, _VARIABLES)
    values = {name: raw[name] for name in PromptReference.__struct_fields__ if name in raw}
    try:
        return msgspec.json.decode(msgspec.json.encode(values), type=PromptReference)
    except msgspec.ValidationError as error:
        param = next((name for name in values if f"$.{name}" in str(error)), PROMPT_ID)
        message = f"'{param}' is invalid: {error}. See the documentation of prompts."
        raise invalid_request(message, param) from error


async def render_prompt(
    models: ModelRouter,
    fields: RequestFields,
    principal: Principal,
    exchange: HttpExchange,
) -> RenderedBody | None:
    """Render the prompt that a request names, or that a rule puts before its messages; None if there is none.

    Raises:
        ApiError: 404 if the prompt does not exist for the caller. 400 if its variables do not fit, or the request
            cannot have it.
    """
    raw = {
        name: value
        for name, value in fields.raw.items()
        if value != _NULL and not (name == "seed" and fields.has_generated_seed)
    }
    reference = parse_reference(raw)
    rule = None
    if models.rules[PromptRule]:
        found = models.find_rule(
            PromptRule, principal, exchange.headers, fields, exchange.request_id
        )
        rule = None if found is None else _read_rule(found, reference)
    name = reference.prompt_id or (None if rule is None else rule.prompt)
    if name is None:
        return None
    version = reference.prompt_version or (PRODUCTION if rule is None else rule.label)
    prompt = models.prompts.find(name, str(version), principal)
    body = await render_fields(prompt, raw, fields.prompt_field, reference.prompt_variables)
    rendered = RenderedBody(body, prompt.reference)
    exchange.extra_headers.append((PROMPT_HEADER, rendered.version.encode()))
    return rendered


def _read_rule(found: RequestRule, reference: PromptReference) -> PromptRule | None:
    """Return the prompt rule of a request, unless the request's own fields leave it nothing to decide."""
    rule = found.config
    assert isinstance(rule, PromptRule)  # noqa: S101 - rules are found by their kind
    if reference.prompt_id is None:
        return None if rule.only_named else rule
    return rule if reference.prompt_id == rule.prompt else None


async def render_fields(
    prompt: Prompt, raw: Mapping[str, Raw], prompt_field: str, variables: Mapping[str, Any]
) -> bytes:
    """Return the body of a request with its prompt and the default parameters of the prompt.

    Raises:
        ApiError: 400 if the variables do not fit, or the request cannot have the prompt.
    """
    try:
        if not is_compiled(prompt.content):
            await run_in_daemon_thread(compile_prompt, prompt.content)
        compiled = compile_prompt(prompt.content)
        messages: Sequence[Raw] = ()
        if prompt_field == "messages":
            messages = msgspec.json.decode(raw.get(prompt_field, b"[]"), type=list[Raw])
        rendered = compiled.render(variables, messages)
    except PromptError as error:
        raise refuse_variables(prompt, error) from error
    except msgspec.ValidationError as error:
        raise invalid_request("'messages' must be a list. Send one.", prompt_field) from error
    fields: dict[str, Any] = {
        **_select_defaults(compiled.content, raw),
        **{name: raw[name] for name in raw if name not in PromptReference.__struct_fields__},
    }
    if prompt_field == "messages":
        system = [] if rendered.text is None else [{"role": "system", "content": rendered.text}]
        fields[prompt_field] = [*system, *rendered.messages]
    elif rendered.text is None:
        message = f"The prompt {prompt.reference} is a chat. Send it to /v1/chat/completions."
        raise invalid_request(message, PROMPT_ID)
    elif bytes(raw.get(prompt_field, b'""')) != b'""':
        message = f"The prompt {prompt.reference} is the whole text of a completion. Send an empty 'prompt', or a chat."
        raise invalid_request(message, prompt_field)
    else:
        fields[prompt_field] = rendered.text
    return msgspec.json.encode(fields)


def refuse_variables(prompt: Prompt, error: PromptError) -> ApiError:
    """Return the response to variables with which a prompt cannot be rendered."""
    message = f"The prompt {prompt.reference} cannot be rendered: {error}"
    return ApiError(400, "invalid_prompt_variables", message, param=_VARIABLES)


def _select_defaults(content: PromptContent, raw: Mapping[str, Raw]) -> dict[str, Any]:
    """Return the parameters of a prompt that the request does not set. A limit under another name counts as set."""
    limits = {"max_tokens", "max_completion_tokens"}
    has_limit = not limits.isdisjoint(raw)
    return {
        name: value
        for name, value in content.parameters.items()
        if name not in raw and not (has_limit and name in limits)
    }
