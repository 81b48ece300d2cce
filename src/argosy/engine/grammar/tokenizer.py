"""Conversion of a tokenizer for llguidance, so that masks agree byte for byte with the detokenized output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from argosy.engine.grammar.token_mask import build_mask

END_TOKEN_NAME = b"<|end-of-grammar|>"
"""Name of the token id that stands for the end of the output in masks. It is no token of the model."""
MAX_CACHED_ENCODINGS = 4096
"""Number of forced texts, such as `": "`, whose tokens are kept."""


class TokenTable(Protocol):
    """Properties of a tokenizer that the conversion requires."""

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that were added to the vocabulary, special or not."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or no bytes for an unknown id."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 - Hugging Face's signature
        """Encode `text` to token ids."""
        ...


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """Tokenizer in the format of llguidance. Thread-safe."""

    native: LLTokenizer
    vocab_size: int
    """Vocabulary size of the model. The id `vocab_size` stands for the end of the output in masks."""
    added_ids: frozenset[int]
    """Ids that text never contains. A grammar allows them only by name."""
    token_mask: NDArray[np.int32]
    """Mask of the ids that are tokens, without the padding of the model's vocabulary. Do not modify it."""


def build_grammar_tokenizer(tokenizer: TokenTable, vocab_size: int) -> GrammarTokenizer:
    """Convert `tokenizer` for a model with `vocab_size` logits. Takes about a second for 150,000 tokens.

    Every added token counts as special, so that a text or a JSON string never contains it. Padding ids of the model's
    vocabulary have no bytes and are never allowed. The end of the output has an id of its own, because a model may have
    several end-of-sequence ids, and a grammar may name one of them.
    """
    added_ids = frozenset(i for i in tokenizer.added_ids if i < vocab_size)
    adapter = _TokenizerAdapter(tokenizer, vocab_size, added_ids)
    native = LLTokenizer(TokenizerWrapper(adapter))
    adapter.native = native
    has_bytes = np.array([bool(piece) for piece in adapter.tokens[:vocab_size]], bool)
    return GrammarTokenizer(native, vocab_size, added_ids, build_mask(has_bytes))


class _TokenizerAdapter:
    """Object with the attributes that `llguidance.TokenizerWrapper` reads. It encodes texts that a grammar forces."""

    bos_token_id = None

    def __init__(self, tokenizer: TokenTable, vocab_size: int, added_ids: frozenset[int]) -> None:
        self.eos_token_id = vocab_size
        self.tokens: Sequence[bytes] = [
            *(tokenizer.token_bytes(token_id) for token_id in range(vocab_size)),
            END_TOKEN_NAME,
        ]
        self.special_token_ids = [*sorted(added_ids), vocab_size]
        self.native: LLTokenizer | None = None
        self._tokenizer = tokenizer
        self._added_ids = added_ids
        self._encode_cached = lru_cache(MAX_CACHED_ENCODINGS)(self._encode)

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode a text as the model's training data was encoded, if that spells exactly the text."""
        return list(self._encode_cached(text.decode() if isinstance(text, bytes) else text))

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, False)  # noqa: FBT003 - Hugging Face's signature
        spelled = b"".join(
            b"" if i in self._added_ids or i >= self.eos_token_id else self.tokens[i] for i in ids
        )
        if spelled == text.encode():
            return tuple(ids)
        # A SentencePiece tokenizer puts a space before the text, and an added token's name may occur in the text.
        return tuple(self.native.greedy_tokenize(text)) if self.native is not None else ()
