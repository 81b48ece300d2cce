"""The chat template of a checkpoint: messages to the text that the model was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from argosy.engine.serving.text.tokenizer import read_json_object, read_special_tokens
from argosy.protocol import ApiError, invalid_request

_CONTINUE_MARKER = "ARGOSY_CONTINUES_HERE "
"""Put after the message to continue; its trailing space tells whether the template trims."""
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A Jinja template with the variables and filters that Hugging Face templates rely on.

    Rendering happens in an immutable sandbox; whatever goes wrong in it is an ApiError (400) with
    the template's own words where it has any. Immutable; may be used from many threads.
    """

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, str],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC).astimezone(),
    ) -> None:
        """`source` None stands for a model without a template, which refuses every conversation.

        Raises jinja2.TemplateSyntaxError for a source that is no template.
        """
        self._variables = dict(variables)
        self.digest = hashlib.sha256(repr((source, sorted(variables.items()))).encode()).hexdigest()
        """Equal for templates that write alike."""
        self._has_developer_role = source is not None and "developer" in source
        self._clock = clock
        self._template = None if source is None else _environment().from_string(source)

    @classmethod
    def load(cls, path: Path, override: Path | None = None) -> Self:
        """The template in the file `override`, else the one of the checkpoint directory `path`.

        Looks for chat_template.jinja, then for `chat_template` in tokenizer_config.json (a string,
        or a list of named ones of which "default" is taken). Raises ValueError with the remedy for
        a template that cannot be read.
        """
        origin, source = _find_source(path, override)
        try:
            return cls(source, read_special_tokens(path))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template of {origin} is no valid Jinja (line {error.lineno}: "
                f"{error.message}); correct it or name another one with --chat-template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        created_at: int | None = None,
    ) -> str:
        """The text of a conversation, to be encoded without adding special tokens.

        `variables` are the request's own (`chat_template_kwargs`). With `continue_final_message`
        the text ends where the last message's content ends. `at` is the Unix time that the template
        is told; None: now. Raises ApiError (400).
        """
        if self._template is None:
            raise invalid_request(
                "This model has no chat template, so it cannot take messages. Use /v1/completions, "
                "or start the server with --chat-template.",
                "messages",
                "no_chat_template",
            )
        taken = sorted(_RESERVED_VARIABLES.intersection(variables or ()))
        if taken:
            name = f"chat_template_kwargs.{taken[0]}"
            raise invalid_request(f"'{name}' cannot be set from a request. Remove it.", name)
        turns = [self._adapt_message(message) for message in messages]
        if continue_final_message:
            turns[-1]["content"] += _CONTINUE_MARKER
        text = self._render_text(
            {
                **self._variables,
                "strftime_now": self._render_time(created_at).strftime,
                "tools": None,
                "documents": None,
                **(variables or {}),
                "messages": turns,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_marker(text) if continue_final_message else text

    def _adapt_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the message; "developer" is "system" to templates from before that name."""
        if message["role"] == "developer" and not self._has_developer_role:
            return {**message, "role": "system"}
        return dict(message)

    def _render_time(self, at: int | None) -> datetime:
        return self._clock() if at is None else datetime.fromtimestamp(at, UTC).astimezone()

    def _render_text(self, variables: dict[str, Any]) -> str:
        assert self._template is not None  # noqa: S101 - `render` has refused
        try:
            return self._template.render(variables)
        except _TemplateRaisedError as error:
            raise _template_error(str(error)) from error
        except RecursionError as error:
            raise _template_error("the messages are nested too deeply") from error
        except Exception as error:  # a template is a program: it can raise anything
            raise _template_error(f"{type(error).__name__}: {error}") from error


class _TemplateRaisedError(jinja2.TemplateError):
    """What a template's `raise_exception` raises: words meant for the one who asked."""


def _template_error(problem: str) -> ApiError:
    return invalid_request(
        f"The model's chat template cannot render these messages: {problem[:1000]}",
        "messages",
        "chat_template_error",
    )


def _cut_at_marker(text: str) -> str:
    """The text up to the mark behind the message to continue."""
    mark = _CONTINUE_MARKER.rstrip()
    at = text.rfind(mark)
    if at < 0:
        raise invalid_request(
            "The chat template leaves out the content of the last message: nothing can follow it. "
            "Set continue_final_message to false.",
            "continue_final_message",
        )
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_MARKER, at) else kept.rstrip()


def _find_source(path: Path, override: Path | None) -> tuple[Path, str | None]:
    """The file with the template, and its text (None when the model has none)."""
    for file in (override, path / "chat_template.jinja"):
        if file is None or (file is not override and not file.is_file()):
            continue
        try:
            return file, file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the chat template {file} cannot be read ({error})") from error
    file = path / "tokenizer_config.json"
    match read_json_object(file).get("chat_template"):
        case None:
            return file, None
        case str(source):
            return file, source
        case list(several):
            named = {t["name"]: t["template"] for t in several if {"name", "template"} <= set(t)}
            return file, named.get("default") or next(iter(named.values()), None)
        case other:
            raise ValueError(
                f"chat_template of {file} is a {type(other).__name__}; "
                "make it a string or a list of named ones"
            )


# --- what Hugging Face templates expect to find --------------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what is trained on; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Jinja's hook for a tag of an extension."""
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
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRaisedError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the face that templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the same
) -> str:
    """Jinja's own `tojson` escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
