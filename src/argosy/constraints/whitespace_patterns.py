"""Checks patterns for whitespace in JSON, which must match nothing but whitespace."""

from __future__ import annotations

import re
from typing import Any

from argosy.constraints.pattern_translator import PatternError, translate_pattern
from argosy.constraints.schema_errors import invalid_grammar

PARTS = re.compile(
    r"[ \t\n\r]|\\[tnrs ]|\\x(?:20|09|0[aAdD])|\\u00(?:20|09|0[aAdD])|\((?:\?:)?|[\[\])|?*+]|\{\d{1,4}(?:,\d{0,4})?\}"
)
JSON_SPACE = r" \t\n\r"
MAX_PATTERN_CHARACTERS = 200


def translate_whitespace_pattern(pattern: Any, param: str) -> str:  # noqa: ANN401 - JSON value
    r"""Return a pattern of a request in the library's syntax. `\s` stands for the whitespace of JSON.

    Raises:
        ApiError: 400.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARACTERS:
        raise invalid_grammar(
            f"The pattern must be a string of at most {MAX_PATTERN_CHARACTERS} characters.", param
        )
    if re.fullmatch(f"(?:{PARTS.pattern})*", pattern) is None:
        raise invalid_grammar(
            r"The pattern may contain spaces, \t, \n, \r and \s, with classes, groups, alternatives and repetition."
            r" For example: [ \n]{1,4}",
            param,
        )
    try:
        return translate_pattern(_expand_spaces(pattern), "python")
    except PatternError as error:
        raise invalid_grammar(f"In the pattern, {error}.", param) from None


def _expand_spaces(pattern: str) -> str:
    r"""Replace `\s`, within classes and outside of them."""
    parts: list[str] = []
    is_in_class = False
    for match in PARTS.finditer(pattern):
        part = match[0]
        if part in {"[", "]"}:
            is_in_class = part == "["
        if part == r"\s":
            part = JSON_SPACE if is_in_class else f"[{JSON_SPACE}]"
        parts.append(part)
    return "".join(parts)
