"""Random JSON schemas: reproducible from a seed, and as a hypothesis strategy.

Half of them have six or more keywords. They use references (recursive ones too), regular expressions, formats, bounds,
combinations and closed or open objects. Lengths are bounded, so that an answer of some hundred tokens can be complete.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from argosy.constraints import schema_grammar
from argosy.protocol import ApiError

Schema = dict[str, Any]

NAMES = (
    "id",
    "name",
    "kind",
    "items",
    "size",
    "tags",
    "next",
    "a b",
    'quo"te',
    "naïve",
    "x/y",
    "~",
)
FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
]
PATTERN_ATOMS = (
    "[a-z]",
    "[A-F0-9]",
    r"\d",
    r"\w",
    "x",
    "(?:ab|c)",
    r"\.",
    "é",
    "[^a-c]",
    "(a|bc)",
    r"[\w-]",
)
QUANTIFIERS = ("", "", "+", "?", "{2}", "{1,3}", "*")
MAX_DEPTH = 4
SOME_KEYWORDS = 6


def count_keywords(schema: object) -> int:
    """Return the number of keywords of a schema and its subschemas. Names of properties count as well."""
    if isinstance(schema, dict):
        return len(schema) + sum(count_keywords(value) for value in schema.values())
    if isinstance(schema, list):
        return sum(count_keywords(value) for value in schema)
    return 0


def random_schema(rng: random.Random, *, strict: bool = False) -> Schema:
    """Return a schema that compiles. Every second one has at least six keywords.

    Args:
        rng: Source of randomness. The same state gives the same schema.
        strict: Whether the schema has no keyword that has to be relaxed.
    """
    minimum = SOME_KEYWORDS if rng.random() < 0.5 else 1
    while True:
        schema = _SchemaBuilder(rng, strict=strict).build()
        if count_keywords(schema) < minimum:
            continue
        try:
            schema_grammar(schema, strict=strict, param="schema")
        except ApiError:
            continue  # contradictory, or disjointness was not proved
        return schema


def schemas(*, strict: bool = False) -> st.SearchStrategy[Schema]:
    """Return a strategy of schemas that compile."""
    return st.integers(0, 2**32).map(lambda seed: random_schema(random.Random(seed), strict=strict))


class _SchemaBuilder:
    """Builds one schema with its definitions."""

    def __init__(self, rng: random.Random, *, strict: bool) -> None:
        self._rng = rng
        self._strict = strict
        self._definitions: dict[str, Schema] = {}
        self._definition_names: list[str] = []

    def build(self) -> Schema:
        for number in range(self._rng.choice((0, 0, 1, 2, 3))):
            name = self._rng.choice((f"d{number}", f"n/{number}", f"p~{number}"))
            self._definition_names.append(name)
            self._definitions[name] = self._build_node(2)
        schema = self._rng.choice((self._build_object, self._build_node))(0)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _build_node(self, depth: int) -> Schema:
        builders: list[Callable[[int], Schema]] = [
            self._build_string,
            self._build_string,
            self._build_number,
            self._build_enum,
            self._build_plain,
        ]
        if depth < MAX_DEPTH:
            builders += [self._build_object, self._build_object, self._build_array]
            builders += [self._build_union, self._build_intersection]
        if self._definition_names:
            builders += [self._build_reference, self._build_reference]
        schema = self._rng.choice(builders)(depth)
        if self._rng.random() < 0.15:
            schema = {"title": "A title", "description": "Its description.", **schema}
        return schema

    def _build_plain(self, depth: int) -> Schema:
        rng = self._rng
        return rng.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}))

    def _build_reference(self, depth: int) -> Schema:
        name = self._rng.choice(self._definition_names)
        escaped = name.replace("~", "~0").replace("/", "~1")
        return {"$ref": f"#/$defs/{escaped}"}

    def _build_string(self, depth: int) -> Schema:
        rng = self._rng
        kind = rng.random()
        if kind < 0.4:
            schema: Schema = {"type": "string", "pattern": self._build_pattern()}
        elif kind < 0.6:
            schema = {"type": "string", "format": rng.choice(FORMATS)}
        else:
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(12)}
        if rng.random() < 0.3 and "pattern" in schema:
            schema["maxLength"] = rng.randrange(8, 40)
        if not self._strict and rng.random() < 0.1:
            schema["pattern"] = "^(?!b)" + self._build_pattern().strip("^$")
        return schema

    def _build_pattern(self) -> str:
        rng = self._rng
        body = "".join(
            rng.choice(PATTERN_ATOMS) + rng.choice(QUANTIFIERS) for _ in range(rng.randrange(1, 5))
        )
        if rng.random() < 0.2:
            body = f"(?:{body}|{rng.choice(PATTERN_ATOMS)}{{1,2}})"
        return rng.choice((f"^{body}$", f"^{body}$", f"^{body}", f"{body}$", body))

    def _build_number(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": rng.choice(("integer", "number"))}
        low = rng.choice((-1000, -3, 0, 1, 17, 0.5, -2.25))
        if rng.random() < 0.8:
            schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
        if rng.random() < 0.8:
            width = rng.choice((1, 10, 250, 100000, 2.5))
            schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + width
        if rng.random() < 0.3:
            schema["multipleOf"] = rng.choice((1, 2, 5, 0.25, 0.1, 7))
        return schema

    def _build_enum(self, depth: int) -> Schema:
        numbers, texts = [0, 1, -7, 2.5], ["", "a", "red", 'q"\\', "naïve\n"]
        values = [None, True, False, *numbers, *texts, [], [1, "x"], {"k": [None]}]
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randrange(1, 5))}

    def _build_array(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "array"}
        count = rng.randrange(4)
        if rng.random() < 0.3:
            schema["prefixItems"] = [
                self._build_node(depth + 1) for _ in range(rng.randrange(1, 3))
            ]
        if rng.random() < 0.8:
            schema["items"] = self._build_node(depth + 1)
        if rng.random() < 0.5:
            schema["minItems"] = count
        schema["maxItems"] = count + rng.randrange(3)
        if not self._strict and rng.random() < 0.3:
            schema[rng.choice(("uniqueItems", "contains"))] = True
        return schema

    def _build_object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randrange(5 if depth else 6))
        schema: Schema = {"type": "object"}
        schema["properties"] = {name: self._build_node(depth + 1) for name in names}
        schema["required"] = [name for name in names if rng.random() < 0.6]
        openness = rng.random()
        if openness < 0.6:
            schema["additionalProperties"] = False
        elif openness < 0.7:
            schema["additionalProperties"] = self._build_node(depth + 1)
        elif openness < 0.8:
            schema["patternProperties"] = {"^x[0-9]$": self._build_node(depth + 1)}
            schema["additionalProperties"] = False
        elif openness < 0.85:
            schema = {
                "type": "object",
                "propertyNames": {"pattern": "^[a-z]{1,3}$"},
                "additionalProperties": self._build_node(depth + 1),
            }
        if rng.random() < 0.1:
            schema["minProperties"] = len(schema.get("required", ()))
        if not self._strict and rng.random() < 0.2:
            schema.update(self._build_unenforceable(names))
        items = list(schema.items())
        rng.shuffle(items)
        return dict(items)

    def _build_unenforceable(self, names: list[str]) -> Schema:
        rng = self._rng
        options: list[Schema] = [
            {"minProperties": 2},
            {"not": {"required": ["forbidden"]}},
            {"if": {"required": ["id"]}, "then": {"required": ["name"]}},
            {"dependentRequired": {"id": ["name"]}},
            {"unevaluatedProperties": False, "allOf": [{"properties": {"id": True}}]},
        ]
        if names:
            options.append({"dependentRequired": {names[0]: names[1:2]}})
        return rng.choice(options)

    def _build_union(self, depth: int) -> Schema:
        rng = self._rng
        if rng.random() < 0.4:
            return {"anyOf": [self._build_node(depth + 1) for _ in range(rng.randrange(2, 4))]}
        options = [
            {
                **self._build_object(MAX_DEPTH),
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._build_node(depth + 1)},
                "required": ["kind"],
            }
            for kind in ("one", "two")
        ]
        if not self._strict and rng.random() < 0.2:
            options.append(self._build_object(depth + 1))
        return {"oneOf": [*options, {"type": "integer", "minimum": 0}]}

    def _build_intersection(self, depth: int) -> Schema:
        rng = self._rng
        name, other = rng.sample(NAMES, 2)
        base: Schema = {"type": "object", "properties": {name: self._build_node(depth + 1)}}
        if rng.random() < 0.5:
            return {
                **base,
                "anyOf": [
                    {"required": [name]},
                    {"properties": {other: self._build_node(depth + 1)}, "required": [other]},
                ],
            }
        return {
            "allOf": [
                base,
                {"properties": {other: self._build_node(depth + 1)}, "required": [other]},
            ]
        }
