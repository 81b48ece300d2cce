"""Incremental detokenizer that holds back text which may be the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from argosy.engine.reasoning_gate import ReasoningGate
from argosy.engine.serving.output_parsing import MarkerToken, Piece
from argosy.engine.serving.text.stop_string_matcher import stop_string_matcher
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import SamplingParams

_utf8 = codecs.getincrementaldecoder("utf-8")
_NO_MARKERS: Mapping[int, str] = MappingProxyType({})


class Detokenizer:
    """Text of one choice, built token by token.

    The text returned for a prefix of tokens depends only on those tokens, not on how they were grouped into calls.
    Resumed tokens are replayed without output. The text that follows is exactly what an uninterrupted stream would have
    returned after them.

    Held back are bytes of an incomplete UTF-8 character, and text that may be the beginning of a stop string. The cost
    per token does not depend on the length of the text.

    Among several stop strings, the one that ends first counts. Stop strings that end within the first `min_tokens`
    tokens, or inside a reasoning block, do not count. The end-of-sequence or stop token that ends a generation has no
    text unless `include_stop_str_in_output` is set.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        resumed_tokens: list[int],
        markers: Mapping[int, str] = _NO_MARKERS,
    ) -> None:
        """Create a detokenizer and replay the resumed tokens.

        Args:
            tokenizer: Tokenizer of the model.
            params: Sampling parameters with the stop conditions.
            resumed_tokens: Tokens whose text the client has.
            markers: Text of each special token that is returned as a `MarkerToken`. No stop string spans a marker.
        """
        self._token_to_bytes = tokenizer.token_decoder(
            skip_special_tokens=params.skip_special_tokens
        )
        self._hidden_token_ids: frozenset[int] = frozenset()
        if not params.include_stop_str_in_output:
            eos = () if params.ignore_eos else tokenizer.eos_token_ids
            self._hidden_token_ids = frozenset((*eos, *params.stop_token_ids))
        self._include_stop_string = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._decoder = _utf8("replace")
        self._stop_matcher = stop_string_matcher(params.stop) if params.stop else None
        self._stop_state = 0
        self._held_back_text = ""
        self._token_count = 0
        self._stop_string: str | None = None
        self._markers = markers
        self._reasoning = None if params.reasoning is None else ReasoningGate(params.reasoning)
        self.push(resumed_tokens)

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the text, or None."""
        return self._stop_string

    def push(self, token_ids: Iterable[int]) -> tuple[list[Piece], int]:
        """Add tokens.

        Returns:
            Text and markers that can be sent now, and the number of tokens that belong to the choice. Those after a
            stop string do not.
        """
        pieces: list[Piece] = []
        used = 0
        for token_id in token_ids:
            if self._stop_string is not None:
                break
            used += 1
            self._token_count += 1
            in_reasoning = self._reasoning is not None and self._reasoning.accept(token_id)
            if token_id in self._hidden_token_ids:
                continue
            marker = self._markers.get(token_id)
            if marker is not None:
                pieces += (self.flush(), MarkerToken(marker))
                self._stop_state = 0
                continue
            text = self._decoder.decode(self._token_to_bytes(token_id))
            pieces.append(text if in_reasoning else self._append_text(text))
        return pieces, used

    def flush(self) -> str:
        """Return the text that is held back. An incomplete character becomes U+FFFD."""
        rest = (
            ""
            if self._stop_string is not None
            else self._held_back_text + self._decoder.decode(b"", final=True)
        )
        self._held_back_text = ""
        return rest

    def _append_text(self, text: str) -> str:
        """Add decoded text and return the part that can be sent."""
        if self._stop_matcher is None or not text:
            return text
        match = None
        if self._token_count <= self._min_tokens:
            self._stop_state = self._stop_matcher.skip(self._stop_state, text)
        else:
            self._stop_state, match = self._stop_matcher.scan(self._stop_state, text)
        if match is None:
            held_chars = self._stop_matcher.held_chars(self._stop_state)
            text = self._held_back_text + text
            self._held_back_text = text[len(text) - held_chars :]
            return text[: len(text) - held_chars]
        self._stop_string = match.stop_string
        end = len(self._held_back_text) + match.end
        if not self._include_stop_string:
            end -= len(match.stop_string)
        text = self._held_back_text + text
        self._held_back_text = ""
        return text[:end]
