"""Incremental detokenizer, which holds back text that may be the beginning of a stop string, and the search for it."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from argosy.engine.reasoning_gate import ReasoningGate
from argosy.engine.serving.output_parsing import MarkerToken, Piece
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import SamplingParams

_utf8 = codecs.getincrementaldecoder("utf-8")
_NO_MARKERS: Mapping[int, str] = MappingProxyType({})


class StopMatch(NamedTuple):
    """A stop string, and the index in the scanned text at which it ends (exclusive)."""

    stop_string: str
    end: int


class StopStringMatcher:
    """Aho-Corasick automaton over a set of stop strings (Aho and Corasick 1975).

    Needs one look-up per character. States are numbered from 0, the state in which nothing is matched. Immutable.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._transitions: list[dict[str, int]] = [{}]
        self._failure_links = [0]
        self._match_by_state: list[str | None] = [None]
        self._held_chars = [0]
        depths = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._transitions[state]:
                    self._transitions[state][char] = len(self._transitions)
                    self._transitions.append({})
                    self._failure_links.append(0)
                    self._match_by_state.append(None)
                    depths.append(depths[state] + 1)
                state = self._transitions[state][char]
            self._match_by_state[state] = stop
        self._held_chars = [0] * len(depths)
        self._build_links(depths)

    def _build_links(self, depths: list[int]) -> None:
        """Compute failure links, matches and held-back lengths of all states in breadth-first order."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self._transitions[state].items():
                if state:
                    self._failure_links[child] = self.next_state(self._failure_links[state], char)
                fallback = self._failure_links[child]
                if self._match_by_state[child] is None:
                    self._match_by_state[child] = self._match_by_state[fallback]
                self._held_chars[child] = (
                    depths[child] if self._transitions[child] else self._held_chars[fallback]
                )
                queue.append(child)

    def next_state(self, state: int, char: str) -> int:
        """Return the state after `char`."""
        while state and char not in self._transitions[state]:
            state = self._failure_links[state]
        return self._transitions[state].get(char, 0)

    def held_chars(self, state: int) -> int:
        """Return how many of the last characters may be the beginning of a stop string."""
        return self._held_chars[state]

    def scan(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        """Advance over `text`, up to the end of the stop string that ends first.

        If several stop strings end at the same character, the longest one is reported. The result does not depend on
        how the text is split into pieces.

        Returns:
            The new state, and the match if there is one.
        """
        for index, char in enumerate(text):
            state = self.next_state(state, char)
            stop_string = self._match_by_state[state]
            if stop_string is not None:
                return state, StopMatch(stop_string, index + 1)
        return state, None

    def skip(self, state: int, text: str) -> int:
        """Return the state after `text`, ignoring stop strings that end in it."""
        for char in text:
            state = self.next_state(state, char)
        return state


@lru_cache(maxsize=32)
def stop_string_matcher(stops: tuple[str, ...]) -> StopStringMatcher:
    """Return the automaton of `stops`, shared by requests with the same stop strings."""
    return StopStringMatcher(stops)


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
        self.stop_string: str | None = None
        """Stop string that ended the text, or None."""
        self._markers = markers
        self._reasoning = None if params.reasoning is None else ReasoningGate(params.reasoning)
        self.push(resumed_tokens)

    def push(self, token_ids: Iterable[int]) -> tuple[list[Piece], int]:
        """Add tokens.

        Returns:
            Text and markers that can be sent now, and the number of tokens that belong to the choice. Those after a
            stop string do not.
        """
        pieces: list[Piece] = []
        used = 0
        for token_id in token_ids:
            if self.stop_string is not None:
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
            if self.stop_string is not None
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
        self.stop_string = match.stop_string
        end = len(self._held_back_text) + match.end
        if not self._include_stop_string:
            end -= len(match.stop_string)
        text = self._held_back_text + text
        self._held_back_text = ""
        return text[:end]
