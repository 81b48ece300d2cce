"""A settings file in YAML, read into its type: a key that is unknown or there twice is refused by name."""

from __future__ import annotations

import re
from difflib import get_close_matches
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
    r"(unknown field `(?P<name>[^`]*)`|Invalid enum value .*?)( - at `\$(?P<path>[^`]*)`)?$"
)


_BOOL = "tag:yaml.org,2002:bool"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes words as YAML 1.2 does: `off` is one, and so is a date, as in the name of a version."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if tag not in {_BOOL, _TIMESTAMP}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def decode_settings(content: bytes, settings_type: type[T]) -> T:
    """The settings. Raises ValueError, naming the key and what is wrong with it."""
    try:
        loader = _Loader(content)
        node = loader.get_single_node()
        _reject_duplicate_keys(node, set())
        told = None if node is None else loader.construct_document(node)
        return msgspec.convert({} if told is None else told, settings_type)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}{_suggest_fix(str(error), settings_type)}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply; settings are flat") from error


def _reject_duplicate_keys(node: yaml.Node | None, seen: set[int]) -> None:
    """Raise ValueError for a key that a mapping has twice: YAML forbids it, and its readers take the last."""
    if id(node) in seen:
        return  # an alias of what was looked at
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
                    f"{name!r} is there twice, in line {lines[name]} and in line {line}; keep one"
                )
            lines[name] = line
            _reject_duplicate_keys(value, seen)


def _suggest_fix(problem: str, settings_type: type) -> str:
    """To be put behind the problem: the key that an unknown one may be meant for, or the words that may stand there."""
    found = _VALIDATION_ERROR.search(problem)
    if found is None:
        return ""
    told: Type | None = type_info(settings_type)
    for name in re.findall(r"\.(\w+)", found["path"] or ""):
        told = _struct_fields(told).get(name)
    if found["name"] is None:
        words = _find_type(told, LiteralType)
        known = [] if words is None else [str(word) for word in words.values]
        return f"; write {', '.join(known[:-1])} or {known[-1]}" if len(known) > 1 else ""
    close = get_close_matches(found["name"], _struct_fields(told), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _struct_fields(type_info_node: Type | None) -> dict[str, Type]:
    """Of the structure in it, if there is one."""
    struct = _find_type(type_info_node, StructType)
    return {} if struct is None else {field.encode_name: field.type for field in struct.fields}


def _find_type(type_info_node: Type | None, wanted_type: type[InspectType]) -> InspectType | None:
    """What is of this kind in it, if there is such: itself, one of several, or what a list has."""
    if isinstance(type_info_node, wanted_type):
        return type_info_node
    match type_info_node:
        case ListType() | VarTupleType():
            return _find_type(type_info_node.item_type, wanted_type)
        case UnionType():
            return next(
                (found for one in type_info_node.types if (found := _find_type(one, wanted_type))),
                None,
            )
        case _:
            return None
