"""Grammars of the calls of each syntax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from argosy.constraints import Tool
from argosy.engine.serving.output_parsing.argument_schema import (
    Parameter,
    SchemaGrammars,
    split_parameters,
)
from argosy.engine.serving.output_parsing.grammar_writer import (
    GrammarWriter,
    alternatives,
    escape_regex,
    quote,
)
from argosy.engine.serving.output_parsing.json_calls import JsonSyntax, NamedJsonSyntax
from argosy.engine.serving.output_parsing.literal_grammar import MappingValues, PythonValues
from argosy.engine.serving.output_parsing.mapping_calls import MappingSyntax
from argosy.engine.serving.output_parsing.python_calls import PythonSyntax
from argosy.engine.serving.output_parsing.tagged_calls import TagSyntax

_JSON_KINDS = ("array", "boolean", "null", "number", "object")


class CallGrammar(Protocol):
    """Grammar of the calls of one syntax."""

    opener: str
    """Text with which calls begin."""

    def calls(self, head: str, *, parallel: bool) -> str:
        """Return an expression for one call, or for one or more, behind the expression `head` for the opener."""
        ...


class JsonArguments:
    """Arguments of tools as JSON. Each tool's schema is compiled once."""

    def __init__(self, writer: GrammarWriter, tools: Sequence[Tool]) -> None:
        self.writer = writer
        self.tools = tools
        schemas = SchemaGrammars(writer)
        self.references = [
            schemas.add(
                tool.parameters or {"type": "object"}, strict=tool.strict, param=tool.schema_param
            )
            for tool in tools
        ]


class JsonCallGrammar(JsonArguments):
    """Grammar of `JsonSyntax`."""

    def __init__(self, writer: GrammarWriter, syntax: JsonSyntax, tools: Sequence[Tool]) -> None:
        super().__init__(writer, tools)
        self._syntax = syntax
        ws = writer.white_space()
        self._objects = alternatives(
            [
                f'"{{" {ws} "\\"name\\"" {ws} ":" {ws} {quote(quote(tool.name))} {ws} "," {ws} '
                f'{quote(quote(syntax.arguments_key))} {ws} ":" {ws} {reference} {ws} "}}"'
                for tool, reference in zip(tools, self.references, strict=True)
            ]
        )
        self._object = writer.rule("object", self._objects)
        self.opener = syntax.open[0]

    def calls(self, head: str, *, parallel: bool) -> str:
        """Return an expression for calls behind their opener."""
        writer, syntax = self.writer, self._syntax
        ws = writer.white_space()
        closer = f"{ws} {writer.literal(syntax.close)}" if syntax.close else ""
        if syntax.is_array:
            more = f'({ws} "," {ws} {self._object})*' if parallel else ""
            return f'{head} {ws} "[" {ws} {self._object} {more} {ws} "]" {closer}'
        call = f"{ws} {self._object} {closer}"
        if not parallel:
            return f"{head} {call}"
        if not syntax.close:
            return f"{head} {call} ({writer.literal(syntax.separator)} {self._object})*"
        return f"{head} {call} ({ws} {writer.literal(self.opener)} {call})*"

    def bare_calls(self, *, parallel: bool) -> tuple[str, str]:
        """Return calls that begin with their bracket, and an expression for text that does not look like one.

        The beginning of a call is one lexeme, so that it differs from free text with its last character.
        """
        writer, syntax = self.writer, self._syntax
        ws = writer.white_space()
        names = "|".join(escape_regex(tool.name) for tool in self.tools)
        space = r"[ \n]{0,16}"
        bracket = rf"\[{space}" if syntax.is_array else ""
        heads = [
            writer.rule(
                "HEAD",
                rf'/{bracket}\{{{space}"name"{space}:{space}"{escape_regex(tool.name)}"{space},{space}'
                rf'"{syntax.arguments_key}"{space}:/',
            )
            for tool in self.tools
        ]
        call = alternatives(
            [
                f'{head} {ws} {reference} {ws} "}}"'
                for head, reference in zip(heads, self.references, strict=True)
            ]
        )
        separator = f'{ws} "," {ws}' if syntax.is_array else writer.literal(syntax.separator)
        more = f"({separator} {self._object})*" if parallel else ""
        end = f'{ws} "]"' if syntax.is_array else ""
        bracket = r"\[\s*" if syntax.is_array else ""
        text = writer.rule(
            "ANSWER",
            rf'/[\s\S]*/ & ~/\s*{bracket}\{{\s*"name"\s*:\s*"({names})"[\s\S]*/',
        )
        calls = [f"{call} {more} {end}"]
        calls += [
            f"{text} {writer.literal(opener)} {ws} {self._object} {more}"
            for opener in syntax.open
            if opener and writer.is_token(opener)
        ]
        return " | ".join(calls), text


