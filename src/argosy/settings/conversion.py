"""Conversion of a settings value into a struct. Errors name the setting, its value unless secret, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
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

from argosy.settings.secret_names import is_secret_name, is_secret_value

T = TypeVar("T")

SettingPath = tuple[str | int, ...]
"""Path of a setting: keys of mappings and positions in lists."""

_MAX_SHOWN_VALUE = 100
"""Length up to which error messages show an invalid value."""
_SECRET_SECTIONS = frozenset({"environment", "headers"})
_ERROR_PATH = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`$")
_PATH_ITEM = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_ANY_KEY = "..."
"""Stands for the key of a mapping whose value is invalid. msgspec does not name it."""
_InspectType = TypeVar("_InspectType", bound=Type)
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`$")


class SettingError(ValueError):
    """Raised if a setting is invalid. The message contains the remedy."""

    def __init__(self, message: str, path: SettingPath = ()) -> None:
        super().__init__(message)
        self.path = path

    @classmethod
    def at(cls, path: SettingPath, problem: str) -> SettingError:
        """Return an error whose message begins with the path of the setting."""
        return cls(f"{format_path(path).removeprefix('.')}: {problem}", path)


def convert_settings(
    value: Any,  # noqa: ANN401 - what a YAML file can hold
    settings_type: type[T],
    path: SettingPath = (),
) -> T:
    """Convert a value of dictionaries, lists and scalars into a type that msgspec supports.

    Raises SettingError, which contains the path of the value, if it is invalid.
    """
    try:
        return msgspec.convert(value, settings_type)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _ERROR_PATH.search(text)
        below: list[str | int] = [] if match is None else _parse_path(match["path"])
        while _ANY_KEY in below:
            position = below.index(_ANY_KEY)
            below[position] = _find_invalid_key(value, below[:position], settings_type, text)
        is_key = match is not None and match["key"] is not None
        problem = text if match is None else text[: match.start()]
        fix = _suggest_fix(problem, below, settings_type)
        if not fix and not is_key:
            fix = _describe_value(problem, (*path, *below), _find_value(value, below))
        where = format_path((*path, *below))
        place = f" - at {'`key` in ' if is_key else ''}`${where}`" if where else ""
        unknown = _find_unknown_field(problem)
        raise SettingError(
            f"{problem}{place}{fix}",
            (*path, *below) if unknown is None else (*path, *below, unknown),
        ) from error


def format_path(path: Sequence[str | int]) -> str:
    """Format a path: `.pools[0].options`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def _parse_path(text: str) -> list[str | int]:
    return [name or (int(index) if index else _ANY_KEY) for name, index in _PATH_ITEM.findall(text)]


def _find_value(value: Any, path: Sequence[str | int]) -> Any:  # noqa: ANN401
    for key in path:
        value = value[key]
    return value


def _find_invalid_key(
    document: Any,  # noqa: ANN401
    path: Sequence[str | int],
    settings_type: Any,  # noqa: ANN401
    problem: str,
) -> str:
    """Return the key below `path` whose value causes the problem: the first with which alone it remains."""
    parent = _find_value(document, path)
    entries = dict(parent)
    try:
        for key, value in entries.items():
            parent.clear()
            parent[key] = value
            try:
                msgspec.convert(document, settings_type)
            except msgspec.ValidationError as error:
                if str(error) == problem:
                    return str(key)
    finally:
        parent.clear()
        parent.update(entries)
    raise AssertionError(problem)


def _describe_value(problem: str, path: SettingPath, value: object) -> str:
    """Return text that names the invalid value. Empty if it is long, or may be a secret."""
    names = [key for key in path if isinstance(key, str)]
    if (
        isinstance(value, (dict, list))
        or len(str(value)) > _MAX_SHOWN_VALUE
        or problem.startswith("Invalid enum value")  # contains the value
        or is_secret_value(str(value))
        or not _SECRET_SECTIONS.isdisjoint(names)
        or any(map(is_secret_name, names))
    ):
        return ""
    return f", but it is {'null' if value is None else repr(value)}"


def _suggest_fix(problem: str, path: Sequence[str | int], settings_type: type) -> str:
    """Return a remedy to append to a problem at a path: the intended key or the valid values. Empty if unknown."""
    unknown = _find_unknown_field(problem)
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


def _find_unknown_field(problem: str) -> str | None:
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


def _find_type(node: Type | None, wanted_type: type[_InspectType]) -> _InspectType | None:
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
