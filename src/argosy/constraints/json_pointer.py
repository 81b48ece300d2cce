"""JSON pointers (RFC 6901) in the form of URI fragments."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def child_pointer(pointer: str, *tokens: str | int) -> str:
    """Return the pointer of a descendant."""
    return "/".join([pointer, *(escape_token(str(token)) for token in tokens)])


def escape_token(token: str) -> str:
    """Escape one reference token."""
    return token.replace("~", "~0").replace("/", "~1")


def resolve_pointer(document: Any, fragment: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value at `fragment`, a percent-encoded pointer that is empty or starts with a slash.

    Raises:
        LookupError: There is no such value.
    """
    value = document
    for token in unquote(fragment).split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if not key.isascii() or not key.isdigit():
                raise LookupError(key)
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value[key]
        else:
            raise LookupError(key)  # noqa: TRY004 - documented
    return value
