"""Settings files as one document, which decodes them: a file that follows another overrides the settings it names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import yaml

from argosy.settings.conversion import (
    SettingError,
    SettingPath,
    convert_settings,
    convert_valid_settings,
    format_path,
)
from argosy.settings.yaml_nodes import (
    construct_value,
    find_child,
    is_null,
    parse_yaml,
    read_settings_file,
)

T = TypeVar("T")


class SettingsDocument:
    """Content of settings files."""

    def __init__(self, nodes: Sequence[tuple[str, yaml.Node]]) -> None:
        self._names = [name for name, _ in nodes]
        (_, self._root), *overlays = nodes
        for _, overlay in overlays:
            self._root = _merge_nodes(self._root, overlay)

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Self:
        """Read settings files, of which each is an overlay of those before it.

        Raises:
            ValueError: A file cannot be read or is not valid YAML. The message names it.
        """
        return cls([_parse(read_settings_file(path), str(path)) for path in paths])

    @classmethod
    def parse(cls, content: bytes, name: str) -> Self:
        """Parse settings that do not come from a file. Error messages call them `name`.

        Raises:
            ValueError: The content is not valid YAML.
        """
        return cls([_parse(content, name)])

    def decode(
        self,
        settings_type: type[T],
        find_problems: Callable[[T], Iterable[SettingError]] | None = None,
        only: Collection[str] | None = None,
    ) -> T:
        """Decode the settings, or only some by name, so that mistakes in others do not matter.

        `find_problems` yields an error for each contradiction of settings. This method raises the first one, and
        SettingError for invalid settings, with the file, the line, the key, the problem and a remedy.
        """
        try:
            values = construct_value(self._root)
            if only is not None and isinstance(values, dict):
                values = {name: value for name, value in values.items() if name in only}
            settings = convert_settings(values, settings_type)
            for problem in () if find_problems is None else find_problems(settings):
                raise problem
        except SettingError as error:
            raise SettingError(f"{self._locate(error.path)}: {error}", error.path) from error
        except ValueError as error:
            raise SettingError(f"{', '.join(self._names)}: {error}") from error
        return settings

    def check(
        self,
        settings_type: type[T],
        find_problems: Callable[[T], Iterable[SettingError]] | None = None,
    ) -> tuple[T | None, list[SettingError]]:
        """Decode the settings as far as they are valid, and return all errors in the order of the files.

        See `convert_valid_settings`.
        """
        try:
            values = construct_value(self._root)
        except SettingError as error:
            return None, [error]
        result = convert_valid_settings(values, settings_type, find_problems)
        return result[0], sorted(result[1], key=self._find_line)

    def describe(self, error: SettingError) -> str:
        """Return an error as `FILE:LINE: SETTING: PROBLEM`."""
        file, line = self._find_line(error)
        setting = format_path(error.path).removeprefix(".")
        return f"{file}:{line}: {f'{setting}: ' if setting else ''}{error.problem}"

    def _find_line(self, error: SettingError) -> tuple[str, int]:
        *_, node = self._walk(error.path)
        return node.start_mark.name, error.line or node.start_mark.line + 1

    def file_of(self, path: SettingPath) -> str:
        """Return the name of the file that a setting comes from. A missing setting belongs to its parent's file."""
        *_, node = self._walk(path)
        return str(node.start_mark.name)

    def _locate(self, path: SettingPath) -> str:
        """Return the file and the line of a setting; all files for the settings as a whole."""
        if not path:
            return ", ".join(self._names)
        *_, node = self._walk(path)
        return f"{node.start_mark.name}: line {node.start_mark.line + 1}"

    def _walk(self, path: SettingPath) -> Iterator[yaml.Node]:
        """Yield the nodes on a path from the root, as far as they exist."""
        node = self._root
        yield node
        for key in path:
            child = find_child(node, key)
            if child is None:
                return
            node = child
            yield node


def _parse(content: bytes, name: str) -> tuple[str, yaml.Node]:
    try:
        return name, parse_yaml(content, name)
    except SettingError as error:
        message = f"{name}: {error}"
        raise SettingError(message, problem=f"{name}:{error.line or 1}: {error.problem}") from error


def _merge_nodes(base: yaml.Node, overlay: yaml.Node) -> yaml.Node:
    """Return the settings of `base`, overridden by those of `overlay`.

    Mappings merge key by key. The value `null` deletes the key. Lists merge by name if every item of both has a `name`.
    Any other value of the overlay replaces that of the base.
    """
    if isinstance(base, yaml.MappingNode) and isinstance(overlay, yaml.MappingNode):
        return _merge_mappings(base, overlay)
    if isinstance(base, yaml.SequenceNode) and isinstance(overlay, yaml.SequenceNode):
        base_items, overlay_items = _items_by_name(base), _items_by_name(overlay)
        if base_items and overlay_items:
            return _merge_named_items(overlay, base_items, overlay_items)
    return overlay


def _merge_mappings(base: yaml.MappingNode, overlay: yaml.MappingNode) -> yaml.MappingNode:
    entries = {key.value: (key, value) for key, value in base.value}
    for key, value in overlay.value:
        current = entries.get(key.value)
        if current is None:
            entries[key.value] = key, value  # a null too, so that a misspelt name is refused
        elif is_null(value):
            del entries[key.value]
        else:
            entries[key.value] = key, _merge_nodes(current[1], value)
    return yaml.MappingNode(
        overlay.tag, list(entries.values()), overlay.start_mark, overlay.end_mark
    )


def _merge_named_items(
    overlay: yaml.SequenceNode,
    base_items: dict[str, yaml.Node],
    overlay_items: dict[str, yaml.Node],
) -> yaml.SequenceNode:
    items = base_items | {
        name: _merge_nodes(base_items[name], item) if name in base_items else item
        for name, item in overlay_items.items()
    }
    return yaml.SequenceNode(
        overlay.tag, list(items.values()), overlay.start_mark, overlay.end_mark
    )


def _items_by_name(node: yaml.SequenceNode) -> dict[str, yaml.Node]:
    """Return the items of a list by their names, or nothing if an item has none or shares it with another."""
    names = [find_child(item, "name") for item in node.value]
    items = {
        str(name.value): item
        for name, item in zip(names, node.value, strict=True)
        if isinstance(name, yaml.ScalarNode)
    }
    return items if len(items) == len(node.value) else {}
