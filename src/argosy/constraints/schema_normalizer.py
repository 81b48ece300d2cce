"""Rewrites a JSON schema into the part of the language that the grammar library enforces exactly.

The result has no other keywords than the library's, references only to its own definitions, and expressions in the
library's syntax. A keyword without an exact rewriting is an error with `strict`, and else removed and recorded as a
`Relaxation`. Rules only narrow a schema, never widen it, so that removing one leaves a superset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from argosy.constraints.limits import (
    MAX_COMPILED_DEPTH,
    MAX_PATTERNS,
    MAX_SUBSCHEMAS,
)
from argosy.constraints.output_constraint import Relaxation
from argosy.constraints.schema_errors import invalid_schema, unsupported_schema
from argosy.constraints.schema_references import SchemaLocation, SchemaReferences
from argosy.constraints.schema_vocabulary import DRAFT_7, child_pointer, is_known

Rule = Callable[["SchemaNode", str, Any], None]
"""Handles one keyword of a node: checks its value and adds to the node's output."""
Finisher = Callable[["SchemaNode"], None]
"""Completes a node after its keywords, where several depend on one another."""


@dataclass(slots=True)
class NormalizedSchema:
    """Schema for the library, with what it leaves out."""

    schema: dict[str, Any]
    relaxations: tuple[Relaxation, ...]
    external_references: frozenset[int]
    """Identities of subschemas with a removed reference to another document."""


