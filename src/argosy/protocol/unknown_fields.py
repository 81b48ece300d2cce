"""Removal of unknown fields from a decoded request body, and the response header that names them.

A field that a server does not know is ignored, unless its name says that it constrains the output.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

import msgspec

from argosy.protocol.errors import invalid_request

IGNORED_FIELDS_HEADER = b"x-argosy-ignored-fields"
"""Response header with the comma-separated names of the request fields that had no effect."""
RELAXED_SCHEMA_HEADER = b"x-argosy-schema-relaxed"
"""Response header with the comma-separated schema keywords that are not enforced."""
MAX_HEADER_BYTES = 1024
MAX_NAME_CHARS = 100

CONSTRAINT_FIELDS = frozenset(
    {
        # Constraints of other APIs and servers
        "format",
        "gbnf",
        "grammar_lazy",
        "grammar_triggers",
        "json_object",
        "lark",
        "output_config",
        "output_format",
        "output_schema",
        "response_json_schema",
        "response_mime_type",
        "response_schema",
        "stop_regex",
        # Tokens and texts that the output must not or must contain
        "banned_strings",
        "banned_tokens",
        "custom_logit_processor",
        "logits_processors",
        "suppress_tokens",
    }
)
"""Names of undeclared fields that constrain the output, so that ignoring them would break the client's expectation."""
_CONSTRAINT_PREFIX = "guided_"
_LIST_TYPES = frozenset({list, tuple, Sequence})
_MAPPING_TYPES = frozenset({dict, Mapping})


class _Shape(NamedTuple):
    """Where a value of some type has structs: in itself, in the items of a list, or in the values of a mapping."""

    fields: Mapping[str, _Shape | None] | None = None
    """Shapes of the fields by their name in JSON, if the value may be a struct. None for fields without structs."""
    forbids_unknown: bool = True
    """Whether the struct forbids unknown fields. The decoder ignores them otherwise."""
    item: _Shape | None = None
    """Shape of the items, if the value may be a list that contains structs."""
    value: _Shape | None = None
    """Shape of the values, if the value may be a mapping that contains structs."""


def remove_unknown_fields(body_type: type, value: object) -> tuple[str, ...]:
    """Remove the fields that `body_type` does not declare from a decoded JSON value, in place.

    Returns:
        The paths of the removed fields in order, each once and without list indices (`messages[].name`).

    Raises:
        ApiError(400): An unknown field constrains the output.
    """
    removed: dict[str, None] = {}
    shape = _shape(body_type)
    if shape is not None:
        if isinstance(value, dict) and shape.forbids_unknown:
            _check_constraints(value, shape.fields or {})
        _remove(shape, value, "", removed)
    return tuple(removed)


def format_names(names: Iterable[str]) -> bytes:
    """Format the value of a header with names of fields or keywords. A long list ends with `...`."""
    entries: list[str] = []
    size = 0
    for name in names:
        entry = quote(name[:MAX_NAME_CHARS], safe="[]$", errors="replace")
        size += len(entry) + 1
        if size > MAX_HEADER_BYTES:
            entries.append("...")
            break
        entries.append(entry)
    return ",".join(entries).encode()


def _check_constraints(body: Mapping[str, Any], declared: Mapping[str, object]) -> None:
    for name, value in body.items():
        if value is None or name in declared:
            continue
        if name in CONSTRAINT_FIELDS or name.startswith(_CONSTRAINT_PREFIX):
            message = (
                f"'{name[:MAX_NAME_CHARS]}' constrains the output and is not supported. "
                "Use 'response_format' or 'structured_outputs', or remove it."
            )
            raise invalid_request(message, name[:MAX_NAME_CHARS], "unsupported_parameter")


def _remove(shape: _Shape, value: object, path: str, removed: dict[str, None]) -> None:
    if isinstance(value, list):
        if shape.item is not None:
            for item in value:
                _remove(shape.item, item, path + "[]", removed)
        return
    if not isinstance(value, dict):
        return
    prefix = path + "." if path else ""
    if shape.fields is None:
        if shape.value is not None:
            for name, item in value.items():
                _remove(shape.value, item, prefix + name, removed)
        return
    if shape.forbids_unknown:
        for name in [name for name in value if name not in shape.fields]:
            del value[name]
            removed[prefix + name] = None
    for name, field_shape in shape.fields.items():
        if field_shape is not None and name in value:
            _remove(field_shape, value[name], prefix + name, removed)


@functools.cache
def _shape(type_: Any) -> _Shape | None:  # noqa: ANN401 - any annotation
    """Return where values of a type have structs that forbid unknown fields; None if they have none."""
    return _build_shape(type_, frozenset())


def _build_shape(type_: Any, parents: frozenset[type]) -> _Shape | None:  # noqa: ANN401 - any annotation
    """Return the shape of a type within `parents`. A struct within itself has none."""
    if type_ in parents:
        return None
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        forbids_unknown = type_.__struct_config__.forbid_unknown_fields
        hints = get_type_hints(type_)
        names = zip(type_.__struct_fields__, type_.__struct_encode_fields__, strict=True)
        within = parents | {type_}
        fields = {encoded: _build_shape(hints[name], within) for name, encoded in names}
        has_structs = any(shape is not None for shape in fields.values())
        return _Shape(fields, forbids_unknown) if forbids_unknown or has_structs else None
    origin, arguments = get_origin(type_), get_args(type_)
    if origin in _LIST_TYPES and arguments:
        item = _build_shape(arguments[0], parents)
        return None if item is None else _Shape(item=item)
    if origin in _MAPPING_TYPES:
        value = _build_shape(arguments[1], parents)
        return None if value is None else _Shape(value=value)
    if origin not in {Union, types.UnionType}:
        return None
    built = [_build_shape(argument, parents) for argument in arguments]
    shapes = [shape for shape in built if shape is not None]
    if not shapes:
        return None
    struct = next((shape for shape in shapes if shape.fields is not None), _Shape())
    return struct._replace(
        item=next((shape.item for shape in shapes if shape.item is not None), None),
        value=next((shape.value for shape in shapes if shape.value is not None), None),
    )
