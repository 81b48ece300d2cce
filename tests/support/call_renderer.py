"""Tool calls as models of each format write them, for round trips."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from argosy.constraints import json_type
from argosy.engine.serving.output_parsing import MarkerToken, OutputFormat, Piece
from argosy.engine.serving.output_parsing.harmony import HarmonySyntax
from argosy.engine.serving.output_parsing.json_calls import JsonSyntax, NamedJsonSyntax
from argosy.engine.serving.output_parsing.mapping_calls import MappingSyntax
from argosy.engine.serving.output_parsing.python_calls import PythonSyntax
from argosy.engine.serving.output_parsing.tagged_calls import TagSyntax

Call = tuple[str, Mapping[str, Any]]


class CallRenderer:
    """Renderer of calls in one format. Text of values never becomes a marker token."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        words = sorted(output_format.vocabulary, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, words)) + ")") if words else None

    def syntax(self, text: str) -> list[Piece]:
        """Return fixed syntax as pieces."""
        parts = [text] if self._pattern is None else self._pattern.split(text)
        vocabulary = self._format.vocabulary
        return [MarkerToken(part) if part in vocabulary else part for part in parts if part]

    def render(self, calls: list[Call]) -> list[Piece]:
        """Return calls as the pieces of an output without an answer."""
        frame = self._format.frame
        if frame is not None:
            return [*self.syntax(frame.open + frame.close), *self._render(calls)]
        return self._render(calls)

    def _render(self, calls: list[Call]) -> list[Piece]:
        match self._format.syntax:
            case JsonSyntax() as syntax:
                return self._json(syntax, calls)
            case NamedJsonSyntax() as syntax:
                return self._named_json(syntax, calls)
            case TagSyntax() as syntax:
                return self._tagged(syntax, calls)
            case PythonSyntax() as syntax:
                text = ", ".join(
                    f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                    for name, arguments in calls
                )
                if syntax.is_bare:
                    return [f"[{text}]"]
                return [*self.syntax(syntax.open), f"[{text}]", *self.syntax(syntax.close)]
            case MappingSyntax() as syntax:
                return [
                    piece
                    for name, arguments in calls
                    for piece in (
                        *self.syntax(f"{syntax.open}call:{name}"),
                        *self._mapping_value(syntax, dict(arguments)),
                        *self.syntax(syntax.close),
                    )
                ]
            case HarmonySyntax():
                return [
                    piece
                    for index, (name, arguments) in enumerate(calls)
                    for piece in (
                        *self.syntax(
                            ("<|call|><|start|>assistant" if index else "")
                            + f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                        ),
                        json.dumps(arguments),
                    )
                ]
        raise AssertionError(self._format.name)

    def _json(self, syntax: JsonSyntax, calls: list[Call]) -> list[Piece]:
        texts = [
            f'{{"name": {json.dumps(name)}, "{syntax.arguments_key}": {json.dumps(arguments)}}}'
            for name, arguments in calls
        ]
        opener, closer = self.syntax(syntax.open[0]), self.syntax(syntax.close)
        if syntax.is_array:
            return [*opener, f"[{', '.join(texts)}]", *closer]
        if not syntax.close:
            return [*opener, syntax.separator.join(texts)]
        return [
            piece
            for index, text in enumerate(texts)
            for piece in (
                syntax.separator * bool(index),
                *opener,
                f"{syntax.after_open}{text}{syntax.before_close}",
                *closer,
            )
        ]

    def _named_json(self, syntax: NamedJsonSyntax, calls: list[Call]) -> list[Piece]:
        pieces = self.syntax(syntax.section_open)
        for index, (name, arguments) in enumerate(calls):
            suffix = f":{index}" if syntax.has_index else ""
            pieces += [
                syntax.separator * bool(index),
                *self.syntax(syntax.call_open + syntax.name_prefix),
                f"{syntax.optional_prefix}{name}{suffix}",
                *self.syntax(syntax.name_end[0] + syntax.arguments_open),
                json.dumps(arguments),
                *self.syntax(syntax.arguments_close + syntax.call_close),
            ]
        return pieces + self.syntax(syntax.section_close)

    def _tagged(self, syntax: TagSyntax, calls: list[Call]) -> list[Piece]:
        space, gap = syntax.separator, syntax.call_separator
        pieces = self.syntax(syntax.section_open + gap * bool(syntax.section_open))
        for index, (name, arguments) in enumerate(calls):
            attributes = f' index="{index + 1}"' if syntax.has_index else ""
            lead = space if syntax.wrapper_open and syntax.name_open else ""
            pieces += [
                gap * bool(index),
                *self.syntax(
                    syntax.wrapper_open
                    + lead
                    + syntax.name_open
                    + name
                    + syntax.name_close
                    + attributes
                    + syntax.tag_end
                    + space
                ),
            ]
            for key, value in arguments.items():
                pieces += self._tag(syntax, key, value)
            pieces += self.syntax(
                syntax.call_close
                + (space if syntax.call_close and syntax.wrapper_close else "")
                + syntax.wrapper_close
            )
        return pieces + self.syntax((gap + syntax.section_close) * bool(syntax.section_close))

    def _tag(self, syntax: TagSyntax, key: str, value: object) -> Iterable[Piece]:
        is_string = isinstance(value, str)
        attribute = ""
        if syntax.type_attribute == "string":
            attribute = f' string="{str(is_string).lower()}"'
        elif syntax.type_attribute:
            kind = json_type(value)
            attribute = f' type="{"number" if kind == "integer" else kind}"'
        line = "\n" * syntax.has_line_breaks
        yield from self.syntax(
            syntax.key_open
            + syntax.escape(key)
            + syntax.key_close
            + attribute
            + syntax.tag_end
            + (syntax.separator + syntax.value_open) * bool(syntax.value_open)
            + line
        )
        yield value if isinstance(value, str) else json.dumps(value)
        yield from self.syntax(line + syntax.value_close + syntax.separator)

    def _mapping_value(self, syntax: MappingSyntax, value: object) -> Iterable[Piece]:
        match value:
            case str():
                yield from (*self.syntax(syntax.quote), value, *self.syntax(syntax.quote))
            case dict():
                yield "{"
                for index, (key, item) in enumerate(value.items()):
                    yield f"{',' if index else ''}{key}:"
                    yield from self._mapping_value(syntax, item)
                yield "}"
            case list():
                yield "["
                for index, item in enumerate(value):
                    yield "," if index else ""
                    yield from self._mapping_value(syntax, item)
                yield "]"
            case _:
                yield json.dumps(value)
