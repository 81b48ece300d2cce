"""Translation of requests of Anthropic's Messages API to chats.

Facts are from the types of the SDK `anthropic` 2.12. Tools that the client runs become functions. What needs a server
of Anthropic is ignored and named in a response header, whatever its shape.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.protocol.dialects.anthropic_output import UNSUPPORTED_THREAD, AnthropicOutput
from argosy.protocol.dialects.anthropic_tools import describe_client_tool
from argosy.protocol.dialects.chat_request import (
    DEFAULT_EFFORT,
    ExtensionFields,
    MessageList,
    TranslatedRequest,
    decode_text_file,
    drop_unset,
    function_call,
    function_tool,
    image_part,
    json_schema_format,
)
from argosy.protocol.errors import invalid_request
from argosy.protocol.openai_requests import JsonObject
from argosy.protocol.parsing import convert_field, parse_request_body

BILLING_HEADER_PREFIX = "x-anthropic-billing-header:"
"""Start of a line that Claude Code puts in front of its system prompt. It differs in each request, so with it no
prompt would share a cached prefix with another one."""

ERROR_PREFIX = "Error: "
"""Start of the text of a tool's result with `is_error`. Chats have no field for it."""


class MessageSource(msgspec.Struct, gc=False):
    """Content of an image or document."""

    type: str
    data: str | None = None
    media_type: str | None = None
    url: str | None = None
    content: str | list[MessageBlock] | None = None


class MessageBlock(msgspec.Struct, gc=False):
    """Content block. The fields depend on its type.

    `source` and `content` are converted when the type is known. In results of tools that Anthropic's servers ran, they
    have shapes of their own.
    """

    type: str
    text: str | None = None
    source: Any = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    title: str | None = None


class MessageParam(msgspec.Struct, gc=False):
    """Message of a conversation."""

    role: str
    content: str | list[MessageBlock]


class MessageTool(msgspec.Struct, gc=False):
    """Tool. Another type than `custom` implies the schema, or a tool that Anthropic's servers run."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, gc=False):
    """Which tools the model may or must call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageThinking(msgspec.Struct, gc=False):
    """Whether the model thinks before its answer."""

    type: str
    budget_tokens: int | None = None


class MessageOutputFormat(msgspec.Struct, gc=False):
    """JSON schema of the answer."""

    type: str
    schema: dict[str, Any] | None = None


class MessageOutputConfig(msgspec.Struct, gc=False):
    """Effort and format of the answer."""

    effort: str | None = None
    format: MessageOutputFormat | None = None


