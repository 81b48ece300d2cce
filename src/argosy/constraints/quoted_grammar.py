"""Grammars of texts within JSON strings: a Lark grammar of a text becomes one of the text as JSON writes it.

Models write the input of a custom tool as a JSON string, in which quotes, backslashes and line breaks are escaped. The
lexer of the library does not go back, so that no lexeme may end before an escape that could have continued it. Regular
expressions with escaped characters therefore become rules, in which each escape is a lexeme of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from argosy.constraints.pattern_translator import (
    ANY_CHARACTER,
    DOT,
    GROUP_FLAGS,
    PatternError,
    PatternTranslator,
    class_literal,
    literal,
)

_ESCAPED = {char: json.dumps(char)[1:-1] for char in '"\\\b\t\n\f\r'}
"""Spelling of each character that JSON strings escape. Other control characters do not occur in texts."""
_ORDINARY = r'[^"\\\x00-\x1F]'
_CODE_POINT = re.compile(r"\\x\{([0-9A-F]+)\}")
_STRING = r'"(?:\\.|[^"\\\n])*"'
_TOKEN = re.compile(
    rf"(?P<first>{_STRING})[ ]*\.\.[ ]*(?P<last>{_STRING})|(?P<string>{_STRING})(?P<any_case>i?)|"
    r"/(?P<pattern>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)|(?P<comment>//[^\n]*|#[^\n]*)|"
    r"%ignore\s+(?P<ignored>\w+)|%import\s+common\.(?P<imported>\w+)(?:\s*->\s*(?P<alias>\w+))?|"
    r"(?P<head>[A-Za-z_]\w*)(?=\s*:)|(?P<name>[A-Za-z_]\w*)|(?P<unsupported>%\w*|@|&|<|~(?!\s*\d))"
)
_FLAGS = frozenset("isu")
_SHARED_TERMINALS = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's library with characters that are escaped."""
_IGNORED_TERMINALS = {"WS": r"/ |\\[tfrn]/", "WS_INLINE": r"/ |\\t/", "NEWLINE": r"/\\[rn]/"}
"""Terminals that grammars commonly ignore, reduced to one character."""


@dataclass(slots=True)
class _Quoter(PatternTranslator):
    """Translator of a regular expression into an expression of rules. Its output is None if nothing is escaped."""

    flags: str = ""
    has_escapes: bool = False
    last_class: str = ""
    """The last atom, if it is a class."""

    def emit_atom(self, text: str, repetition: int = 1) -> None:
        is_group_end = text == ")"
        if text == DOT["python"] and "s" in self.flags:
            text = ANY_CHARACTER
        self.last_class = text if text.startswith(("[", "(?s")) else ""
        expression, is_escaped = (
            (text, False) if is_group_end else _quote_atom(text, self.flags, "")
        )
        self.has_escapes |= is_escaped
        super(_Quoter, self).emit_atom(expression, repetition)

    def quantify(self, quantifier: str, count: int) -> None:
        if self.last_class and quantifier in {"*", "+"}:
            # A run of ordinary characters is one lexeme, so that few are needed.
            self.output[-1], _ = _quote_atom(self.last_class, self.flags, "+")
        self.last_class = ""
        super(_Quoter, self).quantify(quantifier, count)

    def open_special_group(self) -> str:
        if GROUP_FLAGS.match(self.pattern, self.position):
            raise PatternError("flags of groups are not supported")
        return super(_Quoter, self).open_special_group()


def quote_grammar(lark: str) -> str:
    """Return the grammar of a Lark grammar's texts within JSON strings, without the quotes around them.

    Raises:
        PatternError: The grammar has a part for which there is no such translation, such as a JSON schema.
    """
    tokens = list(_TOKEN.finditer(lark))
    rules = _find_rules(tokens)
    _check_ignored(tokens)
    parts: list[str] = []
    position = 0
    for token in tokens:
        parts += [lark[position : token.start()], _quote_token(token, rules)]
        position = token.end()
    return "".join([*parts, lark[position:]])


def _find_rules(tokens: Iterable[re.Match[str]]) -> dict[str, str]:
    """Return the terminals that become rules, because they have escaped characters, with their new names."""
    uses: dict[str, set[str]] = {}
    escaped: set[str] = set()
    head = ""
    for token in tokens:
        if token["imported"] in _SHARED_TERMINALS:
            escaped.add(token["alias"] or token["imported"])
        elif token["head"]:
            head = token["head"]
            uses.setdefault(head, set())
        elif token["name"] and head:
            uses[head].add(token["name"])
        elif head and _is_literal(token) and _quote_literal(token)[1]:
            escaped.add(head)
    for _ in uses:
        escaped |= {name for name, used in uses.items() if name.isupper() and used & escaped}
    return {name: f"text_{name.lower()}" for name in escaped if name.isupper()}


