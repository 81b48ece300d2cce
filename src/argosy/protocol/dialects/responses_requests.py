"""Requests of OpenAI's Responses API over HTTP and WebSockets, and their translation to chats.

Facts are from the types of the SDK `openai` 3.54 and from the requests of Codex. Tools that only OpenAI's servers run,
and input items of unknown types, are ignored and named in a response header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from argosy.protocol.dialects.chat_request import (
    ExtensionFields,
    TranslatedRequest,
    drop_unset,
    json_schema_format,
)
from argosy.protocol.dialects.responses_input import InputTranslator, normalize_input
from argosy.protocol.dialects.responses_output import ResponsesOutput
from argosy.protocol.dialects.responses_tools import translate_tool_choice, translate_tools
from argosy.protocol.errors import invalid_request
from argosy.protocol.openai_requests import JsonObject
from argosy.protocol.parsing import parse_request_body

INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
_FIELDS_WITHOUT_EFFECT = ("max_tool_calls", "context_management", "moderation", "access_programs")
_METADATA_LIMIT = 16
MAX_INPUT_ITEMS = 10_000

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=_METADATA_LIMIT),
]
"""Key-value pairs of a response or conversation."""


class ResponsesTextConfig(msgspec.Struct, gc=False):
    """Format of the answer."""

    format: JsonObject | None = None
    verbosity: str | None = None


class ResponsesReasoningConfig(msgspec.Struct, gc=False):
    """Controls of reasoning."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    """The older name of `summary`."""

    @property
    def summary_kind(self) -> str | None:
        """Kind of summary that the request asks for. All kinds are the reasoning itself."""
        return self.summary or self.generate_summary


class ResponsesPrompt(msgspec.Struct, gc=False):
    """Prompt of the server that stands before the input."""

    id: str
    version: str | int | None = None
    variables: JsonObject | None = None
    """Values of its variables: plain data, or parts of type `input_text`."""


class ResponsesRequest(ExtensionFields, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[JsonObject], Meta(max_length=MAX_INPUT_ITEMS)] | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: JsonObject | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | JsonObject | None = None
    include: list[str] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: ResponsesTextConfig | None = None
    reasoning: ResponsesReasoningConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    prompt: ResponsesPrompt | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    """Accepted and not used, as are the next two fields."""
    prompt_cache_options: JsonObject | None = None
    client_metadata: Any = None
    context_management: Any = None
    """Named as ignored, as are the next two fields."""
    moderation: Any = None
    access_programs: Any = None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the response belongs to."""
        if isinstance(self.conversation, dict):
            value = self.conversation.get("id")
            return value if isinstance(value, str) else None
        return self.conversation

    def input_items(self) -> list[JsonObject]:
        """Return the new input as items."""
        return normalize_input(self.input)


class ReasoningCipher(msgspec.Struct, frozen=True):
    """Functions that encrypt reasoning for the client, and decrypt what it sends back."""

    encrypt: Callable[[str], str]
    decrypt: Callable[[str], str | None]
    """Returns None for what this server has not encrypted."""


RequestT = TypeVar("RequestT", bound=ResponsesRequest)


def parse_responses_request(
    body_type: type[RequestT], body: bytes, *, refuse_unknown: bool = False
) -> tuple[RequestT, tuple[str, ...]]:
    """Parse the body of `POST /v1/responses`, or an event with the same fields.

    Returns:
        The request, and the paths of its unknown fields.

    Raises:
        ApiError: 400 if the body is invalid, 413 if it has too many values.
    """
    request, ignored = parse_request_body(body_type, body, refuse_unknown=refuse_unknown)
    if request.previous_response_id is not None and request.conversation is not None:
        message = "'previous_response_id' and 'conversation' exclude each other. Send one of them."
        raise invalid_request(message, "conversation")
    if request.conversation is not None and not request.conversation_id:
        message = "Missing parameter 'conversation.id'. Add it."
        raise invalid_request(message, "conversation.id", "missing_required_parameter")
    return request, ignored


