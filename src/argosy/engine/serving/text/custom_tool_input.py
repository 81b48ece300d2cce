"""Input of custom tools, which models write as a function call with one string argument.

A custom tool takes free text. Models are trained on calls with JSON arguments, so they see such a tool as a function
with the parameter `input`. The client gets the text of that parameter.
"""

from __future__ import annotations

import re

from argosy.constraints import CUSTOM_INPUT

_KEY = f'"{CUSTOM_INPUT}"'
_OPENING = re.compile(rf'\s*\{{\s*{_KEY}\s*:\s*"')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNICODE_DIGITS = 4


class CustomInputDecoder:
    """Incremental decoder from `{"input": "..."}` to the text of the string. Never raises.

    The text depends only on the concatenation of the pieces. Arguments of another shape are returned unchanged.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "opening"
        self._high_surrogate = ""

    def feed(self, piece: str) -> str:
        """Add a piece of the arguments and return the text that it completes."""
        self._held += piece
        if self._state == "opening":
            match = _OPENING.match(self._held)
            if match is not None:
                self._held = self._held[match.end() :]
                self._state = "string"
            elif not _may_open(self._held):
                self._state = "other"
        if self._state == "string":
            return self._decode_string()
        if self._state == "other":
            text, self._held = self._held, ""
            return text
        return ""

    def _decode_string(self) -> str:
        text: list[str] = []
        position = 0
        while position < len(self._held):
            char = self._held[position]
            if char == '"':
                self._state = "closed"
                position = len(self._held)
                break
            if char != "\\":
                text.append(self._take_surrogate() + char)
                position += 1
                continue
            escape = self._held[position + 1 : position + 2]
            size = 2 + (_UNICODE_DIGITS if escape == "u" else 0)
            if len(self._held) < position + size:
                break
            text.append(self._decode_escape(escape, self._held[position + 2 : position + size]))
            position += size
        self._held = "" if self._state == "closed" else self._held[position:]
        return "".join(text)

    def _decode_escape(self, escape: str, digits: str) -> str:
        if escape != "u":
            return self._take_surrogate() + _ESCAPES.get(escape, escape)
        try:
            code = int(digits, 16)
        except ValueError:
            return self._take_surrogate() + "\\u" + digits
        if self._high_surrogate and 0xDC00 <= code < 0xE000:
            high, self._high_surrogate = ord(self._high_surrogate), ""
            return chr(0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00))
        rest = self._take_surrogate()
        if 0xD800 <= code < 0xDC00:
            self._high_surrogate = chr(code)
            return rest
        return rest + ("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))

    def _take_surrogate(self) -> str:
        """Return U+FFFD for a high surrogate that no low one followed, else nothing."""
        had_surrogate, self._high_surrogate = bool(self._high_surrogate), ""
        return "\ufffd" if had_surrogate else ""


def _may_open(text: str) -> bool:
    """Return whether `text` is a prefix of the opening of `{"input": "..."}`, with any white space between tokens."""
    rest = text
    for token in ("{", _KEY, ":", '"'):
        rest = rest.lstrip()
        if not rest.startswith(token):
            return token.startswith(rest)
        rest = rest[len(token) :]
    return True
