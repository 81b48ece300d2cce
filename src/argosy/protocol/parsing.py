"""Decoding of request bodies and queries into typed objects, with errors that name the field to change.

A field that a server does not know is ignored and named in a response header, unless its name says that it constrains
the output.
"""

from __future__ import annotations

import functools
import re
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

import msgspec

from argosy.protocol.errors import ApiError, invalid_request

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
T = TypeVar("T")
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MAX_PROBLEM_CHARS = 300
_decoder_lock = threading.Lock()
_MAX_DELIMITERS = {
    b'"': (1 << 20, "strings"),
    b"[": (1 << 19, "lists"),
    b"{": (1 << 19, "objects"),
    b",": (1 << 21, "values"),
}
"""Largest number of each JSON delimiter in a body, with the noun for the error message.

Decoding millions of tiny values takes seconds, during which the event loop stands still, and many times their bytes.
Inside a string each of these characters is about one token, so a prompt that exceeds a limit is too long for any model.
"""
_MIN_CHECKED_BYTES = min(max_count for max_count, _ in _MAX_DELIMITERS.values())


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
        entry = quote(name[:MAX_NAME_CHARS], safe="[]$:", errors="replace")
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


def parse_body(body_type: type[T], body: bytes) -> T:
    """Decode a JSON body into `body_type`.

    Raises:
        ApiError(400): The body is invalid. The error's `param` is the unknown or missing field, or the path of the
            value with a wrong type (`messages[0].role`).
        ApiError(413): The body has too many values.
    """
    try:
        return _decode(body_type, body)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error)) from error


def parse_request_body(
    body_type: type[T], body: bytes, *, refuse_unknown: bool = False
) -> tuple[T, tuple[str, ...]]:
    """Decode a JSON body into `body_type`, which forbids unknown fields, and ignore these fields.

    Numbers and booleans may be written as text, as in vLLM. A body without them and without unknown fields is decoded
    only once.

    Args:
        body_type: Type to decode.
        body: The JSON body.
        refuse_unknown: Raise an error for the first unknown field instead of ignoring it.

    Returns:
        The decoded body, and the paths of the ignored fields (see `remove_unknown_fields`).

    Raises:
        ApiError(400): The body is invalid (see `parse_body`), or an unknown field constrains the output.
        ApiError(413): The body has too many values.
    """
    try:
        return _decode(body_type, body), ()
    except msgspec.ValidationError as error:
        if refuse_unknown and _UNKNOWN_FIELD.search(str(error)):
            raise _to_api_error(str(error)) from error
    try:
        fields = _decode(object, body)
        ignored = remove_unknown_fields(body_type, fields) if not refuse_unknown else ()
        converted = msgspec.convert(fields, type=body_type, str_keys=True, strict=False)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error)) from error
    return converted, ignored


def _build_decoder(body_type: Any) -> msgspec.json.Decoder[Any]:  # noqa: ANN401 - any type that msgspec supports
    """Build the decoder of a type, one at a time.

    While msgspec builds the fields of a struct, another thread that uses the type crashes the process (msgspec 0.22).
    """
    with _decoder_lock:
        return msgspec.json.Decoder(body_type)


_get_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_build_decoder)
"""Return the cached decoder of a type."""


def _decode(body_type: type[T], body: bytes) -> T:
    """Decode a JSON body.

    Raises:
        msgspec.ValidationError: A value does not fit `body_type`.
        ApiError: 400 if the body is not valid JSON, 413 if it has too many values.
    """
    if len(body) > _MIN_CHECKED_BYTES:
        _check_value_counts(body)
    decoder: msgspec.json.Decoder[T] = _get_decoder(body_type)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise invalid_request(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from error
    except UnicodeDecodeError as error:
        message = f"The body is not valid UTF-8 (byte {error.start} of a string). Send UTF-8."
        raise invalid_request(message, code="invalid_json") from error
    except RecursionError as error:
        message = "The body is nested too deeply. Flatten it."
        raise invalid_request(message, code="invalid_json") from error


def _check_value_counts(body: bytes) -> None:
    for delimiter, (max_count, noun) in _MAX_DELIMITERS.items():
        if body.count(delimiter) > max_count:
            message = f"The body has too many {noun}. Send less in one request."
            raise ApiError(413, "request_too_large", message)


def parse_query(query_type: type[T], parameters: Mapping[str, str]) -> T:
    """Convert the query parameters of a URL into `query_type`; numbers may be written as text.

    Raises:
        ApiError(400): A parameter is invalid; see `parse_body`.
    """
    _get_decoder(query_type)  # builds the type in one thread
    try:
        return msgspec.convert(dict(parameters), type=query_type, strict=False)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error)) from error


def convert_field(field_type: type[T], value: object, path: str) -> T:
    """Convert the decoded value of the field at `path`, whose type the other fields of its object decide.

    Raises:
        ApiError(400): The value does not fit.
    """
    _get_decoder(field_type)  # builds the type in one thread
    try:
        return msgspec.convert(value, type=field_type, str_keys=True)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error), path) from error


def _to_api_error(problem: str, parent: str = "") -> ApiError:
    path_match = _ERROR_PATH.search(problem)
    path = path_match[1] if path_match else ""
    if parent:
        path = parent + ("." if path and not path.startswith("[") else "") + path
    if unknown := _UNKNOWN_FIELD.search(problem):
        name = _join_path(path, unknown[1])
        return invalid_request(f"Unknown parameter '{name}'. Remove it.", name, "unknown_parameter")
    if missing := _MISSING_FIELD.search(problem):
        name = _join_path(path, missing[1])
        return invalid_request(
            f"Missing parameter '{name}'. Add it.", name, "missing_required_parameter"
        )
    # Truncate the problem, because it may quote the client's input.
    detail = _truncate(_ERROR_PATH.sub("", problem), _MAX_PROBLEM_CHARS)
    if not path:
        return invalid_request(f"The body does not fit: {detail}.", code="invalid_type")
    return invalid_request(f"Invalid value for '{path}': {detail}.", path, "invalid_type")


def _join_path(path: str, name: str) -> str:
    name = _truncate(name, MAX_NAME_CHARS)
    return f"{path}.{name}" if path else name


def _truncate(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "..."
