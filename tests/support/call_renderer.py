"""Tool calls as models of each format write them, for round trips."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from argosy.constraints import json_type
from argosy.engine.serving.output_parsing import MarkerToken, OutputFormat, Piece
from argosy.engine.serving.output_parsing.json_calls import JsonSyntax, NamedJsonSyntax
from argosy.engine.serving.output_parsing.mapping_calls import MappingSyntax
from argosy.engine.serving.output_parsing.output_format import CallSyntax
from argosy.engine.serving.output_parsing.python_calls import PythonSyntax
from argosy.engine.serving.output_parsing.tagged_calls import TagSyntax

Call = tuple[str, Mapping[str, Any]]


def split_markers(output_format: OutputFormat, text: str) -> list[Piece]:
    """Return text as pieces, in which special tokens of the model are markers."""
    vocabulary = output_format.vocabulary
    words = sorted(vocabulary, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]
    return [MarkerToken(part) if part in vocabulary else part for part in parts if part]


def render_calls(output_format: OutputFormat, calls: list[Call]) -> list[Piece]:
    """Return calls as the pieces of an output without an answer."""
    frame = output_format.frame
    text = _render(output_format.syntax, calls)
    return split_markers(output_format, frame.open + frame.close + text if frame else text)


def _render(syntax: CallSyntax, calls: list[Call]) -> str:
    numbered = [(index, name, arguments) for index, (name, arguments) in enumerate(calls)]
    match syntax:
        case JsonSyntax():
            texts = [
                f'{{"name": {json.dumps(name)}, "{syntax.arguments_key}": {json.dumps(arguments)}}}'
                for name, arguments in calls
            ]
            if syntax.is_array:
                texts = [f"[{', '.join(texts)}]"]
            elif not syntax.close:
                texts = [syntax.separator.join(texts)]
            return syntax.separator.join(syntax.open[0] + text + syntax.close for text in texts)
        case NamedJsonSyntax():
            head = syntax.call_open + syntax.name_prefix + syntax.optional_prefix
            middle = syntax.name_end[0] + syntax.arguments_open
            tail = syntax.arguments_close + syntax.call_close
            texts = [
                f"{head}{name}{f':{index}' * syntax.has_index}{middle}{json.dumps(arguments)}{tail}"
                for index, name, arguments in numbered
            ]
            return syntax.section_open + syntax.separator.join(texts) + syntax.section_close
        case TagSyntax():
            texts = [_render_tagged(syntax, *call) for call in numbered]
            if syntax.section_open:
                texts = [syntax.section_open, *texts, syntax.section_close]
            return syntax.call_separator.join(texts)
        case PythonSyntax():
            texts = [
                f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                for name, arguments in calls
            ]
            text = f"[{', '.join(texts)}]"
            return text if syntax.is_bare else syntax.open + text + syntax.close
        case MappingSyntax():
            return "".join(
                f"{syntax.open}call:{name}{_render_mapping(syntax, arguments)}{syntax.close}"
                for name, arguments in calls
            )
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"
        for name, arguments in calls
    )


def _render_tagged(
    syntax: TagSyntax, index: int, name: str, arguments: Mapping[str, object]
) -> str:
    space = syntax.separator
    text = syntax.wrapper_open + space * bool(syntax.wrapper_open and syntax.name_open)
    text += syntax.name_open + name + syntax.name_close
    text += f' index="{index + 1}"' * syntax.has_index + syntax.tag_end + space
    line = "\n" * syntax.has_line_breaks
    for key, value in arguments.items():
        text += syntax.key_open + syntax.escape(key) + syntax.key_close
        if syntax.type_attribute == "string":
            text += f' string="{str(isinstance(value, str)).lower()}"'
        elif syntax.type_attribute:
            kind = json_type(value)
            text += f' type="{"number" if kind == "integer" else kind}"'
        text += syntax.tag_end + (space + syntax.value_open) * bool(syntax.value_open) + line
        text += value if isinstance(value, str) else json.dumps(value)
        text += line + syntax.value_close + space
    text += syntax.call_close + space * bool(syntax.call_close and syntax.wrapper_close)
    return text + syntax.wrapper_close


def _render_mapping(syntax: MappingSyntax, value: object) -> str:
    match value:
        case str():
            return syntax.quote + value + syntax.quote
        case dict():
            pairs = (f"{key}:{_render_mapping(syntax, item)}" for key, item in value.items())
            return f"{{{','.join(pairs)}}}"
        case list():
            return f"[{','.join(_render_mapping(syntax, item) for item in value)}]"
    return json.dumps(value)
