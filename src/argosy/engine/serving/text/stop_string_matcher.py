"""Incremental search for the first of several stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


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
