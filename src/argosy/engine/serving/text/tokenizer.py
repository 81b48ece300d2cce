"""The tokenizer of a checkpoint: text to token ids, and ids to the bytes they stand for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import msgspec
import tokenizers

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """A Hugging Face `tokenizer.json` whose decoding is plain concatenation of bytes.

    Every token stands for a fixed byte string (`token_bytes`), and the text of a sequence is those
    bytes read as UTF-8. That holds for byte-level BPE and for SentencePiece-style vocabularies with
    byte fallback, and it is what makes streaming exact: text never depends on tokens to come. Other
    decoders are refused when loading. Instances are immutable and may be used from many threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Iterable[int] = ()) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        definition = backend.to_str()
        self.digest = hashlib.sha256(definition.encode()).hexdigest()
        """Equal for tokenizers that read alike."""
        decoder = msgspec.json.decode(definition).get("decoder")
        to_bytes, self._leading_spaces = _build_decoder(decoder)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            self._pieces[token_id] = to_bytes(token)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._visible_pieces = [
            b"" if i in self._special_ids else p for i, p in enumerate(self._pieces)
        ]
        self.eos_token_ids = sorted(set(eos_token_ids))
        """Ids that end a generation."""
        self.max_token_chars = max((len(_decode_utf8(p)) for p in self._pieces), default=1)
        """Characters of the longest token."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tokenizer of the checkpoint directory `path`; ValueError when it has none we know."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{path} has no tokenizer.json; write one with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(f"{file} cannot be read ({error}); download it again") from error
        return cls(backend, _read_eos_token_ids(path, backend))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return len(self._pieces)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens: those that `skip_special_tokens` leaves out of the text."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 - as Hugging Face's
        """Token ids of `text`; ValueError when it is no valid Unicode (a lone surrogate).

        Other threads go on meanwhile, which the library's `encode` of one text does not let them.
        """
        try:
            (encoded,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (UnicodeError, TypeError) as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from error
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:  # noqa: FBT001, FBT002 - as Hugging Face's
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text = _decode_utf8(
            b"".join(map(self.token_decoder(skip_special_tokens=skip_special_tokens), ids))
        )
        for _ in range(self._leading_spaces):
            text = text.removeprefix(" ")
        return text

    def token_decoder(self, *, skip_special_tokens: bool) -> Callable[[int], bytes]:
        """The function from id to bytes, special tokens giving none when skipped.

        Unlike `decode` it keeps the space that a SentencePiece tokenizer puts before a text: it is
        for continuing a text, where that space is the one between two words.
        """
        table = self._visible_pieces if skip_special_tokens else self._pieces

        def piece(token_id: int) -> bytes:
            return table[token_id] if 0 <= token_id < len(table) else b""

        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens by name; may be part of a UTF-8 character."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, U+FFFD where they are no complete character."""
        return _decode_utf8(self.token_bytes(token_id))


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, empty without such a file; ValueError for anything else."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON object ({error}); download it again") from error


def read_special_tokens(path: Path) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token`, ...) of a checkpoint directory."""
    named = read_json_object(path / "special_tokens_map.json") | read_json_object(
        path / "tokenizer_config.json"
    )
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        match named.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
    return found


def _read_eos_token_ids(path: Path, backend: tokenizers.Tokenizer) -> list[int]:
    """Every end-of-sequence id that the checkpoint's files name."""
    config = read_json_object(path / "config.json")
    sources = [
        read_json_object(path / "generation_config.json"),
        config,
        config.get("text_config") or {},
    ]
    ids: list[int] = []
    for source in sources:
        match source.get("eos_token_id"):
            case int(one):
                ids.append(one)
            case list(many):
                ids.extend(i for i in many if isinstance(i, int))
    named = read_special_tokens(path).get("eos_token")
    if named is not None and (token_id := backend.token_to_id(named)) is not None:
        ids.append(token_id)
    return ids


def _decode_utf8(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# --- decoders: from the steps that tokenizer.json lists to one function, token -> bytes ----------

_DecodeStep = Callable[[str | bytes], str | bytes]


def _build_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """The bytes of a token as the vocabulary spells it, and the leading spaces to take off a text.

    Only steps that act on each token alone are known, and a Strip of the fused text.
    """
    steps: list[_DecodeStep] = []
    lead_spaces = 0
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
                lead_spaces = 0 if step.get("prepend_scheme") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                lead_spaces = start
            case _:
                raise ValueError(
                    f"the decoder {step} of tokenizer.json is not supported; known are ByteLevel, "
                    "Metaspace, ByteFallback, Fuse, Replace of a string and Strip of leading spaces"
                )

    def to_bytes(token: str) -> bytes:
        piece: str | bytes = token
        for step in steps:
            piece = step(piece)
        return piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece

    return to_bytes, lead_spaces


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


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _decode_byte_fallback(piece: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes.fromhex(match[1]) if match else piece


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's spelling of bytes as printable characters, as a table from character to byte.

    Printable bytes of Latin-1 are themselves, the others follow from U+0100. A character of Latin-1
    that spells no byte maps outside Latin-1, so that encoding it fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = dict.fromkeys(others, 0xFFFF)
    return table | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _decode_byte_level(piece: str | bytes) -> str | bytes:
    """The bytes that a byte-level token spells; any other text (an added token) stays as it is."""
    if isinstance(piece, bytes):
        return piece
    try:
        return piece.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return piece