def _check_ignored(tokens: Iterable[re.Match[str]]) -> None:
    """Check that nothing is ignored within a terminal that becomes a rule of several lexemes.

    Raises:
        PatternError: Something would be.
    """
    ignored = {token["ignored"] for token in tokens if token["ignored"]}
    for token in tokens if ignored else ():
        is_pattern = token["pattern"] is not None and _quote_literal(token)[1]
        is_imported = token["imported"] in _SHARED_TERMINALS.keys() - ignored
        if is_pattern or is_imported:
            raise PatternError("texts with escaped characters cannot ignore others")


def _is_literal(token: re.Match[str]) -> bool:
    return any(token[name] is not None for name in ("string", "first", "pattern"))


def _quote_token(token: re.Match[str], rules: dict[str, str]) -> str:
    if token["unsupported"]:
        raise PatternError(f"{token['unsupported'][:20]} is not supported within a string")
    if token["comment"]:
        return ""
    if token["ignored"]:
        if token["ignored"] not in rules:
            return token[0]
        if token["ignored"] not in _IGNORED_TERMINALS:
            raise PatternError("what is ignored has escaped characters")
        return f"%ignore {_IGNORED_TERMINALS[token['ignored']]}"
    if name := token["head"] or token["name"]:
        return rules.get(name, name)
    if token["imported"]:
        pattern = _SHARED_TERMINALS.get(token["imported"])
        if pattern is None:
            return token[0]
        name = token["alias"] or token["imported"]
        return f"{rules[name]}: {_quote_pattern(pattern, '')[0]}"
    return _quote_literal(token)[0]


def _quote_literal(token: re.Match[str]) -> tuple[str, bool]:
    """Return the expression for a string, a range or a regular expression, and whether it has escaped characters."""
    if token["first"]:
        first, last = map(_read_string, (token["first"], token["last"]))
        if len(first) != 1 or len(last) != 1:
            raise PatternError("the ends of a range are not characters")
        return _quote_atom(f"[{class_literal(first)}-{class_literal(last)}]", "", "")
    if token["string"]:
        text = _read_string(token["string"])
        if token["any_case"]:
            return _quote_pattern("".join(map(literal, text)), "i")
        spelling = json.dumps(text, ensure_ascii=False)[1:-1]
        return json.dumps(spelling, ensure_ascii=False), spelling != text
    if not _FLAGS.issuperset(token["flags"]):
        raise PatternError(f"the flags {token['flags'][:20]} are not supported")
    return _quote_pattern(token["pattern"], token["flags"])


def _quote_pattern(pattern: str, flags: str) -> tuple[str, bool]:
    """Return the expression for a regular expression, and whether it has escaped characters."""
    quoter = _Quoter(pattern, "python", flags=flags)
    quoter.run()
    if not quoter.has_escapes:
        return f"/{pattern}/{flags}", False
    if "^" in quoter.output or "$" in quoter.output:
        raise PatternError("anchors are not supported within a string")
    pieces = ("(" if piece == "(?:" else piece for piece in quoter.output)
    expression = "".join(piece if piece[0] in "*+?{" else f" {piece}" for piece in pieces)
    return f"({expression.strip()})", True


def _read_string(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError as error:
        raise PatternError(f"a string is malformed ({error})") from None


@lru_cache(maxsize=4096)
def _quote_atom(text: str, flags: str, quantifier: str) -> tuple[str, bool]:
    """Return the expression for one character, or a run, of a class or literal, and whether it has escapes."""
    if text.startswith("[[^"):  # the complement of a class alone
        text = text[1:-1]
    source = _CODE_POINT.sub(lambda match: re.escape(chr(int(match[1], 16))), text)
    if "[" in source.replace("\\[", "")[1:]:
        raise PatternError("classes within classes are not supported within a string")
    try:
        matches = re.compile(source).fullmatch
    except re.error as error:
        raise PatternError(f"a class is not supported within a string ({error})") from None
    spellings = [json.dumps(spelling) for char, spelling in _ESCAPED.items() if matches(char)]
    is_class = text.startswith(("[", "(?s"))
    if not is_class and spellings:
        return spellings[0], True
    if not is_class and any(matches(chr(code)) for code in range(32)):
        raise PatternError("it has a control character")
    ordinary = text
    if is_class:
        ordinary = _ORDINARY if text == ANY_CHARACTER else f"[{text}&&{_ORDINARY}]"
    if "i" in flags:
        ordinary = f"(?i:{ordinary})"
    ordinary = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], ordinary)
    return f"({' | '.join([f'/{ordinary}{quantifier}/', *spellings])})", bool(spellings)
