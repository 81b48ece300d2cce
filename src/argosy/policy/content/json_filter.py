"""Filter of a JSON document that arrives in chunks, such as a tool call's arguments. The document stays valid.

Each string is filtered on its own, with its escapes decoded, and replacements need no escapes. A number in which a
match is found becomes `null`, since no replacement of a part of it is sure to be a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from argosy.policy.content.detectors import Action
from argosy.policy.content.text_filter import Matcher, Rule, TextFilter

MAX_SCALAR_CHARS = 512
"""Longest number that is held back. The rest of a longer one is dropped, and the document is not valid then."""
_PLAIN = re.compile(r'[^"\\]+')
_STRUCTURE = re.compile(r"[\s\[\]{},:]+")
_SCALAR = re.compile(r'[^\s\[\]{},:"]+')
_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{4}|[^u])", re.DOTALL)
_MAX_ESCAPE_CHARS = 6
_DECODED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonFilter:
    """State of one filtered document. What is no JSON is filtered as far as it is, and never raises."""

    def __init__(self, matcher: Matcher, replace: Callable[[Rule, str], str] | None = None) -> None:
        """Create the filter of a document. The arguments are those of `TextFilter`."""
        self._text_filter = TextFilter(matcher, replace)
        self._is_in_string = False
        self._escape = ""
        """Beginning of an escape that has not ended."""
        self._scalar = ""

    @property
    def counts(self) -> dict[tuple[str, Action], int]:
        """Matches so far, by detector and action."""
        return self._text_filter.counts

    @property
    def stopped_by(self) -> str | None:
        """Name of the detector that ended the document; None while it goes on."""
        return self._text_filter.stopped_by

    def feed(self, chunk: str) -> str:
        """Add a part of the document, and return what is decided."""
        chunk, self._escape = self._escape + chunk, ""
        output, position = [], 0
        while position < len(chunk) and self.stopped_by is None:
            if self._is_in_string:
                part, position = self._feed_string(chunk, position)
                output.append(part)
            elif (match := _SCALAR.match(chunk, position)) is not None:
                self._scalar = (self._scalar + match[0])[:MAX_SCALAR_CHARS]
                position = match.end()
            else:
                output.append(self._end_scalar())
                match = _STRUCTURE.match(chunk, position)
                structure = '"' if match is None else match[0]
                self._is_in_string, position = match is None, position + len(structure)
                if self.stopped_by is None:
                    output.append(structure)
        return "".join(output)

    def flush(self) -> str:
        """Return the rest of the document, which has ended."""
        output = self._end_scalar()
        if self._is_in_string:
            output += self._text_filter.feed(self._escape) + self._text_filter.flush()
        self._is_in_string, self._escape = False, ""
        return output

    def _feed_string(self, chunk: str, position: int) -> tuple[str, int]:
        """Add characters of a string up to its end, its next escape or the end of the chunk."""
        if (match := _PLAIN.match(chunk, position)) is not None:
            return self._text_filter.feed(match[0]), match.end()
        if chunk[position] == '"':
            self._is_in_string = False
            output = self._text_filter.flush()
            return output if self.stopped_by is not None else output + '"', position + 1
        match = _ESCAPE.match(chunk, position)
        if match is None and len(chunk) - position < _MAX_ESCAPE_CHARS:
            self._escape = chunk[position:]
            return "", len(chunk)
        source = chunk[position] if match is None else match[0]
        return self._text_filter.feed(_decode(source), [source]), position + len(source)

    def _end_scalar(self) -> str:
        """Return the number, `true`, `false` or `null` before this place, or `null` in its place."""
        scalar, self._scalar = self._scalar, ""
        if not scalar:
            return ""
        filtered = self._text_filter.feed(scalar) + self._text_filter.flush()
        if self.stopped_by is not None:
            return ""
        return scalar if filtered == scalar else "null"


def _decode(escape: str) -> str:
    if len(escape) == _MAX_ESCAPE_CHARS:
        return chr(int(escape[2:], base=16))  # noqa: FURB166 - the prefix is \u
    return _DECODED.get(escape[1:], escape[-1])
