"""Runs grammars with a tokenizer of one token for each byte: acceptance of texts, and random answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from argosy.constraints import PARSER_LIMITS

END = 256


class ByteVocabulary:
    """Vocabulary of the 256 bytes and an end token."""

    eos_token_id = END
    bos_token_id: int | None = None
    tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids: Sequence[int] = [END]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])


def new_matcher(grammar_text: str) -> LLMatcher:
    """Return a matcher. Fails if the grammar does not compile."""
    matcher = LLMatcher(byte_tokenizer(), grammar_text, log_level=0, limits=PARSER_LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar_text: str, text: str) -> bool:
    """Return whether the grammar accepts the whole text."""
    matcher = new_matcher(grammar_text)
    content = list(text.encode("utf-8", "surrogatepass"))
    return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()


def allowed_bytes(matcher: LLMatcher) -> list[int]:
    """Return the tokens that may follow, the end included."""
    mask = matcher.compute_bitmask()
    return [token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1]


def generate_text(grammar_text: str, rng: random.Random, max_bytes: int = 400) -> str | None:
    """Return the text of a random walk under the mask, or None if it does not end within `max_bytes`.

    Bytes that end strings, arrays and objects are preferred, the more the longer the text is.
    """
    matcher = new_matcher(grammar_text)
    output = bytearray()
    while len(output) < max_bytes:
        allowed = allowed_bytes(matcher)
        if not allowed or (END in allowed and not matcher.is_accepting()):
            raise AssertionError(f"dead end after {bytes(output)!r}: {matcher.get_error()}")
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return output.decode()
        allowed = [token for token in allowed if token != END]
        closing = [token for token in allowed if token in b'"]}']
        is_late = rng.random() < 0.1 + len(output) / max_bytes
        token = rng.choice(closing if closing and is_late else allowed)
        assert matcher.consume_token(token)
        output.append(token)
    return None
