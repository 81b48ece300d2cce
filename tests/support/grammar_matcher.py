"""Runs grammars with a token for each byte and for markers: acceptance of outputs and texts, and random answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from argosy.constraints import PARSER_LIMITS
from argosy.engine.serving.output_parsing import MarkerToken, OutputFormat, Piece

END = 256
_FIRST_MARKER = 257


class _ByteTokenizer:
    """Tokenizer with a token for each byte, an end token, and special tokens behind them."""

    def __init__(self, markers: Sequence[str]) -> None:
        texts = ["<end>", *markers]
        self.tokens = [bytes([byte]) for byte in range(END)] + [text.encode() for text in texts]
        self.eos_token_id = END
        self.bos_token_id = None
        self.special_token_ids = list(range(END, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class GrammarMatcher:
    """Compiler and matcher of grammars for the markers of one format."""

    def __init__(self, output_format: OutputFormat) -> None:
        markers = sorted(output_format.vocabulary)
        self._ids = {text: _FIRST_MARKER + index for index, text in enumerate(markers)}
        self._tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokenizer(markers)))

    def marker_id(self, text: str) -> int | None:
        """Return the id of a marker, or None if it is no special token."""
        return self._ids.get(text)

    def accepts(self, grammar: str, pieces: Iterable[Piece]) -> bool:
        """Return whether an output satisfies a grammar from its beginning to its end."""
        return self.match(grammar, pieces) == ""

    def match(self, grammar: str, pieces: Iterable[Piece]) -> str:
        """Return the text that a grammar does not accept, "<end>" if more is missing, or an empty string."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        for piece in pieces:
            tokens += (
                [self._ids[piece.text]] if isinstance(piece, MarkerToken) else list(piece.encode())
            )
        valid = matcher.validate_tokens(tokens)
        if valid < len(tokens):
            return self._tokenizer.decode_str(tokens[valid : valid + 20])
        matcher.consume_tokens(tokens)
        return "" if matcher.is_accepting() else "<end>"


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer(())), slices=[])


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
