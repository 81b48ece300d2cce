"""Errors for unknown arguments of the Python library."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_argument_error(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that `function` does not have. It names the most similar known argument."""
    similar = difflib.get_close_matches(name, list(known), 1, 0.6)
    hint = f"; did you mean {similar[0]}?" if similar else "; remove it"
    return TypeError(f"{function} has no argument {name!r}{hint}")