class CountTokensRequest(ExtensionFields, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[MessageParam]
    system: str | list[MessageBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = None
    output_config: MessageOutputConfig | None = None
    output_format: MessageOutputFormat | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    thread: Any = None
    """Conversation that the server keeps. Tool runners of the SDKs set it."""
    service_tier: str | None = None
    cache_control: Any = None


def translate_messages_request(
    body: bytes, *, refuse_unknown: bool = False
) -> TranslatedRequest[AnthropicOutput]:
    """Translate the body of `POST /v1/messages`.

    Raises:
        ApiError: 400 if the body is invalid or needs what no chat can express, 413 if it has too many values.
    """
    request, ignored = parse_request_body(MessagesRequest, body, refuse_unknown=refuse_unknown)
    if request.thread:
        message = "This server keeps no threads. Send the whole conversation without 'thread'."
        raise invalid_request(message, "thread", UNSUPPORTED_THREAD)
    translator = _Translator(request)
    thinking = request.thinking
    shows_thinking = thinking is not None and thinking.type != "disabled"
    fields = {
        "model": request.model,
        "messages": translator.messages(),
        "max_tokens": request.max_tokens,
        "clamp_max_tokens": True,
        "stream": bool(request.stream),
        # The tokens of the prompt are needed at the start too.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
        if request.stream
        else None,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "user": (request.metadata or {}).get("user_id"),
        **translator.tool_fields(),
        **_thinking_fields(request),
        **_format_fields(request),
        **translator.prefill_fields(),
        **request.extension_fields(),
    }
    return TranslatedRequest(
        body=drop_unset(fields),
        output=AnthropicOutput(
            request.stop_sequences or (),
            max_tokens=request.max_tokens,
            shows_thinking=shows_thinking,
        ),
        ignored=(*ignored, *translator.ignored),
    )


def translate_count_tokens_request(
    body: bytes, *, refuse_unknown: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate the body of `POST /v1/messages/count_tokens` to one of `/tokenize`.

    Returns:
        The body, and the paths of the fields without effect.

    Raises:
        ApiError: 400 if the body is invalid.
    """
    request, ignored = parse_request_body(CountTokensRequest, body, refuse_unknown=refuse_unknown)
    translator = _Translator(request)
    fields = {
        "model": request.model,
        "messages": translator.messages(),
        "tools": translator.tool_fields().get("tools"),
        "add_generation_prompt": True,
        **translator.prefill_fields(),
    }
    return drop_unset(fields), (*ignored, *translator.ignored)


class _Translator:
    """Translator of one request, which collects what it leaves out."""

    def __init__(self, request: CountTokensRequest) -> None:
        self._request = request
        self._messages = MessageList()
        self.ignored: list[str] = []

    def messages(self) -> list[dict[str, Any]]:
        """Translate the system prompt and the messages."""
        system = self._request.system
        if system is not None:
            self._add_system(system, "system")
        for index, message in enumerate(self._request.messages):
            path = f"messages[{index}]"
            match message.role:
                case "user":
                    self._add_user(message.content, f"{path}.content")
                case "assistant":
                    self._add_assistant(message.content, f"{path}.content")
                case "system":
                    self._add_system(message.content, f"{path}.content")
                case _:
                    text = f"'{path}.role' must be user, assistant or system."
                    raise invalid_request(text, f"{path}.role")
        return self._messages.messages

    def prefill_fields(self) -> dict[str, Any]:
        """Return the fields by which the response continues a last message of the assistant."""
        last = self._messages.messages[-1] if self._messages.messages else {}
        if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
            return {"continue_final_message": True, "add_generation_prompt": False}
        return {}

    def tool_fields(self) -> dict[str, Any]:
        """Translate tools and tool choice.

        Raises:
            ApiError: 400 if the choice names a tool that is ignored or does not exist.
        """
        tools = []
        for index, tool in enumerate(self._request.tools or ()):
            described = _describe_tool(tool)
            if described is None or not tool.name:
                self.ignored.append(f"tools[{index}]")
            else:
                tools.append(function_tool(tool.name, *described, strict=tool.strict))
        choice = self._request.tool_choice
        if choice is None:
            return {"tools": tools or None}
        if choice.disable_parallel_tool_use and tools:
            parallel: bool | None = False
        else:
            parallel = None
        return {
            "tools": tools or None,
            "tool_choice": _translate_tool_choice(choice, tools),
            "parallel_tool_calls": parallel,
        }

    def _add_system(self, content: str | list[MessageBlock], path: str) -> None:
        blocks = [content] if isinstance(content, str) else self._texts(content, path)
        kept = [
            line
            for block in blocks
            for line in block.split("\n")
            if not line.startswith(BILLING_HEADER_PREFIX)
        ]
        if text := "\n".join(kept).strip("\n"):
            self._messages.add_system(text)

    def _texts(self, blocks: list[MessageBlock], path: str) -> list[str]:
        """Return the texts of blocks that may only be text."""
        texts = []
        for index, block in enumerate(blocks):
            if block.type == "text":
                texts.append(block.text or "")
            else:
                self.ignored.append(f"{path}[{index}]")
        return texts

    def _add_user(self, content: str | list[MessageBlock], path: str) -> None:
        if isinstance(content, str):
            self._messages.add_user(content)
            return
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(content):
            block_path = f"{path}[{index}]"
            if block.type == "tool_result":
                parts += self._add_tool_result(block, block_path)
            else:
                parts += self._content_parts(block, block_path)
        if parts or not content:
            self._messages.add_user(_join_text_parts(parts))

    def _add_tool_result(self, block: MessageBlock, path: str) -> list[dict[str, Any]]:
        """Add the text of a tool's result. Returns its images, which only a user message may have."""
        content = block.content
        parts = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else [
                part
                for index, inner in enumerate(_inner_blocks(block, path))
                for part in self._content_parts(inner, f"{path}.content[{index}]")
            ]
        )
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if block.is_error:
            text = f"{ERROR_PREFIX}{text}"
        self._messages.add_tool_result(block.tool_use_id or "", text)
        return [part for part in parts if part["type"] != "text"]

    def _content_parts(self, block: MessageBlock, path: str) -> list[dict[str, Any]]:
        """Translate a block of a user's message. Blocks without effect are noted and give no part."""
        match block.type:
            case "text":
                return [{"type": "text", "text": block.text or ""}]
            case "image" if block.source is not None:
                source = convert_field(MessageSource, block.source, f"{path}.source")
                return [image_part(_image_url(source, path))]
            case "document" if block.source is not None:
                source = convert_field(MessageSource, block.source, f"{path}.source")
                return [{"type": "text", "text": self._document_text(block, source, path)}]
            case "search_result":
                link = convert_field(str, block.source or "", f"{path}.source")
                texts = self._texts(_inner_blocks(block, path), f"{path}.content")
                joined = "\n".join(filter(None, (block.title, link, *texts)))
                return [{"type": "text", "text": joined}]
            case _:
                self.ignored.append(path)
                return []

    def _document_text(self, block: MessageBlock, source: MessageSource, path: str) -> str:
        match source.type, source.content:
            case "text", _:
                text = source.data or ""
            case "base64", _ if source.media_type:
                data = f"data:{source.media_type};base64,{source.data or ''}"
                text = decode_text_file(data, f"{path}.source")
            case "content", str(content):
                text = content
            case "content", list(blocks):
                text = "\n".join(self._texts(blocks, f"{path}.source.content"))
            case kind, _:
                message = f"'{path}' is a document of type '{kind[:64]}'. Send its text."
                raise invalid_request(message, path, "unsupported_parameter")
        return f"{block.title}\n{text}" if block.title else text

    def _add_assistant(self, content: str | list[MessageBlock], path: str) -> None:
        if isinstance(content, str):
            self._messages.add_assistant_text(content)
            return
        for index, block in enumerate(content):
            match block.type:
                case "text":
                    self._messages.add_assistant_text(block.text or "")
                case "thinking":
                    self._messages.add_reasoning(block.thinking or "")
                case "tool_use":
                    arguments = msgspec.json.encode(block.input or {}).decode()
                    self._messages.add_call(
                        function_call(block.id or "", block.name or "", arguments)
                    )
                case "redacted_thinking":
                    pass  # other servers' thinking, which only they can read
                case _:
                    self.ignored.append(f"{path}[{index}]")


def _inner_blocks(block: MessageBlock, path: str) -> list[MessageBlock]:
    """Return the blocks within a block.

    Raises:
        ApiError: 400 if its content is malformed.
    """
    return convert_field(list[MessageBlock], block.content or [], f"{path}.content")


def _describe_tool(tool: MessageTool) -> tuple[str | None, JsonObject] | None:
    """Return description and schema of a tool; None for a tool that Anthropic's servers run."""
    if tool.type is None or tool.type == "custom":
        return tool.description, tool.input_schema or {"type": "object"}
    return describe_client_tool(tool.type)


def _join_text_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return one text for parts that are only text, since servers without vision may not know parts."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _image_url(source: MessageSource, path: str) -> str:
    if source.type == "url" and source.url:
        return source.url
    if source.type == "base64" and source.data:
        return f"data:{source.media_type or 'image/png'};base64,{source.data}"
    message = f"'{path}.source' must be a URL or base64 data."
    raise invalid_request(message, f"{path}.source", "unsupported_parameter")


def _translate_tool_choice(
    choice: MessageToolChoice, tools: list[dict[str, Any]]
) -> str | dict[str, Any] | None:
    match choice.type:
        case "auto":
            return "auto" if tools else None
        case "none":
            return "none" if tools else None
        case "any" if tools:
            return "required"
        case "tool" if choice.name in [tool["function"]["name"] for tool in tools]:
            return {"type": "function", "function": {"name": choice.name}}
        case "any" | "tool":
            message = "'tool_choice' requires a tool that this server does not offer. Add the tool, or use auto."
            raise invalid_request(message, "tool_choice")
    message = "'tool_choice.type' must be auto, any, tool or none."
    raise invalid_request(message, "tool_choice.type")


def _thinking_fields(request: CountTokensRequest) -> dict[str, Any]:
    thinking, config = request.thinking, request.output_config
    effort = None if config is None else config.effort
    if thinking is None:
        return {"reasoning_effort": effort}
    match thinking.type:
        case "disabled":
            return {"reasoning_effort": "none"}
        case "adaptive":
            return {"reasoning_effort": effort}
        case "enabled":
            budget = thinking.budget_tokens
            return {
                "reasoning_effort": effort or DEFAULT_EFFORT,
                "thinking_token_budget": budget if budget and budget > 0 else None,
            }
    message = "'thinking.type' must be enabled, adaptive or disabled."
    raise invalid_request(message, "thinking.type")


def _format_fields(request: CountTokensRequest) -> dict[str, Any]:
    config = request.output_config
    output_format = (config.format if config is not None else None) or request.output_format
    if output_format is None:
        return {}
    if output_format.type != "json_schema" or output_format.schema is None:
        message = "'output_config.format' must have the type json_schema and a schema."
        raise invalid_request(message, "output_config.format")
    return {"response_format": json_schema_format(output_format.schema, strict=True)}
