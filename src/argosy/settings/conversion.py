"""Conversion of a settings value into a struct. Errors name the setting, its value unless secret, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
_UNKNOWN_FIELD = re.compile(r"unknown field `(.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile("missing required field `")
_MAX_ERRORS = 100
"""Maximum number of errors of one file, because the whole file is converted again after each."""


class SettingError(ValueError):
    """Raised if a setting is invalid. The message contains the remedy."""

    def __init__(
        self, message: str, path: SettingPath = (), *, problem: str = "", line: int = 0
    ) -> None:
        """Create an error.

        Args:
            message: Problem and remedy, with the path of the setting.
            path: The setting.
            problem: The message without the path.
            line: Line of the file, if the file cannot be parsed and thus has no settings.
        """
        super().__init__(message)
        self.path = path
        self.problem = problem or message
        self.line = line

    @classmethod
    def at(cls, path: SettingPath, problem: str) -> SettingError:
        """Return an error whose message begins with the path of the setting."""
        return cls(f"{format_path(path).removeprefix('.')}: {problem}", path, problem=problem)


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
        problem = _to_plain_words(
            problem,
            _find_examples(_find_node(below, settings_type), is_key=is_key),
            is_shown=bool(fix),
        )
        where = format_path((*path, *below))
        place = f" - at {'`key` in ' if is_key else ''}`${where}`" if where else ""
        unknown = _find_unknown_field(problem)
        raise SettingError(
            f"{problem}{place}{fix}",
            (*path, *below) if unknown is None else (*path, *below, unknown),
            problem=f"{problem}{' as key' if is_key else ''}{fix}",
        ) from error


def convert_valid_settings(
    value: Any,  # noqa: ANN401 - what a YAML file can hold
    settings_type: type[T],
    find_problems: Callable[[T], Iterable[SettingError]] | None = None,
    path: SettingPath = (),
) -> tuple[T | None, list[SettingError]]:
    """Convert a value as far as it is valid, and return all errors.

    Each invalid setting is removed, or renamed if its name is misspelt. Then the rest is converted again.
    Contradictions are left out where they may be due to a removed setting.

    Args:
        value: Dictionaries, lists and scalars. It is changed.
        settings_type: Type to convert to.
        find_problems: Yields what contradicts itself in settings whose types are valid.
        path: Where the value is.

    Returns:
        The settings, and the errors. The settings are None if something is missing to which others may refer, so that
        contradictions were not looked for.
    """
    repair = _Repair(value, settings_type, path)
    while len(repair.errors) < _MAX_ERRORS:
        try:
            settings = convert_settings(value, settings_type, path)
        except SettingError as error:
            if not repair.apply(error):
                return None, repair.errors
        else:
            if repair.has_removed_items:
                return None, repair.errors
            for contradiction in () if find_problems is None else find_problems(settings):
                repair.add_contradiction(contradiction)
            return settings, repair.errors
    return None, repair.errors


class _Repair:
    """Removal of invalid settings from a value. Errors have the paths that settings had before."""

    def __init__(self, value: Any, settings_type: type, path: SettingPath) -> None:  # noqa: ANN401
        self.errors: list[SettingError] = []
        self.has_removed_items = False
        """Whether an item of a list was removed, to which others may refer."""
        self._value = value
        self._type = settings_type
        self._path = path
        self._removed: dict[SettingPath, str | int] = {}
        """Removed settings, and their names without misspelling."""
        self._positions: dict[int, list[int]] = {}
        """First positions of the items of each list that has lost some, by id of the list."""
        self._misspelt: dict[tuple[int, str | int], str | int] = {}
        """First names of the renamed settings, by id of their structure and new name."""

    def apply(self, error: SettingError) -> bool:
        """Record an error unless another one caused it, and remove its cause. Returns whether a rest remains."""
        path = error.path[len(self._path) :]
        first_path = self._first_path(path)
        missing = self._find_missing(error.problem, path)
        if missing:
            for name in missing:
                if self._first_path((*path, name)) not in self._removed:
                    problem = f"Object missing required field `{name}`"
                    self.errors.append(SettingError(problem, (*self._path, *first_path)))
        elif not any(removed[: len(first_path)] == first_path for removed in self._removed):
            error.path = (*self._path, *first_path)
            self.errors.append(error)
        if not path:
            return False
        parent = _find_value(self._value, path[:-1])
        is_unknown = "unknown field `" in error.problem and path[-1] in parent
        close = _find_intended_field(path[-1], path[:-1], self._type) if is_unknown else None
        if close is not None and close not in parent:
            parent[close] = parent.pop(path[-1])
            self._misspelt[id(parent), close] = path[-1]
            return True
        if isinstance(parent, list):
            self._positions.setdefault(id(parent), list(range(len(parent)))).pop(int(path[-1]))
            self.has_removed_items = True
        if not is_unknown:
            self._removed[first_path] = path[-1]
        del parent[path[-1]]
        return True

    def add_contradiction(self, error: SettingError) -> None:
        """Record a contradiction, unless it may be due to removed settings: it names one of them."""
        first_path = self._first_path(error.path[len(self._path) :])
        named = set(re.findall(r"\w+", error.problem))
        if not any(
            _list_item(removed) == _list_item(first_path) and name in named
            for removed, name in self._removed.items()
        ):
            error.path = (*self._path, *first_path)
            self.errors.append(error)

    def _first_path(self, path: SettingPath) -> SettingPath:
        first, value = list(path), self._value
        for index, key in enumerate(path):
            if isinstance(key, int):
                first[index] = self._positions.get(id(value), range(key + 1))[key]
            first[index] = self._misspelt.get((id(value), key), first[index])
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                break  # a setting that is missing, or has its default
        return tuple(first)

    def _find_missing(self, problem: str, path: SettingPath) -> list[str]:
        """Return the required fields that a structure lacks, if the problem is that it lacks one."""
        if not _MISSING_FIELD.search(problem):
            return []
        struct = _find_type(_find_node(path, self._type), StructType)
        present = _find_value(self._value, path)
        fields = () if struct is None else struct.fields
        return [
            each.encode_name for each in fields if each.required and each.encode_name not in present
        ]


def _list_item(path: SettingPath) -> SettingPath:
    """Return the path of the outermost list item that a setting is in; empty if it is in none."""
    return next((path[: at + 1] for at, key in enumerate(path) if isinstance(key, int)), ())


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


_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}
_EXPECTED = re.compile(r"^Expected `(?P<types>[^`]+)`(?P<got>, got `(?P<found>[^`]+)`)?")
_PATTERN = re.compile(r"^Expected `str` matching regex .*$", re.DOTALL)


def _to_plain_words(problem: str, examples: Sequence[str], *, is_shown: bool) -> str:
    """Return the problem in words of settings files, with examples instead of a pattern.

    Args:
        problem: The message of msgspec without its path.
        examples: Valid values of the setting.
        is_shown: Whether the invalid value follows, so that its type needs no mention.
    """
    if examples and _PATTERN.match(problem):
        return f"Expected text such as {' or '.join(examples)}"
    match = _EXPECTED.match(problem)
    if match is None or "regex" in problem:
        return problem
    types = " or ".join(_TYPE_WORDS.get(each, each) for each in match["types"].split(" | "))
    found = match["found"]
    got = "" if found is None or is_shown else f", got {_TYPE_WORDS.get(found, found)}"
    return f"Expected {types}{got}{problem[match.end() :]}"


def _find_examples(node: Type | None, *, is_key: bool = False) -> Sequence[str]:
    """Return valid texts for a type, or for the keys of a mapping."""
    match node:
        case DictType() if is_key:
            return _find_examples(node.key_type)
        case Metadata():
            examples: list[str] = (node.extra_json_schema or {}).get("examples", [])
            return examples or _find_examples(node.type, is_key=is_key)
        case UnionType():
            found = (_find_examples(member, is_key=is_key) for member in node.types)
            return next(filter(None, found), [])
        case ListType() | VarTupleType() | CollectionType():
            return _find_examples(node.item_type, is_key=is_key)
        case _:
            return []


def _suggest_fix(problem: str, path: Sequence[str | int], settings_type: type) -> str:
    """Return a remedy to append to a problem at a path: the intended key or the valid values. Empty if unknown."""
    unknown = _find_unknown_field(problem)
    if unknown is not None:
        close = _find_intended_field(unknown, path, settings_type)
        return "" if close is None else f"; did you mean `{close}`?"
    if not problem.startswith("Invalid enum value"):
        return ""
    literal = _find_type(_find_node(path, settings_type), LiteralType)
    values = [] if literal is None else [str(value) for value in literal.values]
    return f"; write {', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else ""


def _find_intended_field(
    unknown: str | int, path: Sequence[str | int], settings_type: type
) -> str | None:
    """Return the field of the structure at a path that an unknown one seems to be meant for."""
    fields = _struct_fields(_find_node(path, settings_type))
    return next(iter(get_close_matches(str(unknown), fields, n=1)), None)


def _find_unknown_field(problem: str) -> str | None:
    """Return the name of the field if the problem is that no such field exists."""
    match = _UNKNOWN_FIELD.search(problem)
    return None if match is None else match[1]


def _find_node(path: Sequence[str | int], settings_type: type) -> Type | None:
    """Return the type of the setting at a path."""
    node: Type | None = type_info(settings_type)
    for name in path:
        node = _find_child(node, name) if isinstance(name, str) else node
    return node


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
