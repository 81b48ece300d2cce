"""From the bytes of a request body to its type, or to a 400 that names the field to change."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from argosy.protocol.errors import ApiError, invalid

T = TypeVar("T")

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_LONGEST_NAME = 100
_LONGEST_PROBLEM = 300
_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(msgspec.json.Decoder)
"""A type's, made once."""
_MARKS = {
    b'"': (1 << 20, "strings"),
    b"[": (1 << 19, "lists"),
    b"{": (1 << 19, "objects"),
    b",": (1 << 21, "values"),
}
"""Most that a body may have of each, and what there are too many of then.

Millions of tiny values take seconds to decode, in which nothing else runs, and many times their bytes. Within a text
each of these is about a token, so none is too long for it that a model could take.
"""
_FEW = min(most for most, _ in _MARKS.values())


def parse(body_type: type[T], body: bytes) -> T:
    """Decode the JSON `body`. Raises ApiError (400) for whatever is wrong with it, 413 for too many values.

    An unknown or missing field is named in `param`, a wrong type with its path (`messages[0].role`).
    """
    if len(body) > _FEW:
        _refuse_many(body)
    decoder: msgspec.json.Decoder[T] = _decoder(body_type)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    except UnicodeDecodeError as error:
        message = f"The body is not valid UTF-8 (byte {error.start} of a string). Send UTF-8."
        raise invalid(message, code="invalid_json") from error
    except RecursionError as error:
        message = "The body is nested too deeply. Flatten it."
        raise invalid(message, code="invalid_json") from error


def _refuse_many(body: bytes) -> None:
    for mark, (most, what) in _MARKS.items():
        if body.count(mark) > most:
            message = f"The body has too many {what}. Send less in one request."
            raise ApiError(413, "request_too_large", message)


def parse_query(query_type: type[T], parameters: Mapping[str, str]) -> T:
    """The parameters of a URL as their type; numbers may be written as text. Raises ApiError (400) likewise."""
    try:
        return msgspec.convert(dict(parameters), type=query_type, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error


def _refusal(problem: str) -> ApiError:
    at = _PATH.search(problem)
    path = at[1] if at else ""
    if unknown := _UNKNOWN.search(problem):
        name = _join(path, unknown[1])
        return invalid(f"Unknown parameter '{name}'. Remove it.", name, "unknown_parameter")
    if missing := _MISSING.search(problem):
        name = _join(path, missing[1])
        return invalid(f"Missing parameter '{name}'. Add it.", name, "missing_required_parameter")
    what = _cut(_PATH.sub("", problem), _LONGEST_PROBLEM)  # it may quote what was sent
    if not path:
        return invalid(f"The body does not fit: {what}.", code="invalid_type")
    return invalid(f"Invalid value for '{path}': {what}.", path, "invalid_type")


def _join(path: str, name: str) -> str:
    name = _cut(name, _LONGEST_NAME)
    return f"{path}.{name}" if path else name


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest] + "..."