class NamedJsonCallGrammar(JsonArguments):
    """Grammar of `NamedJsonSyntax`."""

    def __init__(
        self, writer: GrammarWriter, syntax: NamedJsonSyntax, tools: Sequence[Tool]
    ) -> None:
        super().__init__(writer, tools)
        self._syntax = syntax
        suffix = r"/:[0-9]{1,4} ?/" if syntax.has_index else ""
        call_id = ""
        if syntax.id_open and writer.is_token(syntax.id_open):
            call_id = f"({writer.literal(syntax.id_open)} /[a-zA-Z0-9]{{9}}/)?"
        prefix = syntax.name_prefix + syntax.optional_prefix
        name_end = syntax.name_end[0] + syntax.arguments_open
        calls = [
            f"{writer.literal(prefix + tool.name)} {suffix} {call_id} {writer.literal(name_end)} "
            f"{reference} {writer.literal(syntax.arguments_close + syntax.call_close)}"
            for tool, reference in zip(tools, self.references, strict=True)
        ]
        self._call = writer.rule("call", alternatives(calls))
        self.opener = syntax.section_open or syntax.call_open

    def calls(self, head: str, *, parallel: bool) -> str:
        """Return an expression for calls behind their opener."""
        writer, syntax = self.writer, self._syntax
        separator = f"{writer.literal(syntax.separator)}?" if syntax.separator else ""
        call_open = writer.literal(syntax.call_open)
        more = f"({separator} {call_open} {self._call})*" if parallel else ""
        first = call_open if syntax.section_open else ""
        return f"{head} {first} {self._call} {more} {writer.literal(syntax.section_close)}"


