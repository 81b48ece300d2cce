"""Compiles grammars without a model's tokenizer, to refuse in the gateway what a replica could not use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from argosy.constraints.limits import MAX_GRAMMAR_TEXT_BYTES, PARSER_LIMITS
from argosy.constraints.schema_errors import invalid_grammar

MAX_MESSAGE_CHARACTERS = 200
CROWDED_ROW = re.compile(r"Current row has (\d+) items; max is (\d+)")
SPECIAL_TOKENS = re.compile(r";? ?following special tokens are available:.*")
END_OF_TEXT = 256
OPENINGS = (b"{", b'{"', b"[")


def shorten_error(error: str) -> str:
    """Return a message of llguidance as one bounded line without a dump of the parser's state."""
    lines = [line.strip() for line in error.split("<state>", maxsplit=1)[0].splitlines()]
    message = SPECIAL_TOKENS.sub("", next((line for line in lines if line), "unknown error"))
    if message.endswith("regex parse error:"):
        reasons = [line for line in lines if line.startswith("error:")]
        message = f"{message} {reasons[0].removeprefix('error:').strip()}" if reasons else message
    if row := CROWDED_ROW.search(message):
        message = (
            f"At one place, {row[1]} alternatives are possible; at most {row[2]} are supported"
        )
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + "..."
    return message.rstrip(".") + "."


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
    """Return why a grammar does not compile or get beyond its first bytes, or an empty text.

    A grammar with too many alternatives compiles, and exceeds the limits only after an opening brace or bracket.
    Special tokens are unknown here.
    """
    matcher = LLMatcher(byte_tokenizer(), text, log_level=0, limits=PARSER_LIMITS)
    allowed, error = _find_allowed_bytes(matcher)
    openings = [opening for opening in OPENINGS if opening[0] in allowed]
    for opening in [*openings, *(bytes([byte]) for byte in allowed[:1])]:
        if error:
            break
        branch = matcher.deep_copy()
        if branch.try_consume_tokens(list(opening)) == len(opening) or branch.is_error():
            error = _find_allowed_bytes(branch)[1]
    return shorten_error(error) if error else ""


def _find_allowed_bytes(matcher: LLMatcher) -> tuple[list[int], str]:
    """Return the bytes that may follow, and the error of the matcher."""
    if matcher.is_error():
        return [], matcher.get_error()
    try:
        mask = matcher.compute_bitmask()
    except ValueError as failure:
        return [], str(failure)
    allowed = [byte for byte in range(END_OF_TEXT) if mask[byte >> 3] >> (byte & 7) & 1]
    return allowed, matcher.get_error()


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    """Return the tokenizer that checks grammars."""
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer()), slices=[])
