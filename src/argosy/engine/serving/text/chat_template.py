"""Chat template of a checkpoint: finds it among the files, and renders messages to the text of a prompt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from argosy.engine.serving.rendering.template_renderer import (
    RenderersBusyError,
    TemplateFailedError,
    TemplateLimitError,
    default_renderer,
)
from argosy.engine.serving.text.checkpoint_files import (
    CONFIG_FILE,
    read_json_object,
    read_special_tokens,
)
from argosy.engine.serving.text.gguf_text import read_gguf_chat_template
from argosy.engine.serving.text.template_capabilities import (
    REASONING_VARIABLES,
    TemplateCapabilities,
    parts_of,
)
from argosy.engine.serving.text.template_probe import probe_template
from argosy.protocol import ApiError, invalid_request

TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 4 << 20
NAMED_TEMPLATES_FOLDER = "additional_chat_templates"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
"""File of the processors of older multimodal checkpoints."""
DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"
"""Name of the template for conversations with tools."""
_CONTINUE_MARKER = "ARGOSY_CONTINUES_HERE "
"""Appended to the message to continue. The trailing space shows whether the template trims content."""
_TOOL_VARIABLES = frozenset({"tools", "available_tools"})
_PROBE_TIME = datetime(2026, 1, 1, tzinfo=UTC)
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MESSAGE_TOOLS = re.compile(r"""['"]tools['"] in message|message\[['"]tools['"]\]|message\.tools""")
"""Reads the tools from the system message, as the templates of Phi-4 do."""


def _read_template_sources(
    path: Path, override: str | None = None
) -> tuple[str, str | None, str | None]:
    """Return the origin of a checkpoint's chat templates for messages, and their sources without and with tools.

    A source is None without a template for such conversations.

    `chat_template.jinja` and `additional_chat_templates/` come first, as in transformers, then `chat_template` in
    tokenizer_config.json, then the `chat_template.json` of a processor.

    Args:
        path: Directory of the checkpoint, or GGUF file.
        override: Jinja file that replaces the templates, or the name of one of them for all conversations.

    Raises:
        ValueError: A template cannot be read or selected. The message includes the remedy.
    """
    origin, templates = _read_gguf_templates(path) if path.is_file() else _find_templates(path)
    if override is not None:
        if override in templates:
            return f"{origin} ({override})", templates[override], None
        return override, _read_text(Path(override)), None
    default, tool_use = templates.get(DEFAULT_NAME), templates.get(TOOL_NAME)
    if templates and default is None and tool_use is None:
        raise ValueError(
            f"{origin} has the chat templates {', '.join(sorted(templates))} and no default; "
            "select one with --chat-template"
        )
    return origin, default, tool_use


def _find_templates(path: Path) -> tuple[str, Mapping[str, str]]:
    """Return the first place that has templates, and its templates by name."""
    file, folder = path / TEMPLATE_FILE, path / NAMED_TEMPLATES_FOLDER
    templates = {named.stem: _read_text(named) for named in sorted(folder.glob("*.jinja"))}
    if file.is_file():
        templates[DEFAULT_NAME] = _read_text(file)
    if templates:
        return str(file if file.is_file() else folder), templates
    for json_file in (path / CONFIG_FILE, path / PROCESSOR_TEMPLATE_FILE):
        templates = _parse_templates(json_file)
        if templates:
            return str(json_file), templates
    return "none", {}


def _read_gguf_templates(path: Path) -> tuple[str, Mapping[str, str]]:
    """Return the GGUF file and its templates by name."""
    named = zip((DEFAULT_NAME, TOOL_NAME), read_gguf_chat_template(path), strict=True)
    templates = {name: source for name, source in named if source is not None}
    return (str(path), templates) if templates else ("none", {})


def _parse_templates(file: Path) -> dict[str, str]:
    """Return the templates of the field `chat_template`, a string or a list of named templates."""
    match read_json_object(file).get("chat_template"):
        case None:
            return {}
        case str(source):
            return {DEFAULT_NAME: source}
        case list(items):
            named = [
                (item["name"], item["template"])
                for item in items
                if isinstance(item, dict) and {"name", "template"} <= set(item)
            ]
            if len(named) == len(items) and all(isinstance(text, str) for _, text in named):
                return dict(named)
    raise ValueError(
        f"chat_template of {file} is neither a string nor a list of named templates; correct it"
    )


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"the chat template {file} has more than {MAX_FILE_BYTES >> 20} MiB")
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the chat template {file} cannot be read ({error}); correct it or its permissions"
        ) from error


