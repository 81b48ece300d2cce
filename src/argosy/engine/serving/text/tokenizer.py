"""Tokenizer of a checkpoint: text to token ids, and token ids to bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import tokenizers

from argosy.engine.serving.text.byte_level_bpe import BYTE_ALPHABET
from argosy.engine.serving.text.checkpoint_files import (
    add_declared_tokens,
    read_json_object,
    read_special_tokens,
)
from argosy.engine.serving.text.gguf_text import load_gguf_tokenizer
from argosy.engine.serving.text.tokenizer_check import check_tokenizer
from argosy.engine.serving.text.tokenizer_files import load_backend

MAX_TOKEN_IDS = 1 << 24
"""Size of a vocabulary above which its file is damaged. No model comes near it."""


class EncodedInput(NamedTuple):
    """Token ids of a text or of a pair of texts."""

    token_ids: list[int]
    second_text_start: int | None
    """Position at which the second text begins, if the tokenizer marks it."""


class Tokenizer:
    """A Hugging Face `tokenizer.json` whose decoding is plain concatenation of bytes.

    Every token stands for a fixed byte string (`token_bytes`). The text of a sequence is the concatenation of those
    bytes, decoded as UTF-8. This holds for byte-level BPE and for SentencePiece-style vocabularies with byte fallback.
    Text therefore never depends on later tokens, which makes streaming exact. Loading rejects other decoders. Immutable
    and thread-safe.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Iterable[int] = ()) -> None:
        """Take over the backend.

        Raises:
            ValueError: Its format is not supported, or its vocabulary is too large.
        """
        vocabulary = backend.get_vocab(with_added_tokens=True)
        num_ids = max(vocabulary.values(), default=-1) + 1
        if num_ids > MAX_TOKEN_IDS:  # the library would allocate memory for all of them
            raise ValueError(
                f"a token of the tokenizer has the id {num_ids - 1}; its file is damaged, fetch the model again"
            )
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        definition = backend.to_str()
        self.digest = hashlib.sha256(definition.encode()).hexdigest()
        """SHA-256 of the tokenizer's definition. Equal for tokenizers that encode alike."""
        decoded = msgspec.json.decode(definition)
        self.has_known_patterns = check_tokenizer(decoded)
        """Whether short texts are encoded at once. Another pattern may be slow for a text that was not tried."""
        to_bytes, self._leading_spaces = _build_decoder(decoded.get("decoder"))
        self._pieces = [b""] * num_ids
        for token, token_id in vocabulary.items():
            self._pieces[token_id] = to_bytes(token)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids of the special tokens, which `skip_special_tokens` leaves out of the text."""
        self._added_ids = {token.content: i for i, token in added.items()}
        self._visible_pieces = [
            b"" if i in self.special_ids else p for i, p in enumerate(self._pieces)
        ]
        self.eos_token_ids = sorted(set(eos_token_ids))
        """Ids of the tokens that end a generation."""
        self.max_token_chars = max((len(_decode_utf8(p)) for p in self._pieces), default=1)
        """Length of the longest token in characters."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the tokenizer of the checkpoint directory or GGUF file `path`, with the tokens that other files declare.

        Raises:
            ValueError: There is no tokenizer, its format is not supported, or it does not fit the model or the other
                files.
        """
        if path.is_file():
            return cls(*load_gguf_tokenizer(path))
        backend = load_backend(path)
        embedded_tokens = _read_vocab_size(path)
        _check_vocabulary(path, backend, embedded_tokens)
        add_declared_tokens(path, backend, embedded_tokens)
        return cls(backend, _read_eos_token_ids(path, backend))

    @property
    def vocab_size(self) -> int:
        """The largest token id plus 1, added tokens included."""
        return len(self._pieces)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the added tokens, special or not. Each is encoded as a whole wherever its text occurs."""
        return frozenset(self._added_ids.values())

    def has_added_token(self, text: str) -> bool:
        """Return whether there is an added token with this text."""
        return text in self._added_ids

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token with this text, or None if there is none."""
        return self._added_ids.get(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 - Hugging Face's signature
        """Encode `text` to token ids.

        Uses the batch call because that releases the GIL and the library's single-text `encode` does not.

        Raises:
            ValueError: `text` is not valid Unicode (a lone surrogate), or the library fails on it.
        """
        try:
            (encoded,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            _raise_encoding_error(error)
            raise
        ids: list[int] = encoded.ids
        return ids

    def encode_input(
        self,
        text: str,
        second_text: str | None = None,
        *,
        max_tokens: int | None = None,
        max_text_tokens: tuple[int | None, int | None] = (None, None),
        keeps_end: bool = False,
    ) -> EncodedInput:
        """Encode a text, or a pair of texts, with the special tokens that an encoder was trained with.

        Args:
            text: The text.
            second_text: Second text of a pair.
            max_tokens: Limit of the result, to which the longer text is truncated first. None does not truncate.
            max_text_tokens: Limit of each text, without special tokens.
            keeps_end: Whether truncated texts keep their ends, and not their beginnings.

        Raises:
            ValueError: A text is not valid Unicode (a lone surrogate), or the library fails on it.
        """
        texts = [text] if second_text is None else [text, second_text]
        try:
            parts = self._backend.encode_batch(texts, add_special_tokens=False)
        except BaseException as error:
            _raise_encoding_error(error)
            raise
        limits = [
            len(part) if limit is None else min(limit, len(part))
            for part, limit in zip(parts, max_text_tokens, strict=False)
        ]
        if max_tokens is not None:
            num_special = self._backend.num_special_tokens_to_add(second_text is not None)
            limits = _truncate_longest_first(limits, max(0, max_tokens - num_special))
        for part, limit in zip(parts, limits, strict=True):
            part.truncate(limit, direction="left" if keeps_end else "right")
        second = parts[1] if second_text is not None else None
        encoding = self._backend.post_process(parts[0], second, add_special_tokens=True)
        types: list[int] = encoding.type_ids
        return EncodedInput(encoding.ids, types.index(1) if 1 in types else None)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:  # noqa: FBT001, FBT002 - Hugging Face's signature
        """Decode a whole sequence. Invalid UTF-8 becomes U+FFFD, and unknown ids are ignored."""
        text = _decode_utf8(
            b"".join(map(self.token_decoder(skip_special_tokens=skip_special_tokens), ids))
        )
        for _ in range(self._leading_spaces):
            text = text.removeprefix(" ")
        return text

    def token_decoder(self, *, skip_special_tokens: bool) -> Callable[[int], bytes]:
        """Return the function from token id to bytes. Skipped special tokens map to no bytes.

        Unlike `decode`, the function keeps the space that a SentencePiece tokenizer puts before a text. Use it to
        continue a text, where that space separates two words.
        """
        table = self._visible_pieces if skip_special_tokens else self._pieces

        def decode_token(token_id: int) -> bytes:
            return table[token_id] if 0 <= token_id < len(table) else b""

        return decode_token

    def vocabulary_token(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it, such as `Ġis`. Empty for ids without a token."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special tokens by name. They may be part of a UTF-8 character."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for an incomplete character."""
        return _decode_utf8(self.token_bytes(token_id))


