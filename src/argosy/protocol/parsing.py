"""From the bytes of a request body to its type, or to a 400 that names the field to change."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from argosy.protocol.errors import ApiError, invalid_request

T = TypeVar("T")

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MAX_NAME_CHARS = 100
_MAX_PROBLEM_CHARS = 300
_get_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(msgspec.json.Decoder)
"""A type's, made once."""
_MAX_MARKS = {
    b'"': (1 << 20, "strings"),
    b"[": (1 << 19, "lists"),
    b"{": (1 << 19, "objects"),
    b",": (1 << 21, "values"),
}
"""Most that a body may have of each, and what there are too many of then.

Millions of tiny values take seconds to decode, in which nothing else runs, and many times their bytes. Within a text
each of these is about a token, so none is too long for it that a model could take.
"""
_MIN_CHECKED_BYTES = min(most for most, _ in _MAX_MARKS.values())


def parse_body(body_type: type[T], body: bytes) -> T:
    """Decode the JSON `body`. Raises ApiError (400) for whatever is wrong with it, 413 for too many values.

    An unknown or missing field is named in `param`, a wrong type with its path (`messages[0].role`).
    """
    if len(body) > _MIN_CHECKED_BYTES:
        _check_value_counts(body)
    decoder: msgspec.json.Decoder[T] = _get_decoder(body_type)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error)) from error
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
    for mark, (most, what) in _MAX_MARKS.items():
        if body.count(mark) > most:
            message = f"The body has too many {what}. Send less in one request."
            raise ApiError(413, "request_too_large", message)


def parse_query(query_type: type[T], parameters: Mapping[str, str]) -> T:
    """The parameters of a URL as their type; numbers may be written as text. Raises ApiError (400) likewise."""
    try:
        return msgspec.convert(dict(parameters), type=query_type, strict=False)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error)) from error


def _to_api_error(problem: str) -> ApiError:
    at = _ERROR_PATH.search(problem)
    path = at[1] if at else ""
    if unknown := _UNKNOWN_FIELD.search(problem):
        name = _join_path(path, unknown[1])
        return invalid_request(f"Unknown parameter '{name}'. Remove it.", name, "unknown_parameter")
    if missing := _MISSING_FIELD.search(problem):
        name = _join_path(path, missing[1])
        return invalid_request(
            f"Missing parameter '{name}'. Add it.", name, "missing_required_parameter"
        )
    what = _truncate(_ERROR_PATH.sub("", problem), _MAX_PROBLEM_CHARS)  # it may quote what was sent
    if not path:
        return invalid_request(f"The body does not fit: {what}.", code="invalid_type")
    return invalid_request(f"Invalid value for '{path}': {what}.", path, "invalid_type")


def _join_path(path: str, name: str) -> str:
    name = _truncate(name, _MAX_NAME_CHARS)
    return f"{path}.{name}" if path else name


def _truncate(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "..."