class ChatTemplate:
    """Chat template of a model, with the variables and filters that Hugging Face templates rely on.

    Other processes compile and render it, within bounds of time, memory and output. Every failure becomes an `ApiError`
    (400) with the template's own message if it raised one. Immutable and thread-safe. `render` blocks, so do not call
    it on an event loop.
    """

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, str],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC).astimezone(),
        tool_source: str | None = None,
        origin: str = "",
    ) -> None:
        """Compile the template.

        Args:
            source: Jinja source. None stands for a model without a template, which rejects every conversation.
            variables: Special tokens that the template may use.
            clock: Source of the local time for `strftime_now`.
            tool_source: Jinja source for conversations with tools. None means `source`.
            origin: File of the template, for messages and logs.

        Raises:
            TemplateLimitError: `source` is too expensive to compile.
            TemplateFailedError: `source` is not a valid template, or cannot be compiled.
        """
        self._variables = dict(variables)
        tool_source = source if tool_source is None else tool_source
        identity = (source, tool_source, sorted(variables.items()))
        self.digest = hashlib.sha256(repr(identity).encode()).hexdigest()
        """SHA-256 of source and variables. Equal for templates that render alike."""
        self.origin = origin
        """File of the template, or `none`."""
        self.source = tool_source
        """Jinja source for conversations with tools, or None for a model without a template."""
        self.default_source = source
        """Jinja source for conversations without tools, or None for a model without a template."""
        self._renderer = default_renderer()
        free_variables = {
            text: self._renderer.find_free_variables(text)
            for text in (source, tool_source)
            if text is not None
        }
        self._names = frozenset(_VARIABLE_NAME.findall(tool_source or ""))
        self._has_message_tools = (
            tool_source is not None
            and bool(_MESSAGE_TOOLS.search(tool_source))
            and "tools" not in free_variables[tool_source]
        )
        """Whether the template finds the tools in the system message only."""
        self._has_developer_role = "developer" in self._names
        self._clock = clock
        self._capabilities = self._probe(source, free_variables)
        self._tool_capabilities = self._capabilities
        if tool_source != source or not _TOOL_VARIABLES.isdisjoint(self._names):
            self._tool_capabilities = self._probe(tool_source, free_variables, with_tools=True)

    @classmethod
    def load(cls, path: Path, override: str | None = None) -> Self:
        """Load the template `override` (a file, or the name of one of the checkpoint's templates), or the checkpoint's.

        Raises:
            ValueError: The template cannot be read or compiled. The message includes the remedy.
        """
        origin, source, tool_source = _read_template_sources(path, override)
        special_tokens = read_special_tokens(path)
        try:
            return cls(source, special_tokens, tool_source=tool_source, origin=origin)
        except (TemplateLimitError, TemplateFailedError) as error:
            raise ValueError(
                f"the chat template of {origin} cannot be compiled: {error}; "
                "correct it or select another one with --chat-template"
            ) from error

    def with_file(self, file: Path) -> ChatTemplate:
        """Return the template of a file, with the special tokens of this one.

        Raises:
            ValueError: The file cannot be read or compiled. The message includes the remedy.
        """
        try:
            return ChatTemplate(_read_text(file), self._variables, self._clock, origin=str(file))
        except (TemplateLimitError, TemplateFailedError) as error:
            raise ValueError(
                f"the chat template {file} cannot be compiled: {error}; correct it"
            ) from error

    def reads(self, name: str) -> bool:
        """Return whether the template mentions `name`, so that a variable of this name may have an effect."""
        return name in self._names

    def capabilities(self, *, with_tools: bool = False) -> TemplateCapabilities:
        """Return what the template takes, in requests with or without tools."""
        return self._tool_capabilities if with_tools else self._capabilities

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        created_at: int | None = None,
    ) -> str:
        """Render a conversation to text. Encode the text without adding special tokens.

        The template sees the `tools` in the shape of the OpenAI API. With `continue_final_message` the text ends where
        the last message's content ends. The request's own variables (`chat_template_kwargs`) are passed in `variables`.
        The template sees the Unix time `created_at` as the current time. None means now.

        Raises:
            ApiError: 400 if the model has no template, or the template cannot render the messages.
        """
        source = self.source if tools else self.default_source
        if source is None:
            raise invalid_request(
                "This model has no chat template, so it cannot take messages. Use /v1/completions, "
                "or start the server with --chat-template.",
                "messages",
                "no_chat_template",
            )
        reserved = sorted(_RESERVED_VARIABLES.intersection(variables or ()))
        if reserved:
            name = f"chat_template_kwargs.{reserved[0]}"
            raise invalid_request(f"'{name}' cannot be set from a request. Remove it.", name)
        template_messages = [self._adapt_message(message) for message in messages]
        if continue_final_message:
            template_messages[-1]["content"] = _mark_end(template_messages[-1].get("content"))
        template_variables = self._template_variables(
            template_messages,
            tools,
            {**(variables or {}), "add_generation_prompt": add_generation_prompt},
        )
        now = self._clock()
        if created_at is not None:
            now = datetime.fromtimestamp(created_at, UTC).astimezone()
        text = self._render_text(source, template_variables, now)
        return _cut_at_marker(text) if continue_final_message else text

    def _template_variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return all variables of one prompt."""
        if tools and self._has_message_tools:
            messages = _attach_tools(messages, tools)
        return {
            **self._variables,
            "tools": list(tools) or None,
            **({"available_tools": list(tools)} if tools else {}),
            "documents": None,
            **variables,
            "messages": messages,
        }

    def _probe(
        self,
        source: str | None,
        free_variables: Mapping[str, frozenset[str]],
        *,
        with_tools: bool = False,
    ) -> TemplateCapabilities:
        """Find what a template takes. One that exceeds a bound even for a probe is assumed to take everything."""
        if source is None:
            return TemplateCapabilities()

        def render(
            messages: Sequence[Mapping[str, Any]],
            tools: Sequence[Mapping[str, Any]],
            variables: Mapping[str, Any],
        ) -> str:
            variables = {"add_generation_prompt": True, **variables}
            try:
                return self._renderer.render(
                    source, self._template_variables(messages, tools, variables), _PROBE_TIME
                )
            except TemplateFailedError:
                return ""

        try:
            names = [name for name in REASONING_VARIABLES if name in free_variables[source]]
            return probe_template(
                render,
                names,
                reads_calls="tool_calls" in _VARIABLE_NAME.findall(source),
                with_tools=with_tools,
            )
        except TemplateLimitError:
            return TemplateCapabilities()

    def _adapt_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the message. The role `developer` becomes `system` for templates that do not know it."""
        if message["role"] == "developer" and not self._has_developer_role:
            return {**message, "role": "system"}
        return dict(message)

    def _render_text(self, source: str, variables: dict[str, Any], now: datetime) -> str:
        try:
            return self._renderer.render(source, variables, now)
        except TemplateFailedError as error:
            raise invalid_request(
                f"The model's chat template cannot render these messages: {error}",
                "messages",
                "chat_template_error",
            ) from error
        except RenderersBusyError as error:
            message = "Too many prompts are being rendered. Try again later."
            raise ApiError(503, "overloaded", message, retry_after_s=1.0) from error
        except TemplateLimitError as error:
            raise invalid_request(
                f"The model's chat template {error} for these messages, so it was stopped. "
                "Shorten the conversation, or use another template.",
                "messages",
                "chat_template_limit_exceeded",
            ) from error


def _cut_at_marker(text: str) -> str:
    """Return the text before the continue marker."""
    marker = _CONTINUE_MARKER.rstrip()
    position = text.rfind(marker)
    if position < 0:
        raise invalid_request(
            "The chat template drops the content of the last message, so it cannot be continued. "
            "Set continue_final_message to false.",
            "continue_final_message",
        )
    content = text[:position]
    return content if text.startswith(_CONTINUE_MARKER, position) else content.rstrip()


def _mark_end(content: str | list[dict[str, str]] | None) -> str | list[dict[str, str]]:
    """Return the content of a message with the continue marker at its end."""
    if not isinstance(content, list):
        return (content or "") + _CONTINUE_MARKER
    *others, last = content or parts_of("")
    return [*others, {**last, "text": last["text"] + _CONTINUE_MARKER}]


def _attach_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with the functions as JSON in the system message, which is added if there is none."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [{**messages[0], "tools": functions}, *messages[1:]]