class TaggedCallGrammar:
    """Grammar of `TagSyntax`. Parameters stand in the order of the schema, and optional ones may be left out."""

    def __init__(self, writer: GrammarWriter, syntax: TagSyntax, tools: Sequence[Tool]) -> None:
        self._writer = writer
        self._syntax = syntax
        self._schemas = SchemaGrammars(writer)
        self._space = f"{quote(syntax.separator)}?" if syntax.separator else ""
        calls = [self._call_of(tool, tool.schema_param) for tool in tools]
        self._call = writer.rule("call", alternatives(calls))
        self._call_open = syntax.wrapper_open or syntax.name_open
        self.opener = syntax.section_open or self._call_open

    def calls(self, head: str, *, parallel: bool) -> str:
        """Return an expression for calls behind their opener."""
        writer, syntax = self._writer, self._syntax
        separator = f"{quote(syntax.call_separator)}?" if syntax.call_separator else ""
        call_open = writer.literal(self._call_open)
        more = f"({separator} {call_open} {self._call})*" if parallel else ""
        if not syntax.section_open:
            return f"{head} {self._call} {more}"
        return (
            f"{head} {separator} {call_open} {self._call} {more} "
            f"{separator} {writer.literal(syntax.section_close)}"
        )

    def _call_of(self, tool: Tool, param: str) -> str:
        """Return an expression for a call of one tool, behind the text that opens every call."""
        writer, syntax, space = self._writer, self._syntax, self._space
        parameters, is_open = split_parameters(tool, param)
        elements = []
        for parameter in parameters:
            element = self._element(parameter, tool, f"{param}.properties.{parameter.name}")
            elements.append(element if parameter.is_required else f"({element})?")
        if is_open:
            elements.append(f"({self._open_element(param)} {space})*")
        parts = []
        if syntax.wrapper_open and syntax.name_open:
            parts += [space, writer.literal(syntax.name_open)]
        parts.append(writer.literal(syntax.escape(tool.name) + syntax.name_close))
        if syntax.has_index:
            parts.append('" index=\\"" /[0-9]{1,3}/ "\\""')
        if syntax.tag_end:
            parts += [writer.literal(syntax.tag_end), space]
        parts.append(space)
        for element in elements:
            parts += [element, space]
        if syntax.call_close:
            parts.append(writer.literal(syntax.call_close))
        if syntax.call_close and syntax.wrapper_close:
            parts.append(space)
        parts.append(writer.literal(syntax.wrapper_close))
        return " ".join(filter(None, parts))

    def _element(self, parameter: Parameter, tool: Tool, param: str) -> str:
        """Return an expression for a parameter and its value."""
        attribute, types = self._syntax.type_attribute, parameter.types
        others = sorted(types - {"string"})
        choices = []
        if not attribute:
            kinds = [] if parameter.is_text else [others]
        elif attribute == "type":
            kinds = [[kind] for kind in (others if types else _JSON_KINDS)]
        else:
            kinds = [others] if others or not types else []
        if parameter.is_text:
            choices.append(self._tag(parameter.name, "string") + self._string(parameter))
        for allowed in kinds:
            tag = self._tag(parameter.name, allowed[0] if allowed else "value")
            choices.append(tag + self._json(parameter, allowed, tool, param))
        return alternatives(choices)

    def _tag(self, key: str, kind: str, *, is_rule: bool = False) -> str:
        """Return an expression for the name of a parameter, up to its value.

        Args:
            key: The name, or a rule for it.
            kind: Type of the value.
            is_rule: Whether `key` is a rule.
        """
        writer, syntax = self._writer, self._syntax
        attribute = ""
        if syntax.type_attribute == "string":
            attribute = f' string="{"true" if kind == "string" else "false"}"'
        elif syntax.type_attribute:
            attribute = f' type="{"number" if kind == "integer" else kind}"'
        end = syntax.key_close + attribute + syntax.tag_end
        if is_rule:
            tag = f"{writer.literal(syntax.key_open)} {key} {writer.literal(end)}"
        else:
            tag = writer.literal(syntax.key_open + syntax.escape(key) + end)
        space = self._space if syntax.value_open else ""
        line = '"\\n"' if syntax.has_line_breaks else ""
        return f"{tag} {space} {writer.literal(syntax.value_open)} {line} "

    @property
    def _value_close(self) -> str:
        return "\n" * self._syntax.has_line_breaks + self._syntax.value_close

    def _string(self, parameter: Parameter) -> str:
        """Return an expression for a value as plain text, and what closes it."""
        texts = parameter.texts(has_types=bool(self._syntax.type_attribute))
        if texts is None:
            return self._text(parameter.pattern)
        values = alternatives([quote(text) for text in texts if text] or ['""'])
        return f"{values}{'?' * ('' in texts)} {self._writer.literal(self._value_close)}"

    def _text(self, pattern: str = r"[\s\S]*") -> str:
        """Return an expression for plain text and what closes it, without tags at which a parser would end it."""
        syntax = self._syntax
        without: list[str] = []
        if syntax.has_line_breaks:
            key, value, call = map(
                escape_regex, (syntax.key_open, syntax.value_close, syntax.call_close)
            )
            without = [rf"\n{key}", rf"\n{call}", rf"{value}\s*({key}|{call})"]
        return self._writer.text_until(self._value_close, pattern, without=without)

    def _json(self, parameter: Parameter, kinds: list[str], tool: Tool, param: str) -> str:
        """Return an expression for a value of one of the types as JSON, and what closes it."""
        schema = dict(parameter.schema)
        if kinds:
            schema["type"] = kinds[0] if len(kinds) == 1 else kinds
        reference = self._schemas.add(schema, strict=tool.strict, param=param)
        return f"{reference} {self._writer.literal(self._value_close)}"

    def _open_element(self, param: str) -> str:
        """Return an expression for any parameter with any value."""
        writer, attribute = self._writer, self._syntax.type_attribute
        key = writer.shared_rule("KEY", r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/")
        closer = writer.literal(self._value_close)
        choices = [f"{self._tag(key, 'string', is_rule=True)} {self._text()}"]
        kinds = {"string": ("value",), "type": _JSON_KINDS}.get(attribute, ())
        for kind in kinds:
            schema = {} if kind == "value" else {"type": kind}
            reference = self._schemas.add(schema, strict=False, param=param)
            choices.append(f"{self._tag(key, kind, is_rule=True)} {reference} {closer}")
        return alternatives(choices)


class PythonCallGrammar:
    """Grammar of `PythonSyntax`. Arguments have keywords and stand in the order of the schema."""

    def __init__(self, writer: GrammarWriter, syntax: PythonSyntax, tools: Sequence[Tool]) -> None:
        values = PythonValues(writer)
        self._writer = writer
        self._syntax = syntax
        self.is_bare = syntax.is_bare
        self.opener = "[" if syntax.is_bare else syntax.open + "["
        self._names = [tool.name for tool in tools]
        self._arguments = [
            writer.rule("arguments", values.members(tool, tool.schema_param, '"="') + ' ")"')
            for tool in tools
        ]
        self._call = writer.rule(
            "call", self._alternatives(f'{quote(name)} "("' for name in self._names)
        )

    def calls(self, head: str, *, parallel: bool) -> str:
        """Return an expression for calls behind their opener."""
        return f"{head} {self._call} {self._more(parallel=parallel)}"

    def bare_calls(self, *, parallel: bool) -> tuple[str, str]:
        """Return calls without a marker, and an expression for text that does not look like one.

        The beginning of a call is one lexeme, so that it differs from free text with its last character.
        """
        writer, syntax = self._writer, self._syntax
        heads = [writer.rule("HEAD", rf"/\[ ?{escape_regex(name)}\(/") for name in self._names]
        more = self._more(parallel=parallel)
        names = "|".join(map(escape_regex, self._names))
        text = writer.rule("ANSWER", rf"/[\s\S]*/ & ~/\s*\[\s*({names})\s*\([\s\S]*/")
        calls = f"{self._alternatives(heads)} {more}"
        if writer.is_token(syntax.open):
            head = f'{text} {writer.literal(syntax.open)} "["'
            calls += f" | {self.calls(head, parallel=parallel)} ({writer.literal(syntax.close)})?"
        return calls, text

    def _alternatives(self, heads: Iterable[str]) -> str:
        return alternatives(
            [f"{head} {arguments}" for head, arguments in zip(heads, self._arguments, strict=True)]
        )

    def _more(self, *, parallel: bool) -> str:
        more = f'("," " "? {self._call})*' if parallel else ""
        closer = "" if self.is_bare else self._writer.literal(self._syntax.close)
        return f'{more} "]" {closer}'


class MappingCallGrammar:
    """Grammar of `MappingSyntax`. Keys are sorted, as in training, or stand in the order of the schema."""

    def __init__(self, writer: GrammarWriter, syntax: MappingSyntax, tools: Sequence[Tool]) -> None:
        values = MappingValues(writer, syntax.quote)
        calls = []
        for tool in tools:
            arguments = values.members(tool, tool.schema_param, '":"')
            calls.append(f'{quote(f"call:{tool.name}{{")} {arguments} "}}"')
        self._call = writer.rule("call", f"{alternatives(calls)} {writer.literal(syntax.close)}")
        self._writer = writer
        self.opener = syntax.open

    def calls(self, head: str, *, parallel: bool) -> str:
        """Return an expression for calls behind their opener."""
        more = f"({self._writer.literal(self.opener)} {self._call})*" if parallel else ""
        return f"{head} {self._call} {more}"
