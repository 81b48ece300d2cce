"""Translates regular expressions of JSON schemas (ECMA-262) and of requests (Python) into the syntax of the library.

The library has the syntax of Rust's `regex` without look-around, back-references and word boundaries. Where ECMA-262
means something else by the same text (dots, classes of spaces, brackets in classes), the translation is explicit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from argosy.constraints.limits import MAX_COUNT, MAX_REPETITION
from argosy.constraints.schema_errors import invalid_grammar

DIGITS = "0-9"
WORD_CHARACTERS = "0-9A-Za-z_"
SPACES = r"\t\n\x0B\x0C\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
CLASS_ESCAPES = {"d": DIGITS, "w": WORD_CHARACTERS, "s": SPACES}
CONTROL_ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
ANY_CHARACTER = "(?s:.)"
DOT = {"ecma": r"[^\n\r\u2028\u2029]", "python": r"[^\n]"}
REPETITION = re.compile(r"\{(\d+)(,?)(\d*)\}", re.ASCII)
HEX = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}")}
BRACED_HEX = re.compile(r"\{([0-9A-Fa-f]{1,6})\}")
PROPERTY = re.compile(r"\{\^?[A-Za-z0-9_=:]+\}")
GROUP_NAME = re.compile(r"\?P?<[^\W\d]\w*>")
GROUP_FLAGS = re.compile(r"\?([is]+)(:|\))")
MAX_GROUP_DEPTH = 50
WHITESPACE_PARTS = re.compile(
    r"[ \t\n\r]|\\[tnrs ]|\\x(?:20|09|0[aAdD])|\\u00(?:20|09|0[aAdD])|\((?:\?:)?|[\[\])|?*+]|\{\d{1,4}(?:,\d{0,4})?\}"
)
JSON_WHITESPACE = r" \t\n\r"
MAX_WHITESPACE_PATTERN_CHARACTERS = 200


class PatternError(ValueError):
    """Reason why a regular expression is invalid or not supported."""


@dataclass(slots=True)
class _Group:
    """Open group. `repetition` is the largest product of nested counted repetitions within it."""

    repetition: int = 1


@dataclass(slots=True)
class PatternTranslator:
    """Translator of one regular expression. Subclasses may change its atoms."""

    pattern: str
    dialect: str
    position: int = 0
    output: list[str] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=lambda: [_Group()])
    atom_repetition: int = 0
    """Product of counted repetitions in the last atom; 0 if there is no atom that a quantifier may follow."""

    def run(self) -> str:
        while self.position < len(self.pattern):
            self._translate_next()
        if len(self.groups) > 1:
            raise PatternError("a group is not closed")
        return "".join(self.output)

    def _translate_next(self) -> None:
        character = self._take()
        if character == "\\":
            self._translate_escape()
        elif character == "[":
            self.emit_atom(self._translate_class())
        elif character == "(":
            self._open_group()
        elif character == ")":
            self._close_group()
        elif character == ".":
            self.emit_atom(DOT[self.dialect])
        elif character in "*+?":
            self.quantify(character, 1)
        elif character == "{" and (match := REPETITION.match(self.pattern, self.position - 1)):
            self._repeat(match)
        elif character in "^$|":
            self.output.append(character)
            self.atom_repetition = 0
        else:
            self.emit_atom(literal(character))

    def _take(self) -> str:
        if self.position >= len(self.pattern):
            raise PatternError("it ends in the middle of an escape or a class")
        character = self.pattern[self.position]
        self.position += 1
        return character

    def _peek(self, offset: int = 0) -> str:
        return self.pattern[self.position + offset : self.position + offset + 1]

    def emit_atom(self, text: str, repetition: int = 1) -> None:
        self.output.append(text)
        self.atom_repetition = repetition
        self.groups[-1].repetition = max(self.groups[-1].repetition, repetition)

    def quantify(self, quantifier: str, count: int) -> None:
        if not self.atom_repetition:
            raise PatternError(f"nothing precedes the quantifier {quantifier}")
        if count > 1:
            repetition = self.atom_repetition * count
            if self.atom_repetition > 1 and repetition > MAX_REPETITION:
                raise PatternError(
                    f"nested repetitions multiply to {repetition}; at most {MAX_REPETITION} are supported"
                )
            self.groups[-1].repetition = max(self.groups[-1].repetition, repetition)
        self.output.append(quantifier)
        if self._peek() == "?":  # a lazy quantifier matches the same texts
            self.position += 1
        elif self._peek() == "+":
            raise PatternError("possessive quantifiers are not supported")
        self.atom_repetition = 0

    def _repeat(self, match: re.Match[str]) -> None:
        if len(match[1]) > 9 or len(match[3]) > 9:
            raise PatternError(f"a repetition exceeds {MAX_COUNT}")
        minimum, maximum = int(match[1]), int(match[3]) if match[3] else None
        if maximum is None and not match[2]:
            maximum = minimum
        if maximum is not None and maximum < minimum:
            raise PatternError("a repetition has its bounds in the wrong order")
        count = minimum if maximum is None else maximum
        if count > MAX_COUNT:
            raise PatternError(f"a repetition exceeds {MAX_COUNT}")
        self.position = match.end()
        self.quantify(f"{{{minimum},{'' if maximum is None else maximum}}}", count)

    def _open_group(self) -> None:
        if len(self.groups) > MAX_GROUP_DEPTH:
            raise PatternError(f"groups are nested more than {MAX_GROUP_DEPTH} deep")
        opening = "(?:"
        if self._peek() == "?":
            opening = self.open_special_group()
        if opening.endswith(":"):
            self.groups.append(_Group())
        self.output.append(opening)
        self.atom_repetition = 0

    def open_special_group(self) -> str:
        if self.pattern.startswith("?:", self.position):
            self.position += 2
            return "(?:"
        for name in ("?=", "?!", "?<=", "?<!"):
            if self.pattern.startswith(name, self.position):
                raise PatternError("look-ahead and look-behind are not supported")
        if match := GROUP_NAME.match(self.pattern, self.position):
            self.position = match.end()
            return "(?:"
        if match := GROUP_FLAGS.match(self.pattern, self.position):
            self.position = match.end()
            return f"({match[0]}"
        raise PatternError("a group starts with (? and is not supported")

    def _close_group(self) -> None:
        if len(self.groups) == 1:
            raise PatternError("a group is closed that is not open")
        group = self.groups.pop()
        self.emit_atom(")", group.repetition)

    def _translate_escape(self) -> None:
        character = self._peek()
        if character in {"b", "B"}:
            raise PatternError("word boundaries are not supported")
        if character and character in "123456789k":
            raise PatternError("back-references are not supported")
        if self.dialect == "python" and character in {"A", "Z"}:
            self.position += 1
            self.output.append("^" if character == "A" else "$")
            self.atom_repetition = 0
            return
        single, class_text = self._read_escape()
        self.emit_atom(literal(single) if single else f"[{class_text}]")

    def _read_escape(self) -> tuple[str, str]:
        """Read the escape after a backslash. Returns a character, or the inside of a class."""
        character = self._take()
        if character.lower() in CLASS_ESCAPES:
            inside = CLASS_ESCAPES[character.lower()]
            return "", inside if character.islower() else f"[^{inside}]"
        if character in CONTROL_ESCAPES and not (character == "0" and self._peek().isdigit()):
            return chr(CONTROL_ESCAPES[character]), ""
        if character == "c" and self._peek().isascii() and self._peek().isalpha():
            return chr(ord(self._take()) % 32), ""
        if character in HEX:
            return self._read_hex(character), ""
        if character in {"p", "P"} and (match := PROPERTY.match(self.pattern, self.position)):
            self.position = match.end()
            return "", f"\\{character}{match[0]}"
        if character.isalnum():
            raise PatternError(f"\\{character} is not supported")
        return character, ""

    def _read_hex(self, kind: str) -> str:
        if kind == "u" and (match := BRACED_HEX.match(self.pattern, self.position)):
            code = int(match[1], 16)
        elif match := HEX[kind].match(self.pattern, self.position):
            code = int(match[0], 16)
            low = self.pattern[match.end() + 2 : match.end() + 6]
            if 0xD800 <= code < 0xDC00 and re.fullmatch(r"[dD][c-fC-F][0-9A-Fa-f]{2}", low):
                self.position = match.end() + 6
                return chr(0x10000 + (code - 0xD800) * 0x400 + int(low, 16) - 0xDC00)
        else:
            raise PatternError(f"\\{kind} needs hexadecimal digits")
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise PatternError(f"\\{kind} is no character")
        self.position = match.end()
        return chr(code)

    def _translate_class(self) -> str:
        negated = self._peek() == "^"
        self.position += negated
        parts: list[str] = []
        while self._peek() != "]" or (self.dialect == "python" and not parts):
            parts.append(self._translate_class_item())
        self.position += 1
        if not parts:
            if negated:
                return ANY_CHARACTER
            raise PatternError("an empty class matches nothing")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _translate_class_item(self) -> str:
        start, class_text = self._read_class_atom()
        if class_text or self._peek() != "-" or self._peek(1) in {"]", ""}:
            return class_text or class_literal(start)
        self.position += 1
        end, end_class_text = self._read_class_atom()
        if end_class_text:  # not a range: `[a-\d]` has a hyphen
            return class_literal(start) + class_literal("-") + end_class_text
        if end < start:
            raise PatternError("a range of a class has its ends in the wrong order")
        return f"{class_literal(start)}-{class_literal(end)}"

    def _read_class_atom(self) -> tuple[str, str]:
        character = self._take()
        if character != "\\":
            return character, ""
        if self._peek() == "b":
            self.position += 1
            return "\b", ""
        return self._read_escape()


def translate_pattern(pattern: str, dialect: str = "ecma") -> str:
    """Translate a regular expression.

    Args:
        pattern: Regular expression of a request.
        dialect: `ecma` (JSON schemas) or `python` (`regex` of vLLM and SGLang).

    Raises:
        PatternError: It is invalid or not supported.
    """
    return PatternTranslator(pattern, dialect).run()


def literal(character: str) -> str:
    """Return a character as a regular expression."""
    if character.isalnum() and character.isascii():
        return character
    return _code_point(character) if not character.isprintable() else re.escape(character)


def class_literal(character: str) -> str:
    """Return a character within a class."""
    if character.isalnum() or character in " _,.;:!?/%@=+*<>'\"(){}|$#":
        return character
    return _code_point(character)


def _code_point(character: str) -> str:
    return f"\\x{{{ord(character):X}}}"


def translate_whitespace_pattern(pattern: Any, param: str) -> str:  # noqa: ANN401 - JSON value
    r"""Return a pattern of a request in the library's syntax. `\s` stands for the whitespace of JSON.

    Raises:
        ApiError: 400.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_WHITESPACE_PATTERN_CHARACTERS:
        raise invalid_grammar(
            f"The pattern must be a string of at most {MAX_WHITESPACE_PATTERN_CHARACTERS} characters.",
            param,
        )
    if re.fullmatch(f"(?:{WHITESPACE_PARTS.pattern})*", pattern) is None:
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
    for match in WHITESPACE_PARTS.finditer(pattern):
        part = match[0]
        if part in {"[", "]"}:
            is_in_class = part == "["
        if part == r"\s":
            part = JSON_WHITESPACE if is_in_class else f"[{JSON_WHITESPACE}]"
        parts.append(part)
    return "".join(parts)