@dataclass(slots=True)
class SchemaNode:
    """Subschema while it is rewritten."""

    normalizer: SchemaNormalizer
    location: SchemaLocation
    output: dict[str, Any] = field(default_factory=dict)
    conjuncts: list[Any] = field(default_factory=list)
    """Schemas that must hold as well, for keywords that the output already has."""
    is_unsatisfiable: bool = False

    @property
    def source(self) -> dict[str, Any]:
        """Subschema as the request has it."""
        schema: dict[str, Any] = self.location.schema
        return schema

    def add(self, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
        """Require a keyword of the library, beside the same keyword if the output already has it."""
        if keyword in self.output:
            self.conjuncts.append({keyword: value})
        else:
            self.output[keyword] = value

    def has(self, keyword: str) -> bool:
        """Return whether the source has a keyword that its draft knows."""
        return keyword in self.source and is_known(keyword, self.location.draft)

    def pointer(self, *tokens: str | int) -> str:
        """Return the pointer of a descendant."""
        return child_pointer(self.location.pointer, *tokens)

    def normalize(self, schema: Any, *tokens: str | int) -> Any:  # noqa: ANN401 - schema
        """Rewrite a subschema at `tokens`."""
        return self.normalizer.normalize(
            self.normalizer.references.locate(schema, self.pointer(*tokens), self.location)
        )

    def relax(self, keyword: str, reason: str, *tokens: str | int) -> None:
        """Record that a keyword is not enforced. Raises `ApiError` with `strict`."""
        self.normalizer.relax(keyword, self.pointer(keyword, *tokens), reason)

    def require_text(self, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
        """Reject a keyword whose value is no string."""
        if not isinstance(value, str):
            self.reject("The value must be a string.", keyword)

    def require_object(self, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
        """Reject a keyword whose value is no object."""
        if not isinstance(value, dict):
            self.reject("The value must be an object.", keyword)

    def reject(self, message: str, *tokens: str | int) -> NoReturn:
        """Raise the error for an invalid schema."""
        raise invalid_schema(message, self.normalizer.param, self.pointer(*tokens))

    def result(self) -> Any:  # noqa: ANN401 - schema
        """Return the rewritten subschema."""
        if self.is_unsatisfiable:
            return False
        if self.conjuncts:
            self.output["allOf"] = [*self.output.get("allOf", ()), *self.conjuncts]
        return self.output


class SchemaNormalizer:
    """Rewrites one document.

    Args:
        document: Schema of a request, decoded.
        strict: Whether a keyword that cannot be enforced is an error.
        param: Request field for errors.
        rules: Rule for each keyword; other keywords are annotations.
        finishers: Called for each node after its rules.
    """

    def __init__(
        self,
        document: Any,  # noqa: ANN401 - any JSON value
        *,
        strict: bool,
        param: str,
        rules: Mapping[str, Rule],
        finishers: tuple[Finisher, ...],
    ) -> None:
        self.param = param
        self.references = SchemaReferences(document)
        self.definitions: dict[str, Any] = {}
        """Rewritten targets of references. A target that is not complete is None."""
        self.external_references: set[int] = set()
        self._strict = strict
        self._rules = rules
        self._finishers = finishers
        self._relaxations: dict[str, Relaxation] = {}
        self._names: dict[object, str] = {}
        self._depth = 0
        self._counts = {"subschemas": 0, "properties": 0, "enum values": 0, "patterns": 0}
        self._patterns: set[str] = set()
        self._deferred: list[Callable[[], None]] = []

    def run(self) -> NormalizedSchema:
        """Return the rewritten document.

        Raises:
            ApiError: 400 naming the keyword and its pointer.
        """
        schema = self.normalize(self.references.root)
        for check in self._deferred:
            check()
        if schema is False:
            raise invalid_schema("No document satisfies this schema.", self.param, "#")
        if self.definitions:
            schema = {**schema, "$defs": self.definitions}
        return NormalizedSchema(
            schema, tuple(self._relaxations.values()), frozenset(self.external_references)
        )

    def normalize(self, location: SchemaLocation) -> Any:  # noqa: ANN401 - schema
        """Return a rewritten subschema: False or an object."""
        if isinstance(location.schema, bool):
            return {} if location.schema else False
        if not isinstance(location.schema, dict):
            raise invalid_schema(
                "A schema must be an object, true or false.", self.param, location.pointer
            )
        self.count("subschemas", 1, MAX_SUBSCHEMAS, location.pointer)
        self._depth += 1
        if self._depth > MAX_COMPILED_DEPTH:
            raise invalid_schema(
                f"Subschemas are nested more than {MAX_COMPILED_DEPTH} deep, references included.",
                self.param,
                location.pointer,
            )
        try:
            return self._normalize_node(SchemaNode(self, location))
        finally:
            self._depth -= 1

    def _normalize_node(self, node: SchemaNode) -> Any:  # noqa: ANN401 - schema
        draft = node.location.draft
        if draft <= DRAFT_7 and "$ref" in node.source:
            self._rules["$ref"](node, "$ref", node.source["$ref"])
            return node.result()
        for keyword, value in node.source.items():
            rule = self._rules.get(keyword)
            if rule is not None and is_known(keyword, draft):
                rule(node, keyword, value)
        for finish in self._finishers:
            finish(node)
        return node.result()

    def define(self, location: SchemaLocation) -> Any:  # noqa: ANN401 - schema
        """Return a schema that refers to the target of a reference, which is rewritten once."""
        schema = location.schema
        key = id(schema) if isinstance(schema, dict) else location.pointer
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"d{len(self._names)}"
            self.definitions[name] = None
            self.definitions[name] = self.normalize(location)
        target = self.definitions[name]
        return target if target is False or target == {} else {"$ref": f"#/$defs/{name}"}

    def share(self, schema: Any) -> Any:  # noqa: ANN401 - schema
        """Return a rewritten schema in a form that may be repeated: a reference, if it is large."""
        if not isinstance(schema, dict) or not schema:
            return schema
        name = f"d{len(self._names)}"
        self._names[name] = name
        self.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def relax(self, keyword: str, pointer: str, reason: str) -> None:
        """Record that the keyword at `pointer` is not enforced. Raises `ApiError` with `strict`."""
        if self._strict:
            raise unsupported_schema(
                f"The keyword '{keyword}' cannot be enforced: {reason}. Change it, or set \"strict\" to false to have"
                " the finished document validated instead.",
                self.param,
                pointer,
            )
        self._relaxations.setdefault(pointer, Relaxation(keyword, pointer, reason))

    def defer(self, check: Callable[[], None]) -> None:
        """Call `check` when all definitions are rewritten."""
        self._deferred.append(check)

    def count(self, what: str, number: int, maximum: int, pointer: str) -> None:
        """Count towards a limit of the document."""
        self._counts[what] += number
        if self._counts[what] > maximum:
            raise invalid_schema(
                f"The schema has more than {maximum} {what}. Simplify it.", self.param, pointer
            )

    def count_pattern(self, pattern: str, pointer: str) -> None:
        """Count a regular expression, if it is new."""
        if pattern not in self._patterns:
            self._patterns.add(pattern)
            self.count("patterns", 1, MAX_PATTERNS, pointer)
