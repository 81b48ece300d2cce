"""Random JSON schemas: reproducible from a seed, and as a hypothesis strategy.

They use references (recursive ones too), regular expressions, formats, bounds, combinations and closed or open objects.
Lengths are bounded, so that an answer of some hundred tokens can be complete.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from argosy.constraints import schema_grammar
from argosy.protocol import ApiError

Schema = dict[str, Any]

NAMES = ("id", "name", "kind", "items", "next", "a b", 'quo"te', "naïve", "x/y", "~")
FORMATS = ("date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERN_ATOMS = ("[A-F0-9]", r"\d", r"\w", "(?:ab|c)", r"\.", "é", "[^a-c]", "(a|bc)", r"[\w-]")
QUANTIFIERS = ("", "", "+", "?", "{2}", "{1,3}", "*")
ANCHORS = ("^{}$", "^{}$", "^{}", "{}$", "{}")
VALUES: list[Any] = [None, True, -7, 2.5, "", 'q"\\', "naïve\n", [], [1, "x"], {"k": [None]}]
PLAIN: list[Schema] = [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]
OPENNESS: list[Schema] = [
    *[{"additionalProperties": False}] * 3,
    {"patternProperties": {"^x[0-9]$": PLAIN[2]}, "additionalProperties": False},
    {"propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": PLAIN[2]},
    {},
]
UNENFORCEABLE: list[Schema] = [
    {"minProperties": 2},
    {"not": {"required": ["forbidden"]}},
    {"if": {"required": ["id"]}, "then": {"required": ["name"]}},
    {"dependentRequired": {"id": ["name"]}},
    {"unevaluatedProperties": False, "allOf": [{"properties": {"id": True}}]},
]
"""Keywords of objects that have to be relaxed."""
MAX_DEPTH = 4


def random_schema(rng: random.Random, *, strict: bool = False) -> Schema:
    """Return a schema that compiles.

    Args:
        rng: Source of randomness. The same state gives the same schema.
        strict: Whether the schema has no keyword that has to be relaxed.
    """
    while True:
        schema = _SchemaBuilder(rng, strict=strict).build()
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

    def build(self) -> Schema:
        for name in self._rng.sample(("d", "n/1", "p~2"), self._rng.randrange(4)):
            self._definitions[name] = {}  # so that it can refer to itself
            self._definitions[name] = self._build_node(2)
        schema = self._rng.choice((self._build_object, self._build_node))(0)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _build_node(self, depth: int) -> Schema:
        builders = [self._build_string, self._build_number, self._build_value]
        if depth < MAX_DEPTH:
            builders += [self._build_object, self._build_object, self._build_array]
            builders += [self._build_union, self._build_intersection]
        if self._definitions:
            builders += [self._build_reference, self._build_reference]
        schema = self._rng.choice(builders)(depth)
        return {"title": "A title", **schema} if self._is_likely(0.15) else schema

    def _is_likely(self, share: float) -> bool:
        return self._rng.random() < share

    def _is_relaxed(self) -> bool:
        return not self._strict and self._is_likely(0.2)

    def _build_reference(self, depth: int) -> Schema:
        name = self._rng.choice([*self._definitions])
        return {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"}

    def _build_string(self, depth: int) -> Schema:
        rng, low = self._rng, self._rng.randrange(4)
        schema: Schema = rng.choice(
            (
                {"pattern": self._build_pattern()},
                {"pattern": self._build_pattern(), "maxLength": rng.randrange(8, 40)},
                {"format": rng.choice(FORMATS)},
                {"minLength": low, "maxLength": low + rng.randrange(12)},
            )
        )
        if self._is_relaxed():
            schema = {"pattern": f"^(?!b){self._build_pattern().strip('^$')}"}
        return {"type": "string", **schema}

    def _build_pattern(self) -> str:
        rng = self._rng
        body = "".join(
            rng.choice(PATTERN_ATOMS) + rng.choice(QUANTIFIERS) for _ in range(rng.randrange(1, 5))
        )
        if self._is_likely(0.2):
            body = f"(?:{body}|{rng.choice(PATTERN_ATOMS)}{{1,2}})"
        return rng.choice(ANCHORS).replace("{}", body, 1)

    def _build_number(self, depth: int) -> Schema:
        rng, low = self._rng, self._rng.choice((-1000, -3, 0, 1, 17, 0.5, -2.25))
        bounds: Schema = {
            rng.choice(("minimum", "exclusiveMinimum")): low,
            rng.choice(("maximum", "exclusiveMaximum")): low + rng.choice((1, 10, 100000, 2.5)),
            "multipleOf": rng.choice((1, 2, 5, 0.25, 0.1, 7)),
        }
        kept = rng.sample(sorted(bounds), rng.randrange(4))
        return {"type": rng.choice(("integer", "number")), **{name: bounds[name] for name in kept}}

    def _build_value(self, depth: int) -> Schema:
        rng = self._rng
        values = rng.sample(VALUES, rng.randrange(1, 5))
        return rng.choice(({"const": values[0]}, {"enum": values}, rng.choice(PLAIN)))

    def _build_array(self, depth: int) -> Schema:
        count = self._rng.randrange(4)
        schema: Schema = {"type": "array", "items": self._build_node(depth + 1)}
        if self._is_likely(0.3):
            schema["prefixItems"] = [self._build_node(depth + 1)]
        if self._is_relaxed():
            schema[self._rng.choice(("uniqueItems", "contains"))] = True
        return schema | {"minItems": count, "maxItems": count + self._rng.randrange(3)}

    def _build_object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randrange(5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._build_node(depth + 1) for name in names},
            "required": [name for name in names if self._is_likely(0.6)],
            **rng.choice(OPENNESS),
        }
        if "propertyNames" in schema:
            del schema["properties"], schema["required"]
        if self._is_likely(0.1):
            schema["minProperties"] = len(schema.get("required", ()))
        if self._is_relaxed():
            schema |= rng.choice(UNENFORCEABLE)
        return dict(rng.sample(list(schema.items()), len(schema)))

    def _build_union(self, depth: int) -> Schema:
        if self._is_likely(0.4):
            return {"anyOf": [self._build_node(depth + 1) for _ in range(2)]}
        options = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._build_node(depth + 1)},
                "required": ["kind"],
            }
            for kind in ("one", "two")
        ]
        if self._is_relaxed():
            options.append(self._build_object(depth + 1))
        return {"oneOf": [*options, {"type": "integer", "minimum": 0}]}

    def _build_intersection(self, depth: int) -> Schema:
        name, other = self._rng.sample(NAMES, 2)
        base: Schema = {"type": "object", "properties": {name: self._build_node(depth + 1)}}
        more = {"properties": {other: self._build_node(depth + 1)}, "required": [other]}
        if self._is_likely(0.5):
            return {**base, "anyOf": [{"required": [name]}, more]}
        return {"allOf": [base, more]}
