"""Remedies for invalid settings: the intended key or the valid values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TypeVar

from msgspec.inspect import (
    CollectionType,
    DictType,
    ListType,
    LiteralType,
    Metadata,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

InspectType = TypeVar("InspectType", bound=Type)

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`$")


def suggest_fix(problem: str, path: Sequence[str | int], settings_type: type) -> str:
    """Return a remedy to append to the problem: the intended key or the valid values. Empty if none is known.

    Args:
        problem: Message of a msgspec.ValidationError, without its path.
        path: Path of the setting.
        settings_type: The msgspec struct of the settings.
    """
    unknown = find_unknown_field(problem)
    if unknown is None and not problem.startswith("Invalid enum value"):
        return ""
    names = [key for key in path if isinstance(key, str)]
    node: Type | None = type_info(settings_type)
    for name in names:
        node = _find_child(node, name)
    if unknown is None:
        literal = _find_type(node, LiteralType)
        values = [] if literal is None else [str(value) for value in literal.values]
        return f"; write {', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else ""
    close = get_close_matches(unknown, _struct_fields(node), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def find_unknown_field(problem: str) -> str | None:
    """Return the name of the field if the problem is that no such field exists."""
    match = _UNKNOWN_FIELD.search(problem)
    return None if match is None else match[1]


def _find_child(node: Type | None, name: str) -> Type | None:
    """Return the type of a struct's field or of a mapping's values."""
    mapping = _find_type(node, DictType)
    return _struct_fields(node).get(name) if mapping is None else mapping.value_type


def _struct_fields(node: Type | None) -> dict[str, Type]:
    """Return the fields of the struct type within a type, or none."""
    struct = _find_type(node, StructType)
    return {} if struct is None else {field.encode_name: field.type for field in struct.fields}


def _find_type(node: Type | None, wanted_type: type[InspectType]) -> InspectType | None:
    """Find a type of the wanted kind: the node itself, an annotated type, a union member or a list item."""
    if isinstance(node, wanted_type):
        return node
    match node:
        case Metadata():
            return _find_type(node.type, wanted_type)
        case ListType() | VarTupleType() | CollectionType():
            return _find_type(node.item_type, wanted_type)
        case UnionType():
            return next(
                (found for member in node.types if (found := _find_type(member, wanted_type))),
                None,
            )
        case _:
            return None
