"""Matcher of llguidance over single bytes and special tokens, without a model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from argosy.engine.serving.output_parsing import MarkerToken, OutputFormat, Piece

_FIRST_MARKER = 257
_EOS = 256


class _ByteTokenizer:
    """Tokenizer with a token for each byte, and special tokens behind them."""

    def __init__(self, markers: Sequence[str]) -> None:
        texts = ["<eos>", *markers]
        self.tokens = [bytes([byte]) for byte in range(_EOS)] + [text.encode() for text in texts]
        self.eos_token_id = _EOS
        self.bos_token_id = None
        self.special_token_ids = list(range(_EOS, len(self.tokens)))

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
