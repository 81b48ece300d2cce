"""Decoder for YAML settings files that rejects unknown and duplicate keys by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

import msgspec
import yaml
from msgspec.inspect import (
    ListType,
    LiteralType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

T = TypeVar("T")
InspectType = TypeVar("InspectType", bound=Type)

_VALIDATION_ERROR = re.compile(
    r"(unknown field `(?P<name>[^`]*)`|Invalid enum value '?(?P<value>.*?)'?)( - at `\$(?P<path>[^`]*)`)?$"
)


_BOOL = "tag:yaml.org,2002:bool"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML loader that resolves plain scalars as YAML 1.2: `off` and dates (such as `2024-01-01`) are strings."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if tag not in {_BOOL, _TIMESTAMP}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def decode_settings(
    content: bytes, settings_type: type[T], renamed: Mapping[str, str] = MappingProxyType({})
) -> T:
    """Decode a settings file.

    Args:
        content: The YAML text.
        settings_type: The msgspec struct of the settings.
        renamed: New name by path of an old setting (`timeouts.total_s`) or value (`auth.mode=keys`).

    Raises:
        ValueError: The settings are invalid. The message names the key, the problem and a remedy.
    """
    try:
        loader = _Loader(content)
        node = loader.get_single_node()
        _reject_duplicate_keys(node, set())
        document = None if node is None else loader.construct_document(node)
        return msgspec.convert({} if document is None else document, settings_type)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}{_suggest_fix(str(error), settings_type, renamed)}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("the settings are nested too deeply. Remove levels.") from error


def _reject_duplicate_keys(node: yaml.Node | None, seen: set[int]) -> None:
    """Reject mappings with a duplicate key, which YAML forbids but PyYAML resolves to the last value.

    Raises:
        ValueError: A mapping has a key twice. The message names both lines.
    """
    if id(node) in seen:
        return  # an alias of a node that was checked
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _reject_duplicate_keys(item, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(
                    f"{name!r} is defined twice, in line {lines[name]} and in line {line}. Keep one."
                )
            lines[name] = line
            _reject_duplicate_keys(value, seen)


def _suggest_fix(problem: str, settings_type: type, renamed: Mapping[str, str]) -> str:
    """Return a remedy to append to the problem: the intended key or the valid values. Empty if none is known."""
    error = _VALIDATION_ERROR.search(problem)
    if error is None:
        return ""
    path = re.findall(r"\.(\w+)", error["path"] or "")
    location = ".".join(path)
    old_name = (
        f"{location}={error['value']}"
        if error["name"] is None
        else ".".join([*path, error["name"]])
    )
    new_name = renamed.get(old_name)
    if new_name is not None:
        return f"; it is called `{new_name}` now"
    node: Type | None = type_info(settings_type)
    for name in path:
        node = _struct_fields(node).get(name)
    if error["name"] is None:
        literal = _find_type(node, LiteralType)
        values = [] if literal is None else [str(value) for value in literal.values]
        return f"; write {', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else ""
    close = get_close_matches(error["name"], _struct_fields(node), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _struct_fields(node: Type | None) -> dict[str, Type]:
    """Return the fields of the struct type within a type, or none."""
    struct = _find_type(node, StructType)
    return {} if struct is None else {field.encode_name: field.type for field in struct.fields}


def _find_type(node: Type | None, wanted_type: type[InspectType]) -> InspectType | None:
    """Find a type of the wanted kind: the node itself, a union member or a list item."""
    if isinstance(node, wanted_type):
        return node
    match node:
        case ListType() | VarTupleType():
            return _find_type(node.item_type, wanted_type)
        case UnionType():
            return next(
                (found for member in node.types if (found := _find_type(member, wanted_type))),
                None,
            )
        case _:
            return None