def translate_responses_request(
    request: ResponsesRequest,
    cipher: ReasoningCipher,
    items: Sequence[JsonObject],
    history: Sequence[JsonObject] = (),
    *,
    is_stored: bool = False,
) -> TranslatedRequest[ResponsesOutput]:
    """Translate a request to a chat.

    Args:
        request: The request.
        cipher: Encrypts and decrypts reasoning.
        items: The new input (see `ResponsesRequest.input_items`), without references.
        history: Items of earlier turns, which precede it.
        is_stored: Whether the response will be stored, for the field that says so.

    Raises:
        ApiError: 400 if the request needs what no chat can express.
    """
    tools = translate_tools(request.tools or [])
    translator = InputTranslator(cipher.decrypt)
    messages = translator.translate(request.instructions, history, items)
    include = request.include or ()
    text, reasoning = (
        request.text or ResponsesTextConfig(),
        request.reasoning or ResponsesReasoningConfig(),
    )
    wants_logprobs = INCLUDE_LOGPROBS in include or bool(request.top_logprobs)
    fields = {
        "model": request.model,
        "messages": messages,
        "stream": bool(request.stream),
        "stream_options": {"include_usage": True} if request.stream else None,
        "tools": tools.chat_tools or None,
        "tool_choice": translate_tool_choice(request.tool_choice, tools),
        "parallel_tool_calls": request.parallel_tool_calls if tools.chat_tools else None,
        "response_format": _translate_text_format(text.format),
        "verbosity": text.verbosity,
        "reasoning_effort": reasoning.effort,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": True if wants_logprobs else None,
        "top_logprobs": request.top_logprobs,
        "service_tier": request.service_tier,
        "truncation": "auto" if request.truncation == "auto" else None,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        **_translate_prompt(request.prompt),
        **request.extension_fields(),
    }
    unused = [name for name in _FIELDS_WITHOUT_EFFECT if getattr(request, name) is not None]
    output = ResponsesOutput(
        _describe_request(request) | {"store": is_stored},
        tools,
        encrypt=cipher.encrypt if INCLUDE_ENCRYPTED_REASONING in include else None,
        has_summary=reasoning.summary_kind is not None,
    )
    return TranslatedRequest(
        body=drop_unset(fields),
        output=output,
        ignored=(*unused, *tools.ignored, *translator.ignored),
    )


def _translate_prompt(prompt: ResponsesPrompt | None) -> JsonObject:
    """Return the fields of a chat that name a prompt. Raises ApiError 400 for a picture or a file as variable."""
    if prompt is None:
        return {}
    variables: JsonObject = {}
    for name, value in (prompt.variables or {}).items():
        match value:
            case {"type": "input_text", "text": str(text)}:
                variables[name] = text
            case {"type": "input_image" | "input_file"}:
                message = (
                    f"The variable {name[:100]!r} must be text. Send pictures and files in 'input'."
                )
                raise invalid_request(message, "prompt.variables", "unsupported_parameter")
            case _:
                variables[name] = value
    return {
        "prompt_id": prompt.id,
        "prompt_version": prompt.version,
        "prompt_variables": variables,
    }


def _translate_text_format(text_format: JsonObject | None) -> JsonObject | None:
    match text_format:
        case None:
            return None
        case {"type": "text" | "json_object"}:
            return {"type": text_format["type"]}
        case {"type": "json_schema", "schema": dict(schema)}:
            name, strict = text_format.get("name"), text_format.get("strict")
            return json_schema_format(
                schema,
                name=name if isinstance(name, str) else "response",
                strict=strict if isinstance(strict, bool) else None,
            )
    message = "'text.format' must have the type text, json_object or json_schema, and a schema for the latter."
    raise invalid_request(message, "text.format")


def _describe_request(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    reasoning = request.reasoning or ResponsesReasoningConfig()
    text = request.text or ResponsesTextConfig()
    return {
        "background": bool(request.background),
        "conversation": None
        if request.conversation_id is None
        else {"id": request.conversation_id},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt": request.prompt,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary_kind},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",  # the one that is used
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "auto" if request.truncation == "auto" else "disabled",
        "user": request.user,
    }


class ClientEvent(msgspec.Struct, frozen=True):
    """Event of a client, with the fields of `response.steer`. Others are parsed by their type."""

    type: str
    input: msgspec.Raw = msgspec.Raw(b"null")
    previous_response_id: str | None = None


class CreateResponseEvent(ResponsesRequest, frozen=True, kw_only=True):
    """Event `response.create`: a request for a response that is streamed."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None
    """Whether the response has output. If false, it only keeps its input, which the next response continues."""


def parse_create_event(
    message: bytes, *, refuse_unknown: bool = False
) -> tuple[CreateResponseEvent, tuple[str, ...]]:
    """Parse the event `response.create`.

    Returns:
        The event, which asks for a stream, and the paths of its unknown fields.

    Raises:
        ApiError: 400 if the event is invalid or needs what a connection does not support, 413 if it has too many
            values.
    """
    event, ignored = parse_responses_request(
        CreateResponseEvent, message, refuse_unknown=refuse_unknown
    )
    if event.stream_id is not None:
        text = "A connection runs one response after the other. Remove 'stream_id', or open more connections."
        raise invalid_request(text, "stream_id", "unsupported_parameter")
    if event.background:
        text = "Background responses need no connection. Remove 'background', or send the request by POST."
        raise invalid_request(text, "background", "unsupported_parameter")
    return msgspec.structs.replace(event, stream=True), ignored
