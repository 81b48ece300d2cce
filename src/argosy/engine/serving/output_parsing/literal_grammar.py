"""Grammars of values that are written as literals of another language than JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from argosy.constraints import Tool, json_type, schema_types
from argosy.engine.serving.output_parsing.argument_schema import (
    ANNOTATIONS,
    expand_alternatives,
    limit_keywords,
    list_values,
)
from argosy.engine.serving.output_parsing.grammar_writer import (
    GrammarWriter,
    alternatives,
    quote,
)

_MAX_PLACE = 16
"""Most parts of the place of a value whose schema is enforced: eight objects within each other."""
_MAX_MEMBERS = 64
_KEYWORDS = ANNOTATIONS | {
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "items",
}
_INTEGER = r"/-?(0|[1-9][0-9]{0,19})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?/"
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


class LiteralValues(ABC):
    """Expressions for the values of one language."""

    constants: ClassVar[dict[str, str]]
    """Spelling of `true`, `false` and `null`."""
    assign: ClassVar[str]
    """Expression between the name of an argument and its value."""
    is_sorted: ClassVar[bool] = False
    """Whether keys were sorted in training."""

    def __init__(self, writer: GrammarWriter) -> None:
        self.writer = writer
        self._values: dict[tuple[int, int], str] = {}
        """Expressions by the identity and the depth of their schema, since references may repeat a schema often."""

    @abstractmethod
    def string(self) -> str:
        """Return an expression for any string."""

    @abstractmethod
    def fixed_string(self, value: str) -> str:
        """Return an expression for one string."""

    @abstractmethod
    def key(self, name: str) -> str:
        """Return an expression for a key within an object."""

    @abstractmethod
    def any_key(self) -> str:
        """Return an expression for any key within an object."""

    def members(self, tool: Tool) -> str:
        """Return an expression for the arguments of a tool.

        Raises:
            ApiError: 400 if the tool is strict, and its schema has a keyword that the language cannot enforce.
        """
        schema = tool.parameters
        self._values.clear()
        keywords = _KEYWORDS | {"$defs", "definitions"}
        limit_keywords(self.writer, tool, schema, keywords, "#", tool.schema_param)
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        if not properties and schema.get("additionalProperties") is not False:
            any_name = self.writer.shared_rule("NAME", r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            pair = f"{any_name} {self.assign} {self._any()}"
            return f'({pair} ("," " "? {pair})*)?'
        pairs = {
            name: f"{quote(name)} {self.assign} {self.value(subschema, tool, ('properties', name))}"
            for name, subschema in properties.items()
        }
        return self._ordered(pairs, tool.required)

    def value(self, schema: object, tool: Tool, place: tuple[str, ...]) -> str:
        """Return an expression for a value of a schema, which is a part of the tool's at `place`."""
        if not isinstance(schema, dict):
            return self._any()
        key = (id(schema), len(place))
        if key not in self._values:
            choices = [
                self._alternative(alternative, tool, place)
                for alternative in expand_alternatives(schema, tool.parameters)
            ]
            self._values[key] = alternatives(list(dict.fromkeys(choices)))
        return self._values[key]

    def _alternative(self, schema: dict[str, Any], tool: Tool, place: tuple[str, ...]) -> str:
        is_deep = len(place) > _MAX_PLACE
        limit_keywords(
            *(self.writer, tool, schema, ANNOTATIONS if is_deep else _KEYWORDS),
            "/".join(["#", *place]),
            ".".join([tool.schema_param, *place]),
        )
        if is_deep:
            return self._any()
        values = list_values(schema)
        if values:
            return alternatives([self._fixed(value) for value in values])
        types = sorted(schema_types(schema, tool.parameters)) or list(_TYPES)
        return alternatives([self._typed(kind, schema, tool, place) for kind in types])

    def _typed(self, kind: str, schema: dict[str, Any], tool: Tool, place: tuple[str, ...]) -> str:
        match kind:
            case "string" | "integer" | "number" | "boolean" | "null":
                return self._scalar(kind)
            case "array":
                item = self.writer.rule(
                    "item", self.value(schema.get("items"), tool, (*place, "items"))
                )
                return f'"[" ({item} ("," " "? {item})*)? "]"'
            case "object" if isinstance(schema.get("properties"), dict):
                properties = schema["properties"]
                required = schema.get("required") or ()
                pairs = {
                    name: f"{self.key(name)} {self.value(subschema, tool, (*place, 'properties', name))}"
                    for name, subschema in properties.items()
                }
                return f'"{{" {self._ordered(pairs, required)} "}}"'
        return self._any_object()

    def _scalar(self, kind: str) -> str:
        match kind:
            case "string":
                return self.string()
            case "integer":
                return self.writer.shared_rule("INTEGER", _INTEGER)
            case "number":
                return self.writer.shared_rule("NUMBER", _NUMBER)
            case "boolean":
                return f"({quote(self.constants['true'])} | {quote(self.constants['false'])})"
        return quote(self.constants["null"])

    def _ordered(self, pairs: Mapping[str, str], required: Collection[str]) -> str:
        """Return an expression for pairs in the order of the schema or, if the language sorts, in sorted order."""
        rules = {name: self.writer.rule("pair", pair) for name, pair in pairs.items()}
        orders = [list(rules)]
        if self.is_sorted:
            orders.append(sorted(rules, key=str.lower))
        choices = [
            self._sequence([rules[name] for name in order], [name in required for name in order])
            for order in orders
        ]
        return alternatives(list(dict.fromkeys(choices)))

    def _sequence(self, rules: Sequence[str], required: Sequence[bool]) -> str:
        """Return an expression for pairs in order, with commas, of which some may be left out."""
        if not rules:
            return ""
        if len(rules) > _MAX_MEMBERS:
            pair = self.writer.rule("pair", alternatives(rules))
            return f'({pair} ("," " "? {pair})*)?'
        later = [
            f'("," " "? {rule})' + "?" * (not is_required)
            for rule, is_required in zip(rules, required, strict=True)
        ]
        choices = []
        for index, rule in enumerate(rules):
            choices.append(" ".join([rule, *later[index + 1 :]]))
            if required[index]:
                return alternatives(choices)
        return f"{alternatives(choices)}?" if len(choices) > 1 else f"({choices[0]})?"

    def _fixed(self, value: object) -> str:
        match value:
            case str():
                return self.fixed_string(value)
            case bool():
                return quote(self.constants["true" if value else "false"])
            case int() | float():
                return quote(str(value))
            case None:
                return quote(self.constants["null"])
        return self._any_object() if json_type(value) == "object" else self._any()

    def _any(self) -> str:
        """Return an expression for any value, with nesting."""
        name = "any_value"
        if self.writer.has_rule(name):
            return name
        self.writer.shared_rule(name, "")
        members = self._any_object()
        kinds = ("string", "number", "boolean", "null")
        scalars = [self._scalar(kind) for kind in kinds]
        array = f'"[" ({name} ("," " "? {name})*)? "]"'
        self.writer.replace_rule(name, " | ".join([*scalars, array, members]))
        return name

    def _any_object(self) -> str:
        pair = f"{self.any_key()} any_value"
        if not self.writer.has_rule("any_value"):
            self._any()
        return f'"{{" ({pair} ("," " "? {pair})*)? "}}"'


