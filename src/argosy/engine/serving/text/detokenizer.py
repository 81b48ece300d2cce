"""Turns tokens into text as they come, and leaks nothing that a stop string may cut off."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from argosy.engine.serving.text.stop_string_matcher import stop_string_matcher
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import SamplingParams

_utf8 = codecs.getincrementaldecoder("utf-8")


class TextDelta(NamedTuple):
    """What some tokens added to the text."""

    text: str
    """Safe to send now."""
    used_tokens: int
    """How many of the pushed tokens belong to the choice; fewer than pushed after a stop string."""
    stop_string: str | None
    """The stop string that ended the text."""


class Detokenizer:
    """The text of one choice, built token by token.

    What has been given out after any tokens is a function of those tokens alone, however they
    were grouped: tokens already generated (`resumed`) are replayed silently, and what follows is
    exactly what the undisturbed stream would have given after them. Held back are bytes that are
    no complete UTF-8 character yet and text that may be the beginning of a stop string; the cost
    per token is independent of the length of the text. Of several stop strings the one that ends
    first counts; those that end within the first `min_tokens` tokens do not. The end-of-sequence
    or stop token that ends a generation has no text unless `include_stop_str_in_output`.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, resumed_tokens: list[int]
    ) -> None:
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
        self.push(resumed_tokens)

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        return self._stop_string

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Add tokens; after a stop string nothing more is taken."""
        texts = []
        used = 0
        for token_id in token_ids:
            if self._stop_string is not None:
                break
            used += 1
            self._token_count += 1
            if token_id not in self._hidden_token_ids:
                texts.append(
                    self._append_text(self._decoder.decode(self._token_to_bytes(token_id)))
                )
        return TextDelta("".join(texts), used, self._stop_string)

    def flush(self) -> str:
        """The rest of the text once no more tokens come; half a character becomes U+FFFD."""
        rest = (
            ""
            if self._stop_string is not None
            else self._held_back_text + self._decoder.decode(b"", final=True)
        )
        self._held_back_text = ""
        return rest

    def _append_text(self, text: str) -> str:
        """Add decoded text and return what may be given out."""
        if self._stop_matcher is None or not text:
            return text
        match = None
        if self._token_count <= self._min_tokens:
            self._stop_state = self._stop_matcher.skip(self._stop_state, text)
        else:
            self._stop_state, match = self._stop_matcher.scan(self._stop_state, text)
        if match is None:
            keep = self._stop_matcher.held_chars(self._stop_state)
            text = self._held_back_text + text
            self._held_back_text = text[len(text) - keep :]
            return text[: len(text) - keep]
        self._stop_string = match.stop_string
        end = len(self._held_back_text) + match.end
        if not self._include_stop_string:
            end -= len(match.stop_string)
        text = self._held_back_text + text
        self._held_back_text = ""
        return text[:end]
