"""Compiles grammars without a model's tokenizer, to refuse in the gateway what a replica could not use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from argosy.constraints.library_errors import shorten_error
from argosy.constraints.limits import MAX_GRAMMAR_TEXT_BYTES, PARSER_LIMITS
from argosy.constraints.schema_errors import invalid_grammar

END_OF_TEXT = 256


class _ByteTokenizer:
    """Tokenizer with one token for each byte."""

    eos_token_id = END_OF_TEXT
    bos_token_id: int | None = None
    tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids: Sequence[int] = [END_OF_TEXT]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def check_grammar(text: str, param: str) -> None:
    """Check that a grammar compiles, within limits. No tokenizer is needed, and special tokens may have any name.

    Raises:
        ApiError: 400 with the reason.
    """
    if len(text) > MAX_GRAMMAR_TEXT_BYTES:
        raise invalid_grammar(
            f"The grammar has more than {MAX_GRAMMAR_TEXT_BYTES} bytes. Use fewer or simpler schemas.",
            param,
        )
    error = find_grammar_error(text)
    if error:
        raise invalid_grammar(f"The grammar does not compile. {error}", param)


def find_grammar_error(text: str) -> str:
    """Return why a grammar does not compile, or an empty text."""
    try:
        error = LLMatcher.validate_grammar(text, None, limits=PARSER_LIMITS)
    except ValueError as failure:
        error = str(failure)
    return shorten_error(error) if error and not error.startswith("WARNING") else ""


def find_first_mask_error(text: str) -> str:
    """Return why a grammar allows no first byte, or an empty text. Special tokens must have ids below 257."""
    matcher = LLMatcher(byte_tokenizer(), text, log_level=0, limits=PARSER_LIMITS)
    if not matcher.is_error():
        try:
            matcher.compute_bitmask()
        except ValueError as failure:
            return shorten_error(str(failure))
    error = matcher.get_error()
    return shorten_error(error) if error else ""


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    """Return the tokenizer that checks grammars."""
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer()), slices=[])