class PythonValues(LiteralValues):
    """Python literals."""

    constants: ClassVar[dict[str, str]] = {"true": "True", "false": "False", "null": "None"}
    assign = '"="'

    def string(self) -> str:
        """Return an expression for any string."""
        return self.writer.shared_rule(
            "STRING", r"""/'([^'\\\n]|\\[^\n])*'|"([^"\\\n]|\\[^\n])*"/"""
        )

    def fixed_string(self, value: str) -> str:
        """Return an expression for one string, in either kind of quotes."""
        text = repr(value)[1:-1].replace("\\'", "'")
        single = "'" + text.replace("'", "\\'") + "'"
        double = '"' + text.replace('"', '\\"') + '"'
        return f"({quote(single)} | {quote(double)})"

    def key(self, name: str) -> str:
        """Return an expression for a key within an object."""
        return f'{self.fixed_string(name)} ":" " "?'

    def any_key(self) -> str:
        """Return an expression for any key within an object."""
        return f'{self.string()} ":" " "?'


class MappingValues(LiteralValues):
    """Values of `MappingSyntax`."""

    constants: ClassVar[dict[str, str]] = {"true": "true", "false": "false", "null": "null"}
    assign = '":"'
    is_sorted = True

    def __init__(self, writer: GrammarWriter, quote_marker: str) -> None:
        super().__init__(writer)
        self._quote = quote_marker

    def string(self) -> str:
        """Return an expression for any string."""
        if self.writer.has_rule("string"):
            return "string"
        text = self.writer.text_until(self._quote)
        return self.writer.shared_rule("string", f"{self.writer.literal(self._quote)} {text}")

    def fixed_string(self, value: str) -> str:
        """Return an expression for one string."""
        return f"({self.writer.literal(self._quote + value + self._quote)})"

    def key(self, name: str) -> str:
        """Return an expression for a key within an object."""
        return quote(f"{name}:")

    def any_key(self) -> str:
        """Return an expression for any key within an object."""
        return self.writer.shared_rule("KEY", r"/[A-Za-z_][A-Za-z0-9_ -]{0,63}:/")
