"""Decoding of request bodies and queries into typed objects, with errors that name the field to change."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from argosy.protocol.errors import ApiError, invalid_request
from argosy.protocol.unknown_fields import remove_unknown_fields

T = TypeVar("T")

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MAX_NAME_CHARS = 100
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

    A body without unknown fields is decoded only once.

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
        problem = str(error)
        if refuse_unknown or not _UNKNOWN_FIELD.search(problem):
            raise _to_api_error(problem) from error
    fields = _decode(object, body)
    ignored = remove_unknown_fields(body_type, fields)
    try:
        return msgspec.convert(fields, type=body_type, str_keys=True), ignored
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error)) from error


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


def _to_api_error(problem: str) -> ApiError:
    path_match = _ERROR_PATH.search(problem)
    path = path_match[1] if path_match else ""
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
    name = _truncate(name, _MAX_NAME_CHARS)
    return f"{path}.{name}" if path else name


def _truncate(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "..."
