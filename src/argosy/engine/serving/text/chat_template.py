"""Chat template of a checkpoint: renders messages to the text that the model was trained on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from argosy.engine.serving.text.checkpoint_files import read_json_object
from argosy.engine.serving.text.tokenizer import read_special_tokens
from argosy.protocol import ApiError, invalid_request

_CONTINUE_MARKER = "ARGOSY_CONTINUES_HERE "
"""Appended to the message to continue. The trailing space shows whether the template trims content."""
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MESSAGE_TOOLS = re.compile(r"""['"]tools['"] in message|message\[['"]tools['"]\]|message\.tools""")
"""Reads the tools from the system message, as the templates of Phi-4 do."""


class ChatTemplate:
    """A Jinja template with the variables and filters that Hugging Face templates rely on.

    Rendering runs in an immutable sandbox. Every failure becomes an `ApiError` (400) with the template's own message if
    it raised one. Immutable and thread-safe.
    """

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, str],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC).astimezone(),
        tool_source: str | None = None,
    ) -> None:
        """Compile the template.

        Args:
            source: Jinja source. None stands for a model without a template, which rejects every conversation.
            variables: Special tokens that the template may use.
            clock: Source of the local time for `strftime_now`.
            tool_source: Jinja source for conversations with tools. None means `source`.

        Raises:
            jinja2.TemplateSyntaxError: `source` is not a valid template.
        """
        self._variables = dict(variables)
        tool_source = source if tool_source is None else tool_source
        identity = (source, tool_source, sorted(variables.items()))
        self.digest = hashlib.sha256(repr(identity).encode()).hexdigest()
        """SHA-256 of source and variables. Equal for templates that render alike."""
        self.source = tool_source
        """Jinja source for conversations with tools, or None for a model without a template."""
        self._names = frozenset(_VARIABLE_NAME.findall(tool_source or ""))
        self._has_message_tools = _reads_message_tools(tool_source or "")
        self._has_developer_role = "developer" in self._names
        self._clock = clock
        environment = _environment()
        self._template = None if source is None else environment.from_string(source)
        self._tool_template = (
            self._template
            if tool_source is None or tool_source == source
            else environment.from_string(tool_source)
        )

    @classmethod
    def load(cls, path: Path, override: Path | None = None) -> Self:
        """Load the template from the file `override`, else from the checkpoint directory `path`.

        Looks for `chat_template.jinja`, then for `chat_template` in `tokenizer_config.json`. The latter is a string, or
        a list of named templates of which "default" is used, and "tool_use" for conversations with tools.

        Raises:
            ValueError: The template cannot be read. The message includes the remedy.
        """
        origin, source, tool_source = _find_source(path, override)
        try:
            return cls(source, read_special_tokens(path), tool_source=tool_source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template of {origin} is not valid Jinja (line {error.lineno}: "
                f"{error.message}); correct it or select another one with --chat-template"
            ) from error

    def reads(self, name: str) -> bool:
        """Return whether the template mentions `name`, so that a variable of this name may have an effect."""
        return name in self._names

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
        if self._template is None:
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
            final_content = template_messages[-1].get("content") or ""
            template_messages[-1]["content"] = final_content + _CONTINUE_MARKER
        if tools and self._has_message_tools:
            template_messages = _attach_tools(template_messages, tools)
        template_variables = {
            **self._variables,
            "strftime_now": self._render_time(created_at).strftime,
            "tools": list(tools) or None,
            **({"available_tools": list(tools)} if tools else {}),
            "documents": None,
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._tool_template if tools else self._template
        text = self._render_messages(template, template_messages, template_variables)
        return _cut_at_marker(text) if continue_final_message else text

    def _render_messages(
        self,
        template: jinja2.Template | None,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> str:
        """Render messages, of which those with tool calls may have None as content.

        Most templates distinguish a message without content from an empty one, so the content is left out. The others
        fail, and get the empty text.
        """
        if all(message.get("content") is not None for message in messages):
            return self._render_text(template, {**variables, "messages": messages})
        without_content = [
            {name: value for name, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            return self._render_text(template, {**variables, "messages": without_content})
        except ApiError:
            with_content = [
                {**message, "content": message.get("content") or ""} for message in messages
            ]
            return self._render_text(template, {**variables, "messages": with_content})

    def _adapt_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the message. The role `developer` becomes `system` for templates that do not know it."""
        if message["role"] == "developer" and not self._has_developer_role:
            return {**message, "role": "system"}
        return dict(message)

    def _render_time(self, created_at: int | None) -> datetime:
        return (
            self._clock()
            if created_at is None
            else datetime.fromtimestamp(created_at, UTC).astimezone()
        )

    def _render_text(self, template: jinja2.Template | None, variables: dict[str, Any]) -> str:
        assert template is not None  # noqa: S101 - checked by `render`
        try:
            return template.render(variables)
        except _TemplateRaisedError as error:
            raise _template_error(str(error)) from error
        except RecursionError as error:
            raise _template_error("the messages are nested too deeply") from error
        except Exception as error:  # a template is a program: it can raise anything
            raise _template_error(f"{type(error).__name__}: {error}") from error


class _TemplateRaisedError(jinja2.TemplateError):
    """Error of a template's `raise_exception`. Its message is meant for the client."""


def _template_error(problem: str) -> ApiError:
    return invalid_request(
        f"The model's chat template cannot render these messages: {problem[:1000]}",
        "messages",
        "chat_template_error",
    )


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


def _reads_message_tools(source: str) -> bool:
    """Return whether the template finds the tools in the system message only, not in the variable `tools`."""
    return bool(_MESSAGE_TOOLS.search(source)) and "tools" not in meta.find_undeclared_variables(
        _environment().parse(source)
    )


def _attach_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with the functions as JSON in the system message, which is added if there is none."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [messages[0] | {"tools": functions}, *messages[1:]]


def _find_source(path: Path, override: Path | None) -> tuple[Path, str | None, str | None]:
    """Return the file with the template, its text, and the text for conversations with tools.

    The text is None if the model has no template. The other one is None if it has no template of its own for tools.
    """
    for file in (override, path / "chat_template.jinja"):
        if file is None or (file is not override and not file.is_file()):
            continue
        try:
            return file, file.read_text("utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"the chat template {file} cannot be read ({error}); correct it or its permissions"
            ) from error
    file = path / "tokenizer_config.json"
    match read_json_object(file).get("chat_template"):
        case None:
            return file, None, None
        case str(source):
            return file, source, None
        case list(templates):
            by_name = {
                t["name"]: t["template"] for t in templates if {"name", "template"} <= set(t)
            }
            default = by_name.get("default") or next(iter(by_name.values()), None)
            return file, default, by_name.get("tool_use")
        case unexpected:
            raise ValueError(
                f"chat_template of {file} is a {type(unexpected).__name__}; "
                "make it a string or a list of named templates"
            )


# --- environment that Hugging Face templates expect ----------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks training targets. Rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag (Jinja's hook for extensions)."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the output is a prompt, not HTML
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _DictConstructor()
    return environment


class _DictConstructor:
    """The name `dict` of a template: makes mappings, but hides the type, whose subscript is callable too."""

    def __call__(self, *items: Any, **entries: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict` takes them
        return dict(*items, **entries)

    def fromkeys(self, keys: Iterable[Any], value: object = None) -> dict[Any, Any]:
        """Return a mapping of each key to `value`."""
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRaisedError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - signature that templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the same
) -> str:
    """Serialize to JSON without the HTML escaping of Jinja's own `tojson`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
