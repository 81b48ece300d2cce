"""Reader of SentencePiece models (Kudo & Richardson 2018), and builder of tokenizers from their pieces."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from argosy.engine.serving.text.byte_level_bpe import (
    MAX_TOKEN_BYTES,
    SpecialToken,
    add_special_tokens,
    set_bos,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SPACE = "\u2581"
_MAX_VARINT_BYTES = 10


class PieceType(IntEnum):
    """Type of a piece, with the numbers of SentencePiece and of GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
    """VocabularyPiece of a vocabulary, whose id is its position."""

    text: str
    score: float
    type: int


@dataclass(slots=True)
class SentencePieceModel:
    """Vocabulary and settings of a SentencePiece model."""

    pieces: list[VocabularyPiece] = field(default_factory=list)
    is_unigram: bool = True
    has_byte_fallback: bool = False
    adds_prefix_space: bool = True
    removes_extra_spaces: bool = True
    character_map: bytes = b""
    """Normalization of characters, in SentencePiece's compiled form."""


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Parse the protocol buffer `ModelProto`.

    Raises:
        ValueError: The data is damaged or something else.
    """
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            text, score, kind = piece.get(1), piece.get(2, 0.0), piece.get(3, PieceType.NORMAL)
            if not isinstance(text, bytes) or not isinstance(kind, int):
                raise ValueError("a piece has no text")
            model.pieces.append(VocabularyPiece(text.decode(), float(score), kind))
        elif number == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
            model.is_unigram = trainer.get(3, 1) == 1
            model.has_byte_fallback = bool(trainer.get(35, 0))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
            model.adds_prefix_space = bool(normalizer.get(3, 1))
            model.removes_extra_spaces = bool(normalizer.get(4, 1))
            character_map = normalizer.get(2, b"")
            model.character_map = character_map if isinstance(character_map, bytes) else b""
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of each field of a message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire_type == 2:
            size, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}.get(wire_type, -1)
        if size < 0 or position + size > len(data):
            raise ValueError("it is not a SentencePiece model, or it is damaged")
        chunk = data[position : position + size]
        position += size
        yield key >> 3, struct.unpack("<f", chunk)[0] if wire_type == 5 else chunk


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer of seven bits a byte, and the position after it."""
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, position
    raise ValueError("it is not a SentencePiece model, or it is damaged")


def build_sentencepiece(
    model: SentencePieceModel,
    specials: Sequence[SpecialToken] = (),
    bos: SpecialToken | None = None,
    *,
    prefix_after_specials: bool = True,
) -> Tokenizer:
    """Build a tokenizer of a SentencePiece model.

    Args:
        model: The model.
        specials: Special tokens beside the model's own.
        bos: Token that starts each text.
        prefix_after_specials: Whether the prefix space is also added after special tokens.

    Raises:
        ValueError: The vocabulary is not usable.
    """
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise ValueError("two pieces have the same text")
    vocabulary |= {special.text: special.token_id for special in specials}
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError("two tokens have the same id")
    try:
        tokenizer = Tokenizer(_build_model(model, vocabulary))
    except Exception as error:  # the library raises its base class
        raise ValueError(f"the vocabulary is not usable ({error})") from error
    _set_spaces(tokenizer, model, prefix_after_specials=prefix_after_specials)
    for piece in model.pieces:
        if piece.type in (PieceType.CONTROL, PieceType.USER_DEFINED, PieceType.UNKNOWN):
            added = AddedToken(
                piece.text,
                normalized=_SPACE in piece.text and not model.adds_prefix_space,
                special=piece.type != PieceType.USER_DEFINED,
            )
            is_special = piece.type != PieceType.USER_DEFINED
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([added])
    add_special_tokens(tokenizer, specials)
    set_bos(tokenizer, bos)
    return tokenizer


def _build_model(model: SentencePieceModel, vocabulary: dict[str, int]) -> BPE | Unigram:
    unknown = next(
        (index for index, piece in enumerate(model.pieces) if piece.type == PieceType.UNKNOWN), None
    )
    if model.is_unigram:
        texts = {index: text for text, index in vocabulary.items()}
        if sorted(texts) != list(range(len(texts))):
            raise ValueError("the ids of special tokens leave gaps")
        scores = [piece.score for piece in model.pieces] + [0.0] * (len(texts) - len(model.pieces))
        pairs = [(texts[index], score) for index, score in enumerate(scores)]
        return Unigram(pairs, unk_id=unknown, byte_fallback=model.has_byte_fallback)
    return BPE(
        vocabulary,
        _find_merges(model),
        unk_token=None if unknown is None else model.pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=model.has_byte_fallback,
    )


def _find_merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best score of the result first."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.type == PieceType.NORMAL}
    longest = max(map(len, scores), default=0)
    if longest > MAX_TOKEN_BYTES:
        raise ValueError(f"a token has {longest} characters")
    merges = []
    for text, score in scores.items():
        for middle in range(1, len(text)):
            left, right = text[:middle], text[middle:]
            if left in scores and right in scores:
                merges.append((-score, len(left), left, right))
    return [(left, right) for _, _, left, right in sorted(merges)]


def _set_spaces(
    tokenizer: Tokenizer, model: SentencePieceModel, *, prefix_after_specials: bool
) -> None:
    """Set how spaces are written in pieces, and read back."""
    steps: list[normalizers.Normalizer] = []
    if model.character_map:
        steps.append(normalizers.Precompiled(model.character_map))
    if model.removes_extra_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    adds_first = model.adds_prefix_space and not prefix_after_specials
    if model.adds_prefix_space and not adds_first:
        steps.append(normalizers.Prepend(_SPACE))
    if adds_first or model.is_unigram:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE,
            prepend_scheme="first" if adds_first else "never",
            split=model.is_unigram,
        )
    else:
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    decoding: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if model.adds_prefix_space:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
