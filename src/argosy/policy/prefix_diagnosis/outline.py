"""Outline of a prompt: keyed hashes of its pieces, with and without dates, ids and numbers, and no text.

A piece is a line, a sentence or at most `MAX_PIECE_BYTES` of a segment. Text that is inserted therefore leaves the
hashes of the pieces after it as they are. The weight of a text stands for its tokens, which are unknown: a letter or a
space weighs 1, a digit or a byte outside ASCII 2, and punctuation 3. A token of English weighs about 4.5.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec
import re2

SegmentKind = Literal["system", "tool", "user", "assistant", "other", "text"]
"""Kind of a segment: the description of a tool, the text of a completion, or the role of a message."""
MaskKind = Literal["uuid", "time", "date", "path", "number", "random_id"]
"""Kind of a value that is masked."""
MAX_PIECE_BYTES = 256
MAX_OUTLINED_BYTES = 1 << 18
"""Bytes of a prompt that are divided into pieces. The rest of each segment is one piece."""
MAX_PIECES = 4096
"""Pieces of a prompt. The rest of each segment is one more piece."""
MAX_MASKS = 4096
"""Masked values of a segment. Later ones count as text."""
HASH_BYTES = 8
_DOUBLE = bytes([*b"0123456789", *range(128, 256)])
_TRIPLE = bytes(byte for byte in range(33, 127) if not chr(byte).isalnum())
MIN_RANDOM_CHARS = 8
"""Length from which a word of letters and digits counts as a random id."""
_MASK_KINDS: tuple[MaskKind, ...] = ("uuid", "time", "date", "time", "path", "number", "random_id")
"""Kind of each group of `_MASKS`."""
_EPOCH_DIGITS = frozenset({10, 13})
_MONTH = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    "|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?"
_MASKS = re2.compile(
    "|".join(
        f"({pattern})"
        for pattern in (
            r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
            rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?",
            (
                r"\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{2,4}"
                rf"|\b{_MONTH}\.? {_DAY}(?:,? \d{{4}})?\b|{_DAY}\.? {_MONTH}(?:\.?,? \d{{4}})?\b|\b{_MONTH} \d{{4}}\b"
                r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
            ),
            rf"{_CLOCK}(?: ?[AaPp]\.?[Mm]\b)?",
            r"(?:/[A-Za-z0-9_.@+-]+){2,}|[A-Za-z]:\\[^\s\"'<>|]+",
            r"\d+(?:[.,]\d+)+",
            r"[A-Za-z_-]*\d[A-Za-z0-9_-]*",
        )
    ).encode()
)
_PIECES = re2.compile(
    rb"(?s).{1,%d}?(?:\n+|[.!?;]\s+|\z)|.{1,%d}\s|.{1,%d}"
    % (MAX_PIECE_BYTES, MAX_PIECE_BYTES, MAX_PIECE_BYTES)
)


class PromptSegment(NamedTuple):
    """Part of a prompt in the order in which templates usually render it: system, tools, messages."""

    kind: SegmentKind
    number: int
    """Number of the tool or the message in the request, from 1."""
    text: bytes
    """Its text in UTF-8, or the description of a tool in JSON."""


class PromptOutline(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Hashes of the pieces of a prompt. Arrays have one item for each piece, or for each masked value."""

    exact: array[int]
    """Hash of each piece. A tool begins with a piece of no bytes, the hash of its JSON as it is spelled."""
    masked: array[int]
    """Hash of each piece after masking."""
    starts: array[int]
    """Weight before each piece, and of the prompt."""
    segment_starts: array[int]
    """Index of the first piece of each segment."""
    segments: tuple[tuple[SegmentKind, int], ...]
    """Kind and number of each segment."""
    mask_pieces: array[int]
    """Index of the piece of each masked value."""
    mask_offsets: array[int]
    """Weight of each masked value's piece before it."""
    mask_kinds: tuple[MaskKind, ...]
    mask_values: array[int]
    """Hash of each masked value."""

    @property
    def total_weight(self) -> int:
        """Weight of the prompt."""
        return self.starts[-1]

    @property
    def memory_bytes(self) -> int:
        """Memory that the outline takes, roughly."""
        return 400 + 24 * len(self.exact) + 24 * len(self.mask_values) + 32 * len(self.segments)

    @property
    def opening(self) -> int:
        """Hash of the first message of a user; 0 if there is none."""
        for index, (kind, _) in enumerate(self.segments):
            if kind == "user":
                start, end = self.segment_range(index)
                return hash(tuple(self.exact[start:end]))
        return 0

    def segment_of(self, piece: int) -> int:
        """Return the index of the segment that a piece belongs to."""
        return bisect_right(self.segment_starts, piece) - 1

    def segment_range(self, segment: int) -> tuple[int, int]:
        """Return the index of a segment's first piece, and that after its last one."""
        starts = self.segment_starts
        end = starts[segment + 1] if segment + 1 < len(starts) else len(self.exact)
        return starts[segment], end

    def masks_of(self, piece: int) -> Iterator[tuple[MaskKind, int, int]]:
        """Yield kind, offset and hash of each masked value of a piece."""
        index = bisect_right(self.mask_pieces, piece - 1)
        while index < len(self.mask_pieces) and self.mask_pieces[index] == piece:
            yield self.mask_kinds[index], self.mask_offsets[index], self.mask_values[index]
            index += 1


