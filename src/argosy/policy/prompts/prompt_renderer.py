"""Compiled prompts, which put the values and messages of a request in their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from argosy.policy.prompts.prompt_content import (
    MAX_PROMPT_CHARS,
    PARAMETERS,
    REQUEST_MESSAGES,
    PromptContent,
    PromptMessage,
)
from argosy.policy.prompts.prompt_errors import PromptError

if TYPE_CHECKING:
    import jinja2

MIN_FIXED_CHARS = 64
"""Length of fixed text behind a variable from which a warning says so."""
_MAX_COMPILED = 256
"""Compiled prompts that are kept, by their content."""


class RenderedPrompt(NamedTuple):
    """Prompt with the values of a request."""

    text: str | None
    """None for a chat."""
    messages: list[Any]


class _Part(NamedTuple):
    """Template of one message or of the text, or a placeholder without template."""

    message: PromptMessage
    template: jinja2.Template | None


class CompiledPrompt:
    """Prompt that can be rendered. Immutable.

    Attributes:
        content: What was compiled.
        variables: Names of the variables that its templates and placeholders use.
        warnings: Sentences about variables that keep fixed text from being found in the KV cache.
    """

    def __init__(self, content: PromptContent) -> None:
        """Compile a prompt.

        Raises:
            PromptError: It is not accepted. The message says what to change.
        """
        from jinja2.meta import find_undeclared_variables

        from argosy.policy.prompts.template_sandbox import compile_template, parse_template

        _check_shape(content)
        self.content = content
        variables, parts = set[str](), list[_Part]()
        trees: list[tuple[str, Any]] = []
        for where, message in _list_messages(content):
            if message.placeholder is not None:
                variables.add(message.placeholder)
                parts.append(_Part(message, None))
                trees.append((where, message.placeholder))
                continue
            try:
                tree = parse_template(message.content or "")
                variables |= find_undeclared_variables(tree)
                trees.append((where, parse_template(message.content or "")))
                parts.append(_Part(message, compile_template(tree)))
            except PromptError as error:
                raise PromptError(f"{where}: {error}") from error
        self.variables = frozenset(variables - {REQUEST_MESSAGES})
        if REQUEST_MESSAGES in variables and not self._has_request_place(parts):
            raise PromptError(f"the name {REQUEST_MESSAGES!r} is that of the request's messages.")
        self._parts = parts
        self.warnings = tuple(_find_late_text(trees))

    @staticmethod
    def _has_request_place(parts: Sequence[_Part]) -> bool:
        return any(part.message.placeholder == REQUEST_MESSAGES for part in parts)

    def render(self, variables: Mapping[str, Any], messages: Sequence[Any] = ()) -> RenderedPrompt:
        """Put values in the places of variables, and messages in those of placeholders.

        Args:
            variables: Values as decoded from JSON. Messages for each placeholder.
            messages: Messages of the request, which a chat has at their placeholder or at its end.

        Raises:
            PromptError: A variable is unknown, missing or unsuitable, or the result is too large.
        """
        from argosy.policy.prompts.template_sandbox import RenderBudget, render_template

        unknown = sorted(variables.keys() - self.variables)
        if unknown:
            known = ", ".join(sorted(self.variables)) or "none"
            raise PromptError(f"there is no variable {unknown[0][:100]!r}. It has: {known}.")
        budget = RenderBudget()
        rendered: list[Any] = []
        for part in self._parts:
            name = part.message.placeholder
            if part.template is not None:
                text = render_template(part.template, variables, budget)
                if self.content.text is not None:
                    return RenderedPrompt(text, list(messages))
                rendered.append({"role": part.message.role, "content": text})
            elif name == REQUEST_MESSAGES:
                rendered += messages
            else:
                rendered += _read_messages(name or "", variables)
        if not self._has_request_place(self._parts):
            rendered += messages
        return RenderedPrompt(None, rendered)


_compiled: dict[str, CompiledPrompt] = {}


def is_compiled(encoded: str) -> bool:
    """Whether a prompt in JSON is kept compiled, so that `compile_prompt` takes no time."""
    return encoded in _compiled


def decode_prompt(encoded: str) -> PromptContent:
    """Return a prompt in JSON. Raises PromptError if it is none."""
    try:
        return msgspec.json.decode(encoded, type=PromptContent)
    except msgspec.DecodeError as error:
        raise PromptError(f"{error}.") from error


def compile_prompt(encoded: str) -> CompiledPrompt:
    """Return the compiled form of a prompt in JSON, and keep it. Thread-safe.

    Raises:
        PromptError: It is not accepted. The message says what to change.
    """
    found = _compiled.get(encoded)
    if found is None:
        found = CompiledPrompt(decode_prompt(encoded))
        while len(_compiled) >= _MAX_COMPILED:
            _compiled.pop(next(iter(_compiled)), None)
        _compiled[encoded] = found
    return found


def _check_shape(content: PromptContent) -> None:
    """Raise PromptError for a prompt that is empty, too long, or has unknown parameters."""
    if (content.text is None) == (not content.messages):
        raise PromptError("it needs a text or messages, and not both.")
    for index, message in enumerate(content.messages):
        has_text = message.role is not None and message.content is not None
        has_some = message.role is not None or message.content is not None
        if has_text == (message.placeholder is not None) or has_text != has_some:
            raise PromptError(
                f"messages[{index}]: it needs a role and a content, or a placeholder alone."
            )
    size = sum(len(message.content or "") for _, message in _list_messages(content))
    if size > MAX_PROMPT_CHARS or len(msgspec.json.encode(content.parameters)) > MAX_PROMPT_CHARS:
        raise PromptError(
            f"its templates and its parameters may have {MAX_PROMPT_CHARS:,} characters each."
        )
    unknown = sorted(content.parameters.keys() - PARAMETERS)
    if unknown:
        known = ", ".join(sorted(PARAMETERS))
        raise PromptError(f"parameters: {unknown[0][:100]!r} is unknown. Use {known}.")


def _list_messages(content: PromptContent) -> Iterator[tuple[str, PromptMessage]]:
    """Yield the messages with their places in the content. A text is one of them."""
    if content.text is not None:
        yield "text", PromptMessage(role="system", content=content.text)
    for index, message in enumerate(content.messages):
        yield f"messages[{index}]", message


def _read_messages(name: str, variables: Mapping[str, Any]) -> list[Any]:
    value = variables.get(name)
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    ):
        raise PromptError(f"the variable {name!r} must be a list of messages, each with a role.")
    return value


def _find_late_text(parts: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Yield a warning about the first variable that stands before much fixed text.

    `parts` are parsed templates, or names of placeholders, with their places.
    """
    from jinja2 import nodes

    first, fixed_chars = "", 0
    for where, tree in parts:
        if isinstance(tree, str):
            first = first or f"{where} ({tree})"
            continue
        for node in tree.body:
            for each in node.nodes if isinstance(node, nodes.Output) else [node]:
                fixed = (
                    [each]
                    if isinstance(each, nodes.TemplateData)
                    else each.find_all(nodes.TemplateData)
                )
                if first:
                    fixed_chars += sum(len(data.data) for data in fixed)
                elif not isinstance(each, nodes.TemplateData):
                    names = [name.name for name in each.find_all(nodes.Name)]
                    names += [each.name] if isinstance(each, nodes.Name) else []
                    first = (
                        f"{where} line {each.lineno} ({', '.join(dict.fromkeys(names)) or 'if'})"
                    )
    if fixed_chars >= MIN_FIXED_CHARS:
        yield (
            f"{first} stands before {fixed_chars} characters of fixed text. They are computed again whenever it "
            "changes. Move it behind them, so that they are found in the KV cache."
        )
