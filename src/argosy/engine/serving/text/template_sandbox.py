"""Jinja environment that Hugging Face chat templates expect. Only render processes run templates in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRaisedError(jinja2.TemplateError):
    """Error of a template's `raise_exception`. Its message is meant for the client."""


def create_environment() -> ImmutableSandboxedEnvironment:
    """Create the environment, an immutable sandbox."""
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


def find_free_variables(environment: ImmutableSandboxedEnvironment, source: str) -> set[str]:
    """Return the variables that a template reads and does not set itself."""
    return meta.find_undeclared_variables(environment.parse(source))


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks training targets. Rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag (Jinja's hook for extensions)."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _DictConstructor:
    """The name `dict` of a template: makes mappings, but hides the type, whose subscript is callable too."""

    def __call__(self, *items: Any, **entries: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict` takes them
        return dict(*items, **entries)

    def fromkeys(self, keys: Iterable[Any], value: object = None) -> dict[Any, Any]:
        """Return a mapping of each key to `value`."""
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaisedError(message)


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
