"""Merging of settings files: a file that follows another overrides the settings that it names."""

from __future__ import annotations

import yaml

from argosy.settings.yaml_nodes import find_child, is_null


def merge_nodes(base: yaml.Node, overlay: yaml.Node) -> yaml.Node:
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
            entries[key.value] = key, merge_nodes(current[1], value)
    return yaml.MappingNode(
        overlay.tag, list(entries.values()), overlay.start_mark, overlay.end_mark
    )


def _merge_named_items(
    overlay: yaml.SequenceNode,
    base_items: dict[str, yaml.Node],
    overlay_items: dict[str, yaml.Node],
) -> yaml.SequenceNode:
    items = base_items | {
        name: merge_nodes(base_items[name], item) if name in base_items else item
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
