"""Filter of a text that arrives in chunks: its output is that of the whole text, however the text is divided.

A match is decided where no further text can change it, that is, where what follows its start is no beginning of any
pattern (`BoundedPattern.prefixes`). The text from the first undecided place on is held back. It is at most as long as
the longest match of a detector with what may not follow it. Text that belongs to a long secret is dropped as it
arrives.

Letters and digits of full width, digits of other scripts and wide spaces are matched as their ASCII forms. Invisible
characters are matched as if they were absent, and disappear with the match that contains them.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import re2

from argosy.policy.content.detectors import MAX_END_CHARS, Action, Detector

MAX_PROGRAM_BYTES = 64 << 20
"""Memory of RE2 for one set of patterns: instructions, and states that it discards when they are too many."""
MAX_PART_CHARS = 1024
"""Characters that are matched at a time. RE2 encodes all that it is given for each call."""
MAX_INVISIBLE_CHARS = 64
"""Invisible characters that are kept in a row. Further ones are removed."""
_START = "\n"
"""Stands before the text. No detector forbids it there."""


class Rule(NamedTuple):
    """A detector and the action for its matches."""

    detector: Detector
    action: Action


class _Swallowed(NamedTuple):
    """Text that belongs to a match after it: characters of a class, up to the end of a pattern if there is one."""

    characters: Any
    until: Any

    def find_end(self, text: str, start: int, *, is_final: bool) -> tuple[int, bool]:
        """Return the end of what belongs to a match from `start` on, and whether the match ends there."""
        end = self.characters.match(text, start).end()
        last = self.until.search(text[:end], start) if self.until is not None else None
        if last is not None:
            return last.end(), True
        if end < len(text) or is_final:
            return end, True
        return (end if self.until is None else max(start, end - MAX_END_CHARS)), False


class Matcher:
    """Rules, compiled once for all texts. Immutable, and safe to share."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Compile rules. Where several match at one place, the first one counts.

        Raises:
            ValueError: RE2 refuses the patterns together, because they need too much memory.
        """
        self.rules = tuple(rules)
        options = re2.Options()
        options.max_mem = MAX_PROGRAM_BYTES
        options.log_errors = False
        detectors = [each.detector for each in rules]
        try:
            starts = "|".join(f"{_before(d)}{d.pattern.source}" for d in detectors)
            undecided = "|".join(f"{_before(d)}{_prefixes(d)}" for d in detectors)
            self._start = re2.compile(starts, options)
            self._start_or_undecided = re2.compile(f"(?:{undecided})\\z|{starts}", options)
            self._at_place = re2.Set.MatchSet(options)
            for d in detectors:
                self._at_place.Add(f"{_before(d)}{d.pattern.source}")
            self._at_place.Compile()
            self._patterns = [
                (
                    rule,
                    re2.compile(f"{_before(d)}({d.pattern.source})", options),
                    re2.compile(f"(?:{d.not_after.source})", options) if d.not_after else None,
                    _Swallowed(
                        re2.compile(f"[{d.swallowed}]*", options),
                        re2.compile(d.swallowed_until, options) if d.swallowed_until else None,
                    )
                    if d.swallowed
                    else None,
                )
                for rule, d in zip(rules, detectors, strict=True)
            ]
        except re2.error as error:
            message = "The patterns need too much memory together. Use fewer words or shorter repetitions."
            raise ValueError(message) from error
        self.max_held_chars = max(
            (
                d.pattern.max_chars + (d.not_after.max_chars if d.not_after else 0)
                for d in detectors
            ),
            default=0,
        )

    def may_match(self, text: bytes) -> bool:
        """Return whether ASCII text may have a match. False is certain."""
        return self._start.search(_START.encode() + text) is not None

    def find_next(
        self, text: str, start: int, *, is_final: bool
    ) -> tuple[int, int, Rule | None, _Swallowed | None] | None:
        """Find the first match from `start` on, or the place before it at which a match may depend on further text.

        Returns:
            Its start, its end, its rule and what belongs to it after its end. A place has no rule, and ends with the
            text. None if all of the text is decided and has no match.
        """
        pattern = self._start if is_final else self._start_or_undecided
        # Bytes, whose offsets are those of the characters here, spare RE2 half of its time, which converts offsets.
        subject = text.encode() if text.isascii() else text
        while True:
            candidate = pattern.search(subject, start - 1)
            if candidate is None:
                return None
            place, end = candidate.span()
            if end == len(text) and not is_final:
                return place + 1, end, None, None
            nearby = text[place : place + self.max_held_chars + 2]
            for index in sorted(self._at_place.Match(nearby)):
                rule, at_place, not_after, swallowed = self._patterns[index]
                match = at_place.match(nearby)
                end = match.end()
                if not_after is not None and not_after.match(nearby, end) is not None:
                    continue
                if rule.detector.check is None or rule.detector.check(match[1]):
                    return place + 1, place + end, rule, swallowed
            start = place + 2


def _before(detector: Detector) -> str:
    """Return the pattern of the character before a match. A text has one before its first character, too."""
    return f"[^{detector.not_before}]" if detector.not_before else r"[\x00-\x{10ffff}]"


def _prefixes(detector: Detector) -> str:
    if detector.not_after is None:
        return detector.pattern.prefixes
    return f"(?:{detector.pattern.source}{detector.not_after.prefixes}|{detector.pattern.prefixes})"


class TextFilter:
    """State of one filtered text.

    Attributes:
        counts: Matches so far, by detector and action. The matches themselves are never kept.
        stopped_by: Name of the detector that ended the text; None while it goes on. What follows is dropped.
    """

    def __init__(self, matcher: Matcher, replace: Callable[[Rule, str], str] | None = None) -> None:
        """Create the filter of a text that begins now.

        Args:
            matcher: The rules.
            replace: Returns the replacement of a match; None for that of its detector.
        """
        self.counts: Counter[tuple[str, Action]] = Counter()
        self.stopped_by: str | None = None
        self._matcher = matcher
        self._replace = replace or _replace
        self._text = _START
        """Held text as it is matched, after the character before it."""
        self._sources: list[str] | None = None
        """Held text as it arrived, by character of `_text`; None if both are the same."""
        self._invisible = ""
        """Invisible characters since the last visible one. They stay in front of the next one."""
        self._swallowing: _Swallowed | None = None
        self._is_dropping = False

    @property
    def held_chars(self) -> int:
        """Number of characters that are held back."""
        return len(self._text) - 1

    def feed(self, chunk: str, sources: Sequence[str] | None = None) -> str:
        """Add text, and return what is decided.

        Args:
            chunk: The text.
            sources: What stands for each character of `chunk` in the output, such as an escape; None for itself.
        """
        output = []
        for start in range(0, len(chunk), MAX_PART_CHARS):
            if self.stopped_by is not None:
                break
            part = chunk[start : start + MAX_PART_CHARS]
            if sources is not None or self._invisible or not part.isascii():
                characters = part if sources is None else sources[start : start + MAX_PART_CHARS]
                part = self._fold(part, characters)
            elif self._sources is not None:
                self._sources += part
            self._text += part
            output.append(self._release(is_final=False))
        return "".join(output)

    def flush(self) -> str:
        """Return the rest of the text, which has ended. The filter is then at the start of another text."""
        output = ""
        if self.stopped_by is None:
            output = self._release(is_final=True) + self._invisible
        self._text, self._sources, self._swallowing, self._invisible = _START, None, None, ""
        return output

    def _fold(self, chunk: str, sources: Sequence[str]) -> str:
        """Add the sources of a chunk. Returns the chunk as it is matched."""
        if self._sources is None:
            self._sources = list(self._text)
        folded = []
        for character, source in zip(chunk, sources, strict=True):
            plain = _fold(character)
            if plain:
                folded.append(plain)
                self._sources.append(self._invisible + source)
                self._invisible = ""
            elif len(self._invisible) < MAX_INVISIBLE_CHARS:
                self._invisible += source
        return "".join(folded)

    def _release(self, *, is_final: bool) -> str:
        text, matcher, output = self._text, self._matcher, []
        position = 1
        while True:
            if self._swallowing is not None:
                end, has_ended = self._swallowing.find_end(text, position, is_final=is_final)
                if not self._is_dropping:
                    output.append(self._cut(position, end))
                position = end
                if not has_ended:
                    break
                self._swallowing = None
            found = matcher.find_next(text, position, is_final=is_final)
            if found is None:
                output.append(self._cut(position, len(text)))
                position = len(text)
                break
            start, end, rule, self._swallowing = found
            output.append(self._cut(position, start))
            if rule is None:
                position = start
                break
            self.counts[rule.detector.name, rule.action] += 1
            if rule.action == "stop":
                self.stopped_by = rule.detector.name
                return "".join(output)
            self._is_dropping = rule.action != "report"
            output.append(
                self._replace(rule, text[start:end]) if self._is_dropping else self._cut(start, end)
            )
            position = end
        self._text = text[position - 1 :]
        if self._sources is not None:
            self._sources = self._sources[position - 1 :] if position < len(text) else None
        return "".join(output)

    def _cut(self, start: int, end: int) -> str:
        """Return held text as it arrived."""
        if self._sources is None:
            return self._text[start:end]
        return "".join(self._sources[start:end])


def _replace(rule: Rule, match: str) -> str:
    return rule.detector.replace(match, rule.action)


def _fold(character: str) -> str:
    """Return the character that stands for another one in patterns; nothing for an invisible one."""
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.digit(character))
    if category == "Zs":
        return " "
    if category in {"Cf", "Mn", "Me"}:
        return ""
    if category == "Cs":  # half a pair from an escape of JSON, which RE2 cannot encode
        return "\ufffd"
    if category == "Pd" or character == "\u2212":
        return "-"
    compatible = unicodedata.normalize("NFKC", character)
    return compatible if len(compatible) == 1 else character
