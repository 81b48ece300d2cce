"""Parser of YAML into nodes, which know their file and line. It refuses files that would exhaust memory."""

from __future__ import annotations

import io
import os
import re
import select
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.cyaml import CParser
from yaml.resolver import Resolver

from argosy.settings.conversion import SettingError

MAX_SETTINGS_BYTES = 4 * 1024 * 1024
"""Maximum size of a settings file. Ten thousand replicas need one."""
MAX_NODES = 200_000
"""Maximum number of values of a file, where a value counts once for each alias of it."""
PIPE_TIMEOUT_S = 30.0
"""Time in which a program writes to a pipe that is a settings file."""

_TAG = "tag:yaml.org,2002:"
_BOOL, _FLOAT, _INT, _MERGE, _NULL, _TEXT = (
    f"{_TAG}{name}" for name in ("bool", "float", "int", "merge", "null", "str")
)
_CORE_TAGS = frozenset({_BOOL, _FLOAT, _INT, _NULL, _TEXT, f"{_TAG}map", f"{_TAG}seq"})
_PLAIN_SCALARS = (
    (_BOOL, "true|True|TRUE|false|False|FALSE", "tTfF"),
    (_INT, r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)
"""Tag, pattern and first characters of the scalars that YAML 1.2 resolves otherwise than YAML 1.1."""


class _Loader(Composer, CParser, SafeConstructor, Resolver):  # type: ignore[misc]
    """YAML loader that resolves plain scalars as YAML 1.2: `off` and dates (such as `2024-01-01`) are strings.

    It parses in C. It composes nodes in Python, where deep nesting ends in an error and not in a stack overflow.
    """

    def __init__(self, content: bytes, name: str = "") -> None:
        stream = io.BytesIO(content)
        stream.name = name  # for the marks
        CParser.__init__(self, stream)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._node_count = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        self._node_count += 1
        if self._node_count > MAX_NODES:
            raise _too_many_values()
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - as the base
        try:
            return super().construct_object(node, deep)
        except (KeyError, ValueError) as error:
            kind = node.tag.removeprefix(_TAG)
            problem = f"{str(node.value)[:100]!r} is not a valid {kind}"
            raise ConstructorError(None, None, problem, node.start_mark) from error


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """YAML writer that quotes text which YAML 1.1 or 1.2 would resolve to something else."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """Write a text of several lines as such, where its characters permit."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in {_MERGE, _NULL}]
    for first, resolvers in Resolver.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in _PLAIN_SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in SafeConstructor.yaml_constructors.items()
    if tag is None or tag in _CORE_TAGS
}
_Loader.add_constructor(
    _INT, lambda _, node: int(node.value, 0 if node.value[1:2] in {"o", "x"} else 10)
)


def dump_yaml(document: object) -> str:
    """Return a value of dictionaries, lists and scalars as YAML text, from which `parse_yaml` makes an equal value."""
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def read_settings_file(path: Path) -> bytes:
    """Return the content of a settings file. Raises ValueError if the file cannot be read, or is too large."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            poll = select.poll()
            poll.register(file, select.POLLIN)
            if not poll.poll(PIPE_TIMEOUT_S * 1000):
                raise ValueError(
                    f"{path} cannot be read: no program has written to this pipe for {PIPE_TIMEOUT_S:g} s"
                )
            os.set_blocking(file.fileno(), True)
            return file.read(MAX_SETTINGS_BYTES + 1)  # `parse_yaml` refuses more
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file. A named pipe to which no program writes would block for ever otherwise."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_yaml(content: bytes, name: str) -> yaml.Node:
    """Parse a YAML file. An empty file is an empty mapping. Merge keys (`<<`) are resolved.

    Marks of nodes and error messages contain the name of the file. Raises SettingError for a text that is not valid
    YAML, has a key twice, or is too large.
    """
    if len(content) > MAX_SETTINGS_BYTES:
        raise SettingError(
            f"the file is larger than {MAX_SETTINGS_BYTES >> 20} MiB. Is it a settings file? Split it if it is."
        )
    try:
        loader = _Loader(content, name)
        node = loader.get_single_node()
        if node is None or is_null(node):
            mark = yaml.Mark(name, 0, 0, 0, None, None)
            return yaml.MappingNode("tag:yaml.org,2002:map", [], mark, mark)
        _check_node(node, loader, {})
    except yaml.YAMLError as error:
        raise _convert_error(error) from error
    except RecursionError as error:
        raise SettingError("the settings are nested too deeply. Remove levels.") from error
    return node


def construct_value(node: yaml.Node) -> Any:  # noqa: ANN401 - what a YAML file can hold
    """Return the value of a node as dictionaries, lists and scalars.

    Raises:
        SettingError: A scalar is invalid, or has a tag that settings do not use.
    """
    try:
        return _Loader(b"").construct_document(node)
    except yaml.YAMLError as error:
        raise _convert_error(error) from error


def load_yaml(content: bytes) -> Any:  # noqa: ANN401 - what a YAML text can hold
    """Return the value of a YAML text that anybody may have written. Raises ValueError as `parse_yaml` does."""
    return construct_value(parse_yaml(content, ""))


def is_null(node: yaml.Node) -> bool:
    """Return whether a node is `null`."""
    return bool(node.tag == _NULL)


def find_child(node: yaml.Node, key: str | int) -> yaml.Node | None:
    """Return the value of a mapping's key or a sequence's item; None if there is none."""
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int):
        return node.value[key] if key < len(node.value) else None
    if isinstance(node, yaml.MappingNode):
        found = [value for name, value in node.value if name.value == key]
        return found[-1] if found else None
    return None


def _check_node(node: yaml.Node, loader: _Loader, sizes: dict[int, int]) -> int:
    """Reject duplicate keys, which PyYAML resolves to the last value, and resolve merge keys.

    `sizes` has the size by id of each node that was checked before, and 0 of those that contain this node. Returns the
    number of values in the node, where a value counts once for each alias of it.
    """
    known = sizes.get(id(node))
    if known == 0:
        line = node.start_mark.line + 1
        problem = f"the alias in line {line} contains itself. Write the value out."
        raise SettingError(problem, line=line)
    if known is not None:
        return known
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_check_node(item, loader, sizes) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if key.tag not in {_TEXT, _MERGE}:
                shown = f"{name[:100]!r} " if isinstance(key, yaml.ScalarNode) else ""
                problem = f"the key {shown}in line {line} is not text. Quote it."
                raise SettingError(problem, line=line)
            if name in lines:
                problem = f"{name!r} is defined twice, in line {lines[name]} and in line {line}. Keep one."
                raise SettingError(problem, line=line)
            lines[name] = line
            size += 1 + _check_node(value, loader, sizes)
    if size > MAX_NODES:
        raise _too_many_values()
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(
            node
        )  # after the check of the size, because merges of merges multiply
    sizes[id(node)] = size
    return size


def _convert_error(error: yaml.YAMLError) -> SettingError:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    message = str(error)
    problem = problem or message.partition("\n")[0]
    if "\\t" in problem or "a tab " in problem:
        message, problem = (f"{text}. Indent with spaces" for text in (message, problem))
    return SettingError(message, problem=problem, line=0 if mark is None else mark.line + 1)


def _too_many_values() -> SettingError:
    return SettingError(
        f"the settings have more than {MAX_NODES:,} values, aliases included. Remove some."
    )
