"""Pattern of all beginnings of the matches of another pattern, which finds where a match may still be incomplete.

Python's parser of regular expressions reads the pattern; RE2, which runs it, understands a superset of what is accepted
here. The parser is not public, but has kept its node types since Python 2; `tests/unit/policy/test_content.py` covers
each of them.
"""

from __future__ import annotations

import re
from re import _constants as codes  # type: ignore[attr-defined, unused-ignore]
from re import _parser as parser  # type: ignore[attr-defined, unused-ignore]
from typing import Any

MAX_PATTERN_CHARS = 1000
MAX_MATCH_CHARS = 256
MAX_REPEATS = 1000
"""Maximum of RE2, which copies what is repeated."""
_CATEGORIES = {
    codes.CATEGORY_DIGIT: "0-9",
    codes.CATEGORY_SPACE: r"\t\n\f\r\x0b ",
    codes.CATEGORY_WORD: "0-9A-Za-z_",
}

Code = Any
Node = tuple[Code, Any]


class PatternError(ValueError):
    """A pattern that cannot be used, with what to change."""


class BoundedPattern:
    """A pattern whose matches have between one and `MAX_MATCH_CHARS` characters.

    Attributes:
        source: The pattern in RE2's syntax, without groups that capture.
        prefixes: A pattern of all beginnings of its matches, the empty one and the whole included.
        max_chars: Characters of the longest match.
    """

    def __init__(self, pattern: str, max_pattern_chars: int = MAX_PATTERN_CHARS) -> None:
        """Parse a pattern of at most `max_pattern_chars` characters.

        Raises:
            PatternError: The pattern is malformed, unbounded, may match nothing, or has assertions or references.
        """
        if len(pattern) > max_pattern_chars:
            raise PatternError(f"Shorten the pattern to {max_pattern_chars} characters.")
        try:
            # ASCII: `\d` and `\w` have the meaning that they have in RE2.
            tree = parser.parse(pattern, re.ASCII)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"The pattern is malformed: {error}.") from error
        if tree.state.flags & ~(re.ASCII | re.IGNORECASE | re.DOTALL):
            raise PatternError("Remove all flags but (?i) and (?s) from the pattern.")
        min_chars, max_chars = tree.getwidth()
        if not 1 <= min_chars <= max_chars <= MAX_MATCH_CHARS:
            raise PatternError(
                f"A match must have 1 to {MAX_MATCH_CHARS} characters. Replace * and + by bounds such as {{1,40}}."
            )
        flags = "".join(
            letter
            for letter, flag in (("i", re.IGNORECASE), ("s", re.DOTALL))
            if tree.state.flags & flag
        )
        opening = f"(?{flags}:" if flags else "(?:"
        nodes = list(tree)
        self.source = f"{opening}{_format_sequence(nodes)})"
        self.prefixes = f"{opening}{_format_prefixes(nodes)})"
        self.max_chars = int(max_chars)


def _format_sequence(nodes: list[Node]) -> str:
    return "".join(map(_format_node, nodes))


def _format_node(node: Node) -> str:
    code, value = node
    if code is codes.LITERAL:
        return _escape(value)
    if code is codes.NOT_LITERAL:
        return f"[^{_escape(value)}]"
    if code is codes.ANY:
        return "."
    if code is codes.IN:
        return _format_class(value)
    if code is codes.BRANCH:
        return "(?:" + "|".join(_format_sequence(list(each)) for each in value[1]) + ")"
    if code is codes.SUBPATTERN:
        _check_flags(value)
        return f"(?:{_format_sequence(list(value[3]))})"
    if code in {codes.MAX_REPEAT, codes.MIN_REPEAT}:
        least, most, repeated = value
        lazy = "?" if code is codes.MIN_REPEAT else ""
        return f"(?:{_format_sequence(list(repeated))}){_format_counts(least, most)}{lazy}"
    raise PatternError(_describe_unsupported(code))


def _format_prefixes(nodes: list[Node]) -> str:
    """Format the beginnings of a sequence: those of its first node, or all of it and those of the rest."""
    if not nodes:
        return ""
    first, rest = nodes[0], nodes[1:]
    beginnings = _format_node_prefixes(first)
    if not rest:
        return beginnings
    return f"(?:{_format_node(first)}{_format_prefixes(rest)}|{beginnings})"


def _format_node_prefixes(node: Node) -> str:
    code, value = node
    if code is codes.BRANCH:
        return "(?:" + "|".join(_format_prefixes(list(each)) for each in value[1]) + ")"
    if code is codes.SUBPATTERN:
        _check_flags(value)
        return _format_prefixes(list(value[3]))
    if code in {codes.MAX_REPEAT, codes.MIN_REPEAT}:
        _, most, repeated = value
        nodes = list(repeated)
        if len(nodes) == 1 and nodes[0][0] in {
            codes.LITERAL,
            codes.NOT_LITERAL,
            codes.ANY,
            codes.IN,
        }:
            return f"{_format_node(nodes[0])}{_format_counts(0, most)}"
        whole = f"(?:{_format_sequence(nodes)})"
        return f"{whole}{_format_counts(0, max(most - 1, 0))}{_format_prefixes(nodes)}"
    return f"(?:{_format_node(node)})?"


def _format_class(items: list[Node]) -> str:
    negation, parts = "", []
    for code, value in items:
        if code is codes.NEGATE:
            negation = "^"
        elif code is codes.LITERAL:
            parts.append(_escape(value))
        elif code is codes.RANGE:
            parts.append(f"{_escape(value[0])}-{_escape(value[1])}")
        elif code is codes.CATEGORY and value in _CATEGORIES:
            parts.append(_CATEGORIES[value])
        elif len(items) == 1 and (name := _NEGATED_CATEGORIES.get(value)) is not None:
            return f"[^{name}]"
        else:
            raise PatternError("Replace \\D, \\W and \\S inside brackets by a negated class.")
    return f"[{negation}{''.join(parts)}]"


_NEGATED_CATEGORIES = {
    codes.CATEGORY_NOT_DIGIT: _CATEGORIES[codes.CATEGORY_DIGIT],
    codes.CATEGORY_NOT_SPACE: _CATEGORIES[codes.CATEGORY_SPACE],
    codes.CATEGORY_NOT_WORD: _CATEGORIES[codes.CATEGORY_WORD],
}


def _format_counts(least: int, most: int) -> str:
    if most > MAX_REPEATS:  # an empty match repeated without bound, too
        raise PatternError(f"Bound each repetition by at most {MAX_REPEATS}.")
    return f"{{{least},{most}}}"


def _check_flags(value: tuple[Any, ...]) -> None:
    _, added, removed, _ = value
    if added or removed:
        raise PatternError("Set flags at the beginning of the pattern only.")


def _escape(code_point: int) -> str:
    character = chr(code_point)
    return character if character.isalnum() or code_point > 127 else f"\\x{{{code_point:x}}}"


def _describe_unsupported(code: Code) -> str:
    if code is codes.AT:
        return "Remove ^, $ and \\b from the pattern. Matches of words are whole words already."
    return "Remove assertions and references to groups from the pattern."
