"""Closer of JSON documents: ends an answer within its limit of tokens, so that it can be read."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from argosy.engine.grammar.compiler import CompiledGrammar
from argosy.engine.grammar.token_mask import count_mask_words, has_bit, set_bits

_PREFERRED = (b"}", b"]", b'"', b":", b",", b"0", b"n", b"t", b"f")
"""Tokens that end a document soonest, outside of strings."""
_TEXT = b"z"
"""Token that is allowed in strings alone."""
WINDOW_TOKENS = 48
"""Tokens before the limit from which on the end is computed, which bounds the work. Longer ends are cut."""
_SPARE_TOKENS = 4
"""Tokens before the last possible one at which a list or an object ends instead of a further item."""


class DocumentCloser:
    """Decides when a document has to be closed, and how, by its matcher and the number of tokens that are left.

    Small models repeat themselves within strings until the limit cuts the document. A bound on the length of strings
    would cut good answers too, or would come too late. Instead, the shortest end is forced when no more tokens are left
    than it has. Its last token is then the last one that the limit allows, so that the finish reason is `length`.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._tokenizer = grammar.tokenizer
        ids = grammar.tokenizer.ids_by_byte
        self._preferred = [ids[piece] for piece in _PREFERRED if piece in ids]
        self._ends = {ids[piece] for piece in (b"}", b"]") if piece in ids}
        self._quote_id, self._text_id = ids.get(b'"', -1), ids.get(_TEXT, -1)

    def restrict(self, matcher: LLMatcher, row: NDArray[np.int32], tokens_left: int) -> None:
        """Allow only the next token of the shortest end in the matcher's mask `row`, if it is time to close."""
        if self._text_id < 0 or self._quote_id < 0 or matcher.is_accepting():
            return
        first = self._choose(row)
        if first < 0:
            return
        is_boundary = first in self._ends
        end_len = self._measure_end(matcher, tokens_left)
        if end_len is None or tokens_left > end_len + _SPARE_TOKENS * is_boundary:
            return
        row.fill(0)
        set_bits(row, [first])

    def _measure_end(self, matcher: LLMatcher, limit: int) -> int | None:
        """Return the number of tokens of the shortest end, or None if there are more than `limit`."""
        ahead = matcher.deep_copy()
        row = np.zeros((1, count_mask_words(self._tokenizer.vocab_size)), np.int32)
        for count in range(limit + 1):
            if ahead.is_accepting():
                return count
            fill_next_token_bitmask(ahead, row)
            token = self._choose(row[0])
            if token < 0 or ahead.is_error() or not ahead.consume_token(token):
                return None
        return None

    def _choose(self, row: NDArray[np.int32]) -> int:
        """Return the token of a mask that ends the document soonest, or -1 if there is none."""
        if has_bit(row, self._text_id):
            return self._quote_id if has_bit(row, self._quote_id) else self._text_id
        for token in self._preferred:
            if has_bit(row, token):
                return token
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: self._tokenizer.vocab_size])
        if not allowed.size:
            return -1
        return int(allowed[np.argmax(self._tokenizer.token_sizes[allowed])])