def outline_prompt(segments: Sequence[PromptSegment], secret: bytes) -> PromptOutline:
    """Return the outline of a prompt.

    Args:
        segments: Its parts in order. At most `MAX_OUTLINED_BYTES` are divided into pieces.
        secret: Key of the hashes, at most 64 bytes. Outlines are comparable if they have the same one.
    """
    return _Outliner(secret).outline(segments)


def mask_values(text: bytes) -> bytes:
    """Return a text whose dates, times, ids, paths and numbers are masked."""
    masked: bytes = _MASKS.sub(b"\0", text)
    return masked


class _Outliner:
    """Builds the outline of one prompt."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._bytes_left = MAX_OUTLINED_BYTES
        self._exact, self._masked, self._starts = array("Q"), array("Q"), array("Q", [0])
        self._mask_pieces, self._mask_offsets = array("I"), array("I")
        self._mask_kinds = list[MaskKind]()
        self._mask_values = array("Q")

    def outline(self, segments: Sequence[PromptSegment]) -> PromptOutline:
        starts = array("I")
        for segment in segments:
            starts.append(len(self._exact))
            text = segment.text
            if segment.kind == "tool":
                self._add(b"", self._hash(b"json " + text), self._hash(b"json"))
                text = _spell_canonically(text)
            self._add_text(text)
        return PromptOutline(
            self._exact,
            self._masked,
            self._starts,
            starts,
            tuple((kind, number) for kind, number, _ in segments),
            self._mask_pieces,
            self._mask_offsets,
            tuple(self._mask_kinds),
            self._mask_values,
        )

    def _hash(self, content: bytes) -> int:
        digest = hashlib.blake2b(content, key=self._secret, digest_size=HASH_BYTES).digest()
        return int.from_bytes(digest, "little")

    def _add(self, piece: bytes, exact: int, masked: int) -> None:
        self._exact.append(exact)
        self._masked.append(masked)
        self._starts.append(self._starts[-1] + _weigh(piece))

    def _add_text(self, text: bytes) -> None:
        """Add the pieces of a text, none of which ends within a masked value."""
        outlined = text[: self._bytes_left]
        self._bytes_left -= len(outlined)
        masks = islice(_find_masks(outlined), MAX_MASKS)
        mask = next(masks, None)
        start = 0
        for match in _PIECES.finditer(outlined):
            end = match.end()
            if end <= start:
                continue  # a masked value reached beyond it
            if len(self._exact) >= MAX_PIECES:
                break
            found = list[tuple[MaskKind, int, int]]()
            while mask is not None and mask[1] < end:
                found.append(mask)
                end = max(end, mask[2])
                mask = next(masks, None)
            self._add_piece(outlined[start:end], start, found)
            start = end
        if start < len(text):
            rest = text[start:]
            digest = self._hash(rest)
            self._add(rest, digest, digest)

    def _add_piece(self, piece: bytes, start: int, masks: list[tuple[MaskKind, int, int]]) -> None:
        exact = self._hash(piece)
        if not masks:
            self._add(piece, exact, exact)
            return
        parts, position = list[bytes](), 0
        for kind, first, last in masks:
            parts += piece[position : first - start], b"\0%b\0" % kind.encode()
            position = last - start
            self._mask_pieces.append(len(self._exact))
            self._mask_offsets.append(_weigh(piece[: first - start]))
            self._mask_kinds.append(kind)
            self._mask_values.append(self._hash(piece[first - start : position]))
        self._add(piece, exact, self._hash(b"".join([*parts, piece[position:]])))


def _weigh(text: bytes) -> int:
    rest = text.translate(None, _TRIPLE)
    return 3 * len(text) - len(rest) - len(rest.translate(None, _DOUBLE))


def _find_masks(text: bytes) -> Iterator[tuple[MaskKind, int, int]]:
    """Yield kind, start and end of the values in a text that are masked."""
    for match in _MASKS.finditer(text):
        start, end = match.span()
        kind = _MASK_KINDS[match.lastindex - 1]
        if kind == "random_id":
            kind = _classify_word(match.group())
        yield kind, start, end


def _classify_word(word: bytes) -> MaskKind:
    """Return the kind of a word with a digit."""
    if not word.isdigit():
        return "random_id" if len(word) >= MIN_RANDOM_CHARS else "number"
    return "time" if len(word) in _EPOCH_DIGITS and word.startswith(b"1") else "number"


def _spell_canonically(document: bytes) -> bytes:
    """Return a JSON document with sorted keys and no white space; as it is if it is malformed."""
    try:
        decoded: Any = msgspec.json.decode(document)
        return msgspec.json.encode(decoded, order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return document
