"""Grammars of the calls of each syntax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from argosy.constraints import CUSTOM_INPUT, Relaxation, Tool, input_grammars
from argosy.engine.serving.output_parsing.argument_schema import (
    Parameter,
    SchemaGrammars,
    find_pattern,
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
from argosy.engine.serving.output_parsing.output_format import CallSyntax
from argosy.engine.serving.output_parsing.python_calls import PythonSyntax
from argosy.engine.serving.output_parsing.tagged_calls import TagSyntax

_JSON_KINDS = ("array", "boolean", "null", "number", "object")


class BareCalls(NamedTuple):
    """Expressions for an output in which calls begin with ordinary text."""

    first: str
    """First call. Its beginning is one lexeme, so that it differs from free text with its last character."""
    text: str
    """Text that does not look like a call."""
    marked: list[tuple[str, str]]
    """Each expression between such text and calls, and the one behind these calls."""


class CallGrammar(NamedTuple):
    """Expressions for the calls of one syntax."""

    opener: str
    """Text with which calls begin. Empty if they begin with ordinary text."""
    first: str
    """First call, behind the opener."""
    more: str
    """Any number of further calls."""
    end: str = ""
    """End of the calls."""
    bare: BareCalls | None = None

    def calls(self, head: str, *, parallel: bool) -> str:
        """Return an expression for one call, or for one or more, behind the expression `head` for the opener."""
        return f"{head} {self.first} {self.more * parallel} {self.end}"

    def bare_output(self, bare: BareCalls, *, parallel: bool) -> str:
        """Return an expression for calls or text, if calls begin with ordinary text."""
        choices = [self._replace(first=bare.first).calls("", parallel=parallel)]
        choices += [
            f"{self.calls(f'{bare.text} {marker}', parallel=parallel)} {end}"
            for marker, end in bare.marked
        ]
        return " | ".join([*choices, bare.text])


def build_call_grammar(
    writer: GrammarWriter, syntax: CallSyntax, tools: Sequence[Tool], *, allows_text: bool
) -> CallGrammar | None:
    """Return the grammar of the calls of a syntax, or None if it has none of its own.

    Args:
        writer: Grammar of the output.
        syntax: Syntax of the model.
        tools: Tools that may be called.
        allows_text: Whether text may stand instead of calls, so that `bare` is needed.
    """
    match syntax:
        case JsonSyntax():
            return _json_calls(writer, syntax, tools, allows_text)
        case NamedJsonSyntax():
            return _named_json_calls(writer, syntax, tools)
        case TagSyntax():
            return _TaggedCalls(writer, syntax).build(tools)
        case PythonSyntax() | MappingSyntax():
            for tool in tools:
                if tool.input_grammar:
                    record_free_input(writer, tool)
    match syntax:
        case PythonSyntax():
            return _python_calls(writer, syntax, tools, allows_text)
        case MappingSyntax():
            return _mapping_calls(writer, syntax, tools)
    return None


def add_arguments(writer: GrammarWriter, tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
    """Return each tool with a reference to the grammar of its arguments as JSON."""
    schemas = SchemaGrammars(writer)

    def add(tool: Tool) -> str:
        if text := tool.input_grammar and add_input(writer, tool, is_quoted=True):
            ws = writer.white_space()
            key = quote(quote(CUSTOM_INPUT))
            return writer.rule(
                "input", f'"{{" {ws} {key} {ws} ":" {ws} "\\"" {text} "\\"" {ws} "}}"'
            )
        schema = tool.parameters or {"type": "object"}
        return schemas.add(schema, strict=tool.strict, param=tool.schema_param)

    return [(tool, add(tool)) for tool in tools]


def add_input(writer: GrammarWriter, tool: Tool, *, is_quoted: bool) -> str:
    """Return a reference to the grammar of a custom tool's input, or an empty text if nothing enforces it.

    Args:
        writer: Grammar of the output, which records what is not enforced.
        tool: Custom tool with a grammar.
        is_quoted: Whether the input is written within a JSON string.
    """
    name = f"{CUSTOM_INPUT}_{writer.num_grammars}"
    grammars = input_grammars(tool.input_grammar, tool.schema_param, name, is_quoted=is_quoted)
    if grammars:
        return writer.add_grammars(grammars)
    record_free_input(writer, tool)
    return ""


def record_free_input(writer: GrammarWriter, tool: Tool) -> None:
    """Record that the input of a custom tool does not have to follow its grammar."""
    reason = "the format in which this model writes tool calls cannot follow it"
    writer.relaxations.append((tool.schema_param, Relaxation("grammar", "/", reason)))


def _json_calls(
    writer: GrammarWriter,
    syntax: JsonSyntax,
    tools: Sequence[Tool],
    allows_text: bool,  # noqa: FBT001 - positional like the others
) -> CallGrammar:
    arguments = add_arguments(writer, tools)
    ws, opener = writer.white_space(), syntax.open[0]
    objects = [
        f'"{{" {ws} "\\"name\\"" {ws} ":" {ws} {quote(quote(tool.name))} {ws} "," {ws} '
        f'{quote(quote(syntax.arguments_key))} {ws} ":" {ws} {reference} {ws} "}}"'
        for tool, reference in arguments
    ]
    call = writer.rule("object", alternatives(objects))
    closer = f"{ws} {writer.literal(syntax.close)}" if syntax.close else ""
    first, more, end = f"{ws} {call}", f"({writer.literal(syntax.separator)} {call})*", closer
    if syntax.is_array:
        first, more = f'{ws} "[" {ws} {call}', f'({ws} "," {ws} {call})*'
        end = f'{ws} "]" {closer}'
    elif syntax.close:
        first, end = f"{ws} {call} {closer}", ""
        more = f"({ws} {writer.literal(opener)} {first})*"
    if opener or not allows_text:
        return CallGrammar(opener, first, more, end)
    names = "|".join(escape_regex(tool.name) for tool in tools)
    space = r"[ \n]{0,16}"
    bracket = rf"\[{space}" if syntax.is_array else ""
    head = rf'/{bracket}\{{{space}"name"{space}:{space}"{{name}}"{space},{space}"{syntax.arguments_key}"{space}:/'
    heads = [writer.rule("HEAD", head.replace("{name}", escape_regex(tool.name))) for tool in tools]
    bare_calls = [
        f'{head} {ws} {reference} {ws} "}}"'
        for head, (_, reference) in zip(heads, arguments, strict=True)
    ]
    bracket = r"\[\s*" if syntax.is_array else ""
    text = writer.rule(
        "ANSWER", rf'/[\s\S]*/ & ~/\s*{bracket}\{{\s*"name"\s*:\s*"({names})"[\s\S]*/'
    )
    marked = [(writer.literal(each), "") for each in syntax.open[1:] if writer.is_token(each)]
    return CallGrammar("", first, more, end, BareCalls(alternatives(bare_calls), text, marked))


def _named_json_calls(
    writer: GrammarWriter, syntax: NamedJsonSyntax, tools: Sequence[Tool]
) -> CallGrammar:
    suffix = r"/:[0-9]{1,4} ?/" if syntax.has_index else ""
    call_id = ""
    if syntax.id_open and writer.is_token(syntax.id_open):
        call_id = f"({writer.literal(syntax.id_open)} /[a-zA-Z0-9]{{9}}/)?"
    prefix = syntax.name_prefix + syntax.optional_prefix
    name_end = writer.literal(syntax.name_end[0] + syntax.arguments_open)
    close = writer.literal(syntax.arguments_close + syntax.call_close)
    calls = [
        f"{writer.literal(prefix + tool.name)} {suffix} {call_id} {name_end} {reference} {close}"
        for tool, reference in add_arguments(writer, tools)
    ]
    call = writer.rule("call", alternatives(calls))
    separator = f"{writer.literal(syntax.separator)}?" if syntax.separator else ""
    call_open = writer.literal(syntax.call_open)
    return CallGrammar(
        syntax.section_open or syntax.call_open,
        f"{call_open if syntax.section_open else ''} {call}",
        f"({separator} {call_open} {call})*",
        writer.literal(syntax.section_close),
    )


def _python_calls(
    writer: GrammarWriter,
    syntax: PythonSyntax,
    tools: Sequence[Tool],
    allows_text: bool,  # noqa: FBT001 - positional like the others
) -> CallGrammar:
    values = PythonValues(writer)
    arguments = [writer.rule("arguments", f'{values.members(tool)} ")"') for tool in tools]

    def calls(heads: list[str]) -> str:
        return alternatives([f"{head} {each}" for head, each in zip(heads, arguments, strict=True)])

    call = writer.rule("call", calls([f'{quote(tool.name)} "("' for tool in tools]))
    more = f'("," " "? {call})*'
    if not syntax.is_bare:
        return CallGrammar(syntax.open + "[", call, more, f'"]" {writer.literal(syntax.close)}')
    if not allows_text:
        return CallGrammar("[", call, more, '"]"')
    names = [escape_regex(tool.name) for tool in tools]
    heads = [writer.rule("HEAD", rf"/\[ ?{name}\(/") for name in names]
    text = writer.rule("ANSWER", rf"/[\s\S]*/ & ~/\s*\[\s*({'|'.join(names)})\s*\([\s\S]*/")
    marked = []
    if writer.is_token(syntax.open):
        marked = [(f'{writer.literal(syntax.open)} "["', f"({writer.literal(syntax.close)})?")]
    return CallGrammar("[", call, more, '"]"', BareCalls(calls(heads), text, marked))


def _mapping_calls(
    writer: GrammarWriter, syntax: MappingSyntax, tools: Sequence[Tool]
) -> CallGrammar:
    """Return the grammar. Keys are sorted, as in training, or stand in the order of the schema."""
    values = MappingValues(writer, syntax.quote)
    calls = [f'{quote(f"call:{tool.name}{{")} {values.members(tool)} "}}"' for tool in tools]
    call = writer.rule("call", f"{alternatives(calls)} {writer.literal(syntax.close)}")
    return CallGrammar(syntax.open, call, f"({writer.literal(syntax.open)} {call})*")


class _TaggedCalls:
    """Grammar of `TagSyntax`. Parameters stand in the order of the schema, and optional ones may be left out."""

    def __init__(self, writer: GrammarWriter, syntax: TagSyntax) -> None:
        self._writer = writer
        self._syntax = syntax
        self._schemas = SchemaGrammars(writer)
        self._space = f"{quote(syntax.separator)}?" if syntax.separator else ""

    def build(self, tools: Sequence[Tool]) -> CallGrammar:
        writer, syntax = self._writer, self._syntax
        call = writer.rule(
            "call", alternatives([self._call_of(tool, tool.schema_param) for tool in tools])
        )
        opener = syntax.wrapper_open or syntax.name_open
        call_open = writer.literal(opener)
        separator = f"{quote(syntax.call_separator)}?" if syntax.call_separator else ""
        more = f"({separator} {call_open} {call})*"
        if not syntax.section_open:
            return CallGrammar(opener, call, more)
        end = f"{separator} {writer.literal(syntax.section_close)}"
        return CallGrammar(syntax.section_open, f"{separator} {call_open} {call}", more, end)

    def _call_of(self, tool: Tool, param: str) -> str:
        """Return an expression for a call of one tool, behind the text that opens every call."""
        writer, syntax, space = self._writer, self._syntax, self._space
        parameters, is_open = split_parameters(
            writer, tool, param, has_types=bool(syntax.type_attribute)
        )
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
            # Where text may stand, other values are texts as well, or alternatives of their own (`_string`).
            kinds = [] if parameter.is_text else [others]
        elif attribute == "type":
            kinds = [[kind] for kind in (others if types else _JSON_KINDS)]
        else:
            kinds = [others] if others or not types else []
        if text := tool.input_grammar and add_input(self._writer, tool, is_quoted=False):
            choices.append(
                f"{self._tag(parameter.name, 'string')} {text} {self._writer.literal(self._value_close)}"
            )
        elif parameter.is_text:
            choices += [
                self._tag(parameter.name, "string") + value
                for value in self._strings(parameter, tool, param)
            ]
        for allowed in kinds:
            tag = self._tag(parameter.name, allowed[0] if allowed else "value")
            schema = parameter.schema
            if allowed:
                schema = schema | {"type": allowed[0] if len(allowed) == 1 else allowed}
            choices.append(tag + self._json(schema, tool, param))
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

    def _strings(self, parameter: Parameter, tool: Tool, param: str) -> Iterator[str]:
        """Yield expressions for a value as plain text, and what closes it.

        In formats without types, values of other types stand there too, as JSON.
        """
        has_types = bool(self._syntax.type_attribute)
        texts, others = parameter.list_texts(has_types=has_types)
        if texts or not others:
            values = alternatives([quote(text) for text in texts if text] or ['""'])
            yield f"{values}{'?' * ('' in texts)} {self._writer.literal(self._value_close)}"
        free = [each for each in others if parameter.allows_text(each)]
        for pattern in dict.fromkeys(map(find_pattern, free)):
            yield self._text(pattern)
        if not free:
            for alternative in others:
                yield self._json(alternative | parameter.definitions, tool, param)

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

    def _json(self, schema: dict[str, Any], tool: Tool, param: str) -> str:
        """Return an expression for a value as JSON, and what closes it."""
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
