"""Position in output that is still being generated, and the primitives with which parsers read it.

Parsers are generators: they yield when the text received so far does not decide how to continue. Their decisions depend
only on the text, not on the pieces in which it arrived.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable
from typing import TypeVar

from argosy.engine.serving.output_parsing.events import Piece

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""Parser that yields whenever it needs more text, and returns its result."""

MAX_HEADER_CHARS = 65_536
"""Text of one call that may be held back until the name of the tool is known."""
_MAX_READ_CHARS = 4096
"""Text that has been read and is not worth dropping yet."""
_FIRST_MARKER = 0xD800
_SURROGATES = re.compile("[\ud800-\udfff]")
WHITE_SPACE = " \t\r\n"


class OutputEndedError(Exception):
    """The output ended where the parser needed more text."""


class NotACallError(Exception):
    """The text is not a tool call."""


class MarkerCodec:
    """Mapping between special tokens and the characters that stand for them in parsed text.

    A special token becomes one surrogate code point. Decoded text cannot contain one, so that the text `</think>` and
    the token of this name stay apart.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._chars = {
            text: chr(_FIRST_MARKER + index) for index, text in enumerate(sorted(tokens))
        }
        self._texts = {char: text for text, char in self._chars.items()}
        alternatives = "|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True))
        self._tokens = re.compile(alternatives) if tokens else None

    def encode_pieces(self, pieces: Iterable[Piece]) -> str:
        """Return pieces as text in which each known special token is one character."""
        return "".join(
            _SURROGATES.sub("\ufffd", piece)
            if isinstance(piece, str)
            else self._chars.get(piece.text, piece.text)
            for piece in pieces
        )

    def encode(self, literal: str) -> str:
        """Return syntax of a format, with special tokens as their characters."""
        if self._tokens is None:
            return literal
        return self._tokens.sub(lambda match: self._chars[match.group()], literal)

    def decode(self, text: str) -> str:
        """Return parsed text with special tokens as their text."""
        if _SURROGATES.search(text) is None:
            return text
        return _SURROGATES.sub(lambda match: self._texts.get(match.group(), "\ufffd"), text)


class LiteralSet:
    """Strings that are searched for in text that is still growing. No string may contain another."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = tuple(dict.fromkeys(literal for literal in literals if literal))
        self._pattern = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)")
        self._max_size = max(map(len, self.literals), default=0)

    def search(self, text: str, start: int, *, is_final: bool) -> tuple[int, str]:
        """Return where the first literal begins, and the literal.

        Without a literal, return the end of the text that cannot become a part of one, and an empty string.
        """
        match = self._pattern.search(text, start)
        if match is not None:
            return match.start(), match.group()
        if not is_final:
            for position in range(max(start, len(text) - self._max_size + 1), len(text)):
                tail = text[position:]
                if any(literal.startswith(tail) for literal in self.literals):
                    return position, ""
        return len(text), ""


class Cursor:
    """Position in the encoded output."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_final = False
        """Whether the text is complete."""
        self.mark: int | None = None
        """Position to which a parser may still return."""

    @property
    def at_end(self) -> bool:
        """Whether all text received so far has been read."""
        return self.position >= len(self.text)

    def release(self) -> None:
        """Drop text that has been read, unless a parser may still return to it. Invalidates all positions."""
        if self.mark is None and self.position > _MAX_READ_CHARS:
            self.text = self.text[self.position :]
            self.position = 0

    def peek(self) -> Reading[str]:
        """Return the next character, or an empty string at the end of the output."""
        while self.position >= len(self.text):
            if self.is_final:
                return ""
            yield
        return self.text[self.position]

    def require(self) -> Reading[str]:
        """Return the next character.

        Raises:
            OutputEndedError: The output ends here.
        """
        char = yield from self.peek()
        if not char:
            raise OutputEndedError
        return char

    def skip(self, chars: str = WHITE_SPACE) -> Reading[None]:
        """Skip all characters in `chars`."""
        while (char := (yield from self.peek())) and char in chars:
            self.position += 1

    def match(self, *literals: str) -> Reading[str]:
        """Return the first of `literals` that the text continues with, or an empty string. Does not read it."""
        while True:
            rest = self.text[self.position : self.position + max(map(len, literals), default=0)]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
                if not self.is_final and literal.startswith(rest):
                    break
            else:
                return ""
            yield

    def accept(self, *literals: str) -> Reading[str]:
        """Read the first of `literals` that the text continues with. Return it, or an empty string."""
        literal = yield from self.match(*literals)
        self.position += len(literal)
        return literal

    def expect(self, *literals: str) -> Reading[str]:
        """Read one of `literals` and return it.

        Raises:
            OutputEndedError: The output ends within a literal.
            NotACallError: The text continues otherwise.
        """
        literal = yield from self.accept(*literals)
        if not literal:
            rest = self.text[self.position :]
            if any(candidate.startswith(rest) for candidate in literals):
                raise OutputEndedError
            raise NotACallError
        return literal

    def read_until(
        self, stops: LiteralSet, limit: int = MAX_HEADER_CHARS
    ) -> Reading[tuple[str, str]]:
        """Read up to the first of `stops`. Return the text before it, and the literal, which is not read.

        Raises:
            OutputEndedError: The output ends before a literal.
            NotACallError: There is no literal within `limit` characters.
        """
        start = searched = self.position
        while True:
            searched, literal = stops.search(self.text, searched, is_final=self.is_final)
            if searched - start > limit:
                raise NotACallError
            if literal:
                self.position = searched
                return self.text[start:searched], literal
            if self.is_final:
                raise OutputEndedError
            yield

    def pass_text(self, stops: LiteralSet, write: Callable[[str], None]) -> Reading[str]:
        """Pass text to `write` as it arrives, up to the first of `stops`.

        Return the literal, which is not read, or an empty string at the end of the output.
        """
        while True:
            end, literal = stops.search(self.text, self.position, is_final=self.is_final)
            write(self.text[self.position : end])
            self.position = end
            if literal or self.is_final:
                return literal
            self.release()
            yield