def _raise_encoding_error(error: BaseException) -> None:
    """Raise ValueError for an error of the library. Its panics are no Exceptions, so no caller expects them."""
    if isinstance(error, (UnicodeError, TypeError)):
        raise ValueError(f"the text is not valid Unicode: {error}") from error  # noqa: TRY004
    if type(error).__module__ == "pyo3_runtime":
        raise ValueError(f"the tokenizer of the model fails on the text: {error}") from error


def _read_vocab_size(path: Path) -> int | None:
    """Return the rows of the model's embedding, or None if config.json leaves them to its family's default."""
    config = read_json_object(path / "config.json")
    text_config = config.get("text_config")
    config |= text_config if isinstance(text_config, dict) else {}
    vocab_size = config.get("vocab_size")
    return vocab_size if isinstance(vocab_size, int) else None


def _check_vocabulary(
    path: Path, backend: tokenizers.Tokenizer, embedded_tokens: int | None
) -> None:
    """Raise ValueError if ordinary text may give ids that the model does not have.

    Added tokens without a row in the embedding are common and harmless, because only their own text gives them.
    """
    count = max(backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    if embedded_tokens is not None and count > embedded_tokens:
        raise ValueError(
            f"the tokenizer of {path} has the id {count - 1}, but vocab_size of config.json is {embedded_tokens}; "
            "the tokenizer belongs to another model"
        )


def _read_eos_token_ids(path: Path, backend: tokenizers.Tokenizer) -> list[int]:
    """Return every end-of-sequence id that the checkpoint's files name."""
    config = read_json_object(path / "config.json")
    sources = [
        read_json_object(path / "generation_config.json"),
        config,
        config.get("text_config") or {},
    ]
    ids: list[int] = []
    for source in sources:
        match source.get("eos_token_id"):
            case int(eos_id):
                ids.append(eos_id)
            case list(eos_ids):
                ids.extend(i for i in eos_ids if isinstance(i, int))
    if max(ids, default=0) >= MAX_TOKEN_IDS:
        raise ValueError(
            f"{path}: eos_token_id is {max(ids)}, but no vocabulary has that id; fetch the model again"
        )
    eos_token = read_special_tokens(path).get("eos_token")
    if eos_token is not None and (token_id := backend.token_to_id(eos_token)) is not None:
        ids.append(token_id)
    return ids


def _truncate_longest_first(lengths: list[int], max_tokens: int) -> list[int]:
    """Return the lengths of one or two texts after truncation to `max_tokens` together, as the library does."""
    if sum(lengths) <= max_tokens:
        return lengths
    if len(lengths) == 1:
        return [max_tokens]
    shorter, _ = sorted(lengths)
    longer = shorter if shorter > max_tokens else max(shorter, max_tokens - shorter)
    if shorter + longer > max_tokens:
        shorter = max_tokens // 2
        longer = max_tokens - shorter
    return [longer, shorter] if lengths[0] > lengths[1] else [shorter, longer]


def _decode_utf8(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# --- decoders: combine the steps of tokenizer.json into one function from token to bytes ---------

_DecodeStep = Callable[[str | bytes], str | bytes]


def _build_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """Build the function from a vocabulary token to its bytes.

    Supports only steps that act on each token alone, and a Strip of the fused text.

    Returns:
        The function, and the number of leading spaces to remove from a decoded text.
    """
    steps: list[_DecodeStep] = []
    leading_spaces = 0
    fused = False
    for step in _flatten_steps(decoder):
        match step:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteLevel"}:
                steps.append(_decode_byte_level)
            case {"type": "ByteFallback"}:
                steps.append(_decode_byte_fallback)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                steps.append(_replace_step(old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                steps.append(_replace_step(mark, " "))
                leading_spaces = 0 if step.get("prepend_scheme") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                leading_spaces = start
            case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
                steps.append(_word_piece_step(prefix, cleanup=cleanup))
                leading_spaces = 1
            case _:
                raise ValueError(
                    f"the decoder {step} of tokenizer.json is not supported; supported are ByteLevel, "
                    "Metaspace, WordPiece, ByteFallback, Fuse, Replace of a string and Strip of leading spaces"
                )

    def to_bytes(token: str) -> bytes:
        piece: str | bytes = token
        for step in steps:
            piece = step(piece)
        return piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece

    return to_bytes, leading_spaces


def _flatten_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    match decoder:
        case None:
            return []
        case {"type": "Sequence", "decoders": list(steps)}:
            return [flat for step in steps for flat in _flatten_steps(step)]
        case _:
            return [decoder]


def _replace_step(old: str, new: str) -> _DecodeStep:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


_WORD_PIECE_CLEANUP = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    *((" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't")),
    *((" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)


def _word_piece_step(prefix: str, *, cleanup: bool) -> _DecodeStep:
    """Put a space before each token, but for continuations of a word, which have the prefix, and punctuation."""

    def decode(piece: str | bytes) -> str | bytes:
        if not isinstance(piece, str):
            return piece
        text = piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
        for old, new in _WORD_PIECE_CLEANUP if cleanup else ():
            text = text.replace(old, new)
        return text

    return decode


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _decode_byte_fallback(piece: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes.fromhex(match[1]) if match else piece


_BYTE_BY_CHARACTER = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}


def _decode_byte_level(piece: str | bytes) -> str | bytes:
    """Return the bytes that a byte-level token spells. Any other text (an added token) is returned unchanged."""
    if isinstance(piece, bytes):
        return piece
    try:
        return bytes([_BYTE_BY_CHARACTER[character] for character in piece])
    except KeyError:
        return piece
