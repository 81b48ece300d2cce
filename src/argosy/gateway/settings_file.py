"""A settings file in YAML, read into its type: a key that is unknown or there twice is refused by name."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TypeVar

import msgspec
import yaml
from msgspec.inspect import ListType, StructType, Type, UnionType, VarTupleType, type_info

T = TypeVar("T")

_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `\$(?P<path>[^`]*)`)?$")


_BOOL = "tag:yaml.org,2002:bool"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes words as YAML 1.2 does: `off` is one, and so is a date, as in the name of a version."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if tag not in {_BOOL, _TIMESTAMP}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def decode(text: bytes, kind: type[T]) -> T:
    """The settings. Raises ValueError, naming the key and what is wrong with it."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _refuse_twice(node, set())
        told = None if node is None else loader.construct_document(node)
        return msgspec.convert({} if told is None else told, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}{_meant(str(error), kind)}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _refuse_twice(node: yaml.Node | None, seen: set[int]) -> None:
    """Raise ValueError for a key that a mapping has twice: YAML forbids it, and its readers take the last."""
    if id(node) in seen:
        return  # an alias of what was looked at
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_twice(item, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(
                    f"{name!r} is there twice, in line {lines[name]} and in line {line}; keep one"
                )
            lines[name] = line
            _refuse_twice(value, seen)


def _meant(problem: str, kind: type) -> str:
    """The known key that an unknown one may have been meant for, to be put behind the problem."""
    unknown = _UNKNOWN.search(problem)
    if unknown is None:
        return ""
    told = _struct(type_info(kind))
    for name in re.findall(r"\.(\w+)", unknown["path"] or ""):
        fields = {} if told is None else {field.encode_name: field.type for field in told.fields}
        told = _struct(fields.get(name))
    known = [] if told is None else [field.encode_name for field in told.fields]
    close = get_close_matches(unknown["name"], known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _struct(told: Type | None) -> StructType | None:
    """The structure in it, if there is one: itself, one of several, or what a list has."""
    match told:
        case StructType():
            return told
        case ListType() | VarTupleType():
            return _struct(told.item_type)
        case UnionType():
            return next((found for one in told.types if (found := _struct(one))), None)
        case _:
            return None
