"""Errors of constraints. Each names the request field and, for schemas, the JSON pointer."""

from __future__ import annotations

from argosy.protocol import ApiError, invalid_request

MAX_QUOTED_CHARACTERS = 120


def invalid_schema(message: str, param: str, pointer: str | None = None) -> ApiError:
    """Return the error for a schema that is no valid JSON schema, or that no document satisfies."""
    return invalid_request(_locate(message, param, pointer), param, "invalid_schema")


def unsupported_schema(message: str, param: str, pointer: str | None = None) -> ApiError:
    """Return the error for a valid schema that cannot be enforced."""
    return invalid_request(_locate(message, param, pointer), param, "unsupported_schema")


def invalid_grammar(message: str, param: str) -> ApiError:
    """Return the error for a grammar, a regular expression or choices that do not compile."""
    return invalid_request(_locate(message, param, None), param, "invalid_grammar")


def quote(text: str) -> str:
    """Return a bounded, printable excerpt of text from a request."""
    excerpt = text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "..."
    return repr(excerpt)


def _locate(message: str, param: str, pointer: str | None) -> str:
    place = f"'{param}'" if pointer is None else f"'{param}' at {quote(pointer)}"
    return f"{place}: {message}"
