"""Text of grammars for llguidance: Lark rules, special tokens by id, and JSON schemas as sub-grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from argosy.constraints import Relaxation

WHITE_SPACE_RULE = "ws"
TEXT_RULE = "TEXT"
_WHITE_SPACE = r"/ |\n {0,16}/"
_REGEX_CHARS = re.compile(r"[.*+?^${}()|\[\]\\/&~\-]")


class GrammarWriter:
    """Collector of the rules of one grammar. The same calls give the same text.

    Args:
        tokens: Ids of the markers that are special tokens of the model.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.relaxations: list[tuple[str, Relaxation]] = []
        """Request field and keyword of each part of a schema that the grammar does not enforce."""
        self._tokens = tokens
        alternatives = "|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True))
        self._pattern = re.compile(f"({alternatives})") if tokens else None
        self._rules: dict[str, str] = {}
        self._grammars: list[dict[str, Any]] = []
        self._unique_names: dict[tuple[str, str, str], str] = {}

    def literal(self, text: str) -> str:
        """Return an expression for fixed text, in which markers are special tokens."""
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else quote(part)
            for part in self.split(text)
        )

    def split(self, text: str) -> list[str]:
        """Return fixed text as markers and the text between them."""
        if not text:
            return []
        if self._pattern is None:
            return [text]
        return [part for part in self._pattern.split(text) if part]

    def is_token(self, text: str) -> bool:
        """Return whether a marker is a special token of the model."""
        return text in self._tokens

    def rule(self, name: str, expression: str, *, attributes: str = "") -> str:
        """Add a rule under a name that begins with `name`, and return the name. Equal rules are one."""
        key = (name, attributes, expression)
        if key not in self._unique_names:
            unique = f"{name}_{len(self._rules)}" if name in self._rules else name
            self._unique_names[key] = unique
            head = f"{unique}[{attributes}]" if attributes else unique
            self._rules[unique] = f"{head}: {expression}"
        return self._unique_names[key]

    def shared_rule(self, name: str, expression: str) -> str:
        """Add a rule once, and return its name."""
        if name not in self._rules:
            self._rules[name] = f"{name}: {expression}"
        return name

    def has_rule(self, name: str) -> bool:
        """Return whether a rule exists."""
        return name in self._rules

    def replace_rule(self, name: str, expression: str) -> None:
        """Set the expression of a rule that other rules refer to already."""
        self._rules[name] = f"{name}: {expression}"

    def white_space(self) -> str:
        """Return an expression for white space within JSON, which is bounded."""
        return self.shared_rule("WS", _WHITE_SPACE) + "?"

    def text(self, without: Collection[str] = ()) -> str:
        """Return an expression for free text, which has no special tokens, and none of the texts in `without`."""
        if not without:
            return self.shared_rule(TEXT_RULE, r"/[\s\S]*/")
        unwanted = "|".join(map(escape_regex, without))
        return self.shared_rule("PLAIN_TEXT", rf"/[\s\S]*/ & ~/[\s\S]*({unwanted})[\s\S]*/")

    def text_until(
        self, closer: str, pattern: str = r"[\s\S]*", *, without: Collection[str] = ()
    ) -> str:
        """Return an expression for text, and the first `closer` behind it.

        Args:
            closer: Text or markers behind the text.
            pattern: Regular expression of the text.
            without: Regular expressions that occur nowhere in the text.
        """
        text_pattern = f"/{pattern}/"
        if without:
            text_pattern += rf" & ~/[\s\S]*({'|'.join(without)})[\s\S]*/"
        first, *rest = self.split(closer)
        if self.is_token(first):
            text = self.rule("TEXT_BEFORE", text_pattern)
            return f"{text} {self.literal(closer)}"
        if rest:
            text = self.rule("TEXT_WITH", f"/({pattern}){escape_regex(first)}/")
            return f"{text} {self.literal(''.join(rest))}"
        return self.rule("text_until", text_pattern, attributes=f"suffix={quote(first)}")

    def text_with(self, ending: str) -> str:
        """Return an expression for free text that ends with `ending`, which a special token must follow."""
        return self.rule("TEXT_WITH", rf"/[\s\S]*{escape_regex(ending)}/")

    def text_up_to(self, trigger: str) -> str:
        """Return an expression for free text up to and with the first `trigger`, which is ordinary text."""
        return self.rule("head", rf"/[\s\S]*{escape_regex(trigger)}/", attributes="lazy")

    @property
    def num_grammars(self) -> int:
        """Number of sub-grammars."""
        return len(self._grammars)

    def add_grammars(self, grammars: Collection[dict[str, Any]]) -> str:
        """Add sub-grammars and return a reference to the first."""
        self._grammars += grammars
        return f"@{next(iter(grammars))['name']}"

    def encode(self, start: str) -> str:
        """Return the text of the grammar with the start expression `start`."""
        lines = [f"start: {start}", *self._rules.values()]
        grammars = [{"name": "output", "lark_grammar": "\n".join(lines)}, *self._grammars]
        return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def quote(text: str) -> str:
    """Return text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def escape_regex(text: str) -> str:
    """Return text as a regular expression between slashes."""
    return _REGEX_CHARS.sub(lambda match: "\\" + match.group(), text).replace("\n", "\\n")


def alternatives(expressions: Collection[str]) -> str:
    """Return a choice between expressions."""
    return f"({' | '.join(expressions)})" if len(expressions) != 1 else next(iter(expressions))
