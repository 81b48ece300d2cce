"""Translation of requests of Ollama's API to chats and completions.

Facts are from the types of the client `ollama` 0.6.3. Options that concern how Ollama loads a model are ignored.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from argosy.protocol.dialects.chat_request import (
    DEFAULT_EFFORT,
    ExtensionFields,
    MessageList,
    TranslatedRequest,
    drop_unset,
    function_call,
    image_part,
    json_schema_format,
)
from argosy.protocol.dialects.ollama_context import decode_context
from argosy.protocol.dialects.ollama_output import OllamaOutput
from argosy.protocol.errors import invalid_request
from argosy.protocol.openai_requests import JsonObject
from argosy.protocol.parameter_rules import unsupported_parameter
from argosy.protocol.parsing import parse_request_body

_OPTION_NAMES = {
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Names of options in a chat."""
_INTEGER_OPTIONS = frozenset({"num_predict", "seed", "top_k"})
"""Options that clients may write as floats, since some languages have no other numbers."""
_DURATION = re.compile(
    r"([+-]?)((?:\d{1,9}(?:\.\d{1,9})?(?:ns|us|ms|s|m|h))+|\d{1,9}(?:\.\d{1,9})?)"
)
_DURATION_PART = re.compile(r"([\d.]+)(ns|us|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TAG = ":latest"
Clock = Callable[[], float]
"""Returns seconds since the epoch."""


class OllamaFunction(msgspec.Struct, gc=False):
    """Called function, with its arguments as an object."""

    name: str
    arguments: Any = None


class OllamaCall(msgspec.Struct, gc=False):
    """Tool call of a message."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, gc=False):
    """Message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(ExtensionFields, frozen=True, kw_only=True):
    """Fields that `/api/chat` and `/api/generate` share."""

    model: str
    stream: bool | None = None
    format: str | JsonObject | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    """How long the model stays in memory without requests: seconds or a duration. Negative is for ever."""
    truncate: bool | None = None
    """Whether the oldest messages of a conversation that is too long are dropped. Default true."""
    shift: bool | None = None
    """Whether Ollama drops the oldest tokens when the answer fills the context. Named as ignored."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the response is a stream, which is the default."""
        return self.stream is not False

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds of `keep_alive`, infinite if it is negative. None if it is missing or no duration."""
        value = self.keep_alive
        seconds = _parse_duration_s(value) if isinstance(value, str) else value
        return math.inf if seconds is not None and seconds < 0 else seconds

    def create_output(self, endpoint: Literal["chat", "generate"], clock: Clock) -> OllamaOutput:
        """Return the builder of the response."""
        return OllamaOutput(
            *(self.model, endpoint, clock),
            is_streamed=self.is_streamed,
            keep_alive_s=self.keep_alive_s,
        )


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """Body of `POST /api/chat`."""

    messages: list[OllamaMessage] | None = None
    tools: list[JsonObject] | None = None


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """Body of `POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request about one model, which older clients call `name`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None

    def require_model(self) -> str:
        """Return the model's name.

        Raises:
            ApiError: 400 if the request has none.
        """
        name = self.model or self.name
        if not name:
            message = "Missing parameter 'model'. Add it."
            raise invalid_request(message, "model", "missing_required_parameter")
        return strip_tag(name)


def strip_tag(model: str) -> str:
    """Return a model's name without the tag that Ollama's clients add to names without one."""
    return model.removesuffix(_TAG)


def translate_ollama_chat(
    body: bytes, clock: Clock, *, refuse_unknown: bool = False
) -> TranslatedRequest[OllamaOutput]:
    """Translate the body of `POST /api/chat`.

    Args:
        body: The JSON body.
        clock: Returns seconds since the epoch.
        refuse_unknown: Raise an error for unknown fields.

    Raises:
        ApiError: 400 if the body is invalid or needs what no chat can express, 413 if it has too many values.
    """
    request, ignored = parse_request_body(OllamaChatRequest, body, refuse_unknown=refuse_unknown)
    common, unused = _common_fields(request)
    fields = common | {"messages": _translate_messages(request.messages or [])}
    fields["tools"] = request.tools or None
    fields["logprobs"], fields["top_logprobs"] = request.logprobs, request.top_logprobs
    output = request.create_output("chat", clock)
    return TranslatedRequest(body=drop_unset(fields), output=output, ignored=(*ignored, *unused))


def translate_ollama_generate(
    body: bytes, clock: Clock, *, refuse_unknown: bool = False
) -> TranslatedRequest[OllamaOutput]:
    """Translate the body of `POST /api/generate`. Arguments and errors are those of `translate_ollama_chat`."""
    request, ignored = parse_request_body(
        OllamaGenerateRequest, body, refuse_unknown=refuse_unknown
    )
    for name in ("template", "suffix", *(["context"] if request.raw else [])):
        if getattr(request, name):
            raise unsupported_parameter(name, "Send the whole prompt, or use /api/chat.")
    fields, unused = _common_fields(request)
    output = request.create_output("generate", clock)
    if request.raw:
        del fields["truncation"]
        fields["prompt"] = request.prompt or ""
        unused += [name for name in ("logprobs", "images", "system") if getattr(request, name)]
    else:
        output.conversation = fields["messages"] = _build_conversation(request)
        fields["logprobs"], fields["top_logprobs"] = request.logprobs, request.top_logprobs
    return TranslatedRequest(
        body=drop_unset(fields),
        output=output,
        is_completion=bool(request.raw),
        ignored=(*ignored, *unused),
    )


def _build_conversation(request: OllamaGenerateRequest) -> list[dict[str, Any]]:
    """Return the messages of a request: those of its context, and its prompt. A new system prompt replaces the old."""
    if not (request.prompt or request.images):
        return []
    known = decode_context(request.context) if request.context else []
    if request.system:
        system = {"role": "system", "content": request.system}
        known = [system, *(message for message in known if message["role"] != "system")]
    content = _user_content(request.prompt or "", request.images)
    return [*known, {"role": "user", "content": content}]


def _parse_duration_s(text: str) -> float | None:
    """Return the seconds of a duration such as `1h30m` or `-1`; None if the text is none."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    sign, duration = match.groups()
    parts = _DURATION_PART.findall(duration)
    seconds = sum(float(n) * _UNIT_S[unit] for n, unit in parts) if parts else float(duration)
    return -seconds if sign == "-" else seconds


def is_load_request(request: TranslatedRequest[OllamaOutput]) -> bool:
    """Whether a request only asks to load the model, because it has no prompt."""
    return not (request.body.get("messages") or request.body.get("prompt"))


def _common_fields(request: OllamaRequest) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that chats and completions share, and the options without effect."""
    stream = request.is_streamed
    fields: dict[str, Any] = {
        "model": strip_tag(request.model),
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
        "response_format": _translate_format(request.format),
        "truncation": None if request.truncate is False else "auto",
        **_thinking_fields(request),
        **request.extension_fields(),
    }
    unused = [] if request.shift is None else ["shift"]
    for name, value in (request.options or {}).items():
        if name in _INTEGER_OPTIONS and isinstance(value, float) and value.is_integer():
            value = int(value)  # noqa: PLW2901 - the same number
        if name in _OPTION_NAMES:
            fields[_OPTION_NAMES[name]] = value
        elif name == "num_predict":
            fields["max_tokens"] = value if isinstance(value, int) and value >= 0 else None
            fields["clamp_max_tokens"] = True
        else:
            unused.append(f"options.{name}")
    return fields, unused


def _thinking_fields(request: OllamaRequest) -> dict[str, Any]:
    match request.think:
        case None:
            return {}
        case True:
            return {"reasoning_effort": DEFAULT_EFFORT}
        case False:
            return {"reasoning_effort": "none"}
        case effort:
            return {"reasoning_effort": effort}


def _translate_format(value: str | JsonObject | None) -> JsonObject | None:
    match value:
        case None | "":
            return None
        case "json":
            return {"type": "json_object"}
        case dict():
            return json_schema_format(value)
    raise invalid_request("'format' must be \"json\" or a JSON schema.", "format")


def _translate_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Translate the messages. Calls get ids, by which their results refer to them."""
    translated = MessageList()
    unanswered: deque[tuple[str, str]] = deque()
    """Ids and names of calls without a result."""
    num_calls = 0
    for index, message in enumerate(messages):
        content = message.content or ""
        match message.role:
            case "system":
                translated.add_system(content)
            case "user":
                translated.add_user(_user_content(content, message.images))
            case "assistant":
                if message.thinking:
                    translated.add_reasoning(message.thinking)
                if content or not message.tool_calls:
                    translated.add_assistant_text(content)
                for call in message.tool_calls or ():
                    call_id, name = call.id or f"call_{num_calls}", call.function.name
                    num_calls += 1
                    arguments = msgspec.json.encode(call.function.arguments or {}).decode()
                    translated.add_call(function_call(call_id, name, arguments))
                    unanswered.append((call_id, name))
            case "tool":
                call_id = message.tool_call_id or _take_call(unanswered, message.tool_name)
                translated.add_tool_result(call_id, content, message.tool_name)
            case _:
                path = f"messages[{index}].role"
                raise invalid_request(f"'{path}' must be system, user, assistant or tool.", path)
    return translated.messages


def _take_call(unanswered: deque[tuple[str, str]], name: str | None) -> str:
    """Remove the first call without a result, of this name if any has it, and return its id."""
    for entry in unanswered:
        if entry[1] == name:
            unanswered.remove(entry)
            return entry[0]
    return unanswered.popleft()[0] if unanswered else "call_0"


def _user_content(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts = [image_part(f"data:image/png;base64,{image}") for image in images]
    return [{"type": "text", "text": text}, *parts]
