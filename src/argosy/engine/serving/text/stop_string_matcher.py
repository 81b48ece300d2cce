"""Finds the first of many stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string and the index in the piece just scanned at which it ends (exclusive)."""

    stop: str
    end: int


class StopStrings:
    """The automaton of a set of stop strings (Aho and Corasick 1975): one look-up per character.

    States are numbered from 0, which stands for "nothing matched so far". Immutable.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._found: list[str | None] = [None]
        self._held = [0]
        depths = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self._found.append(None)
                    depths.append(depths[state] + 1)
                state = self._next[state][char]
            self._found[state] = stop
        self._held = [0] * len(depths)
        self._link(depths)

    def _link(self, depths: list[int]) -> None:
        """Breadth first: where to go on after a mismatch, what ends here, what to hold back."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                if state:
                    self._fail[child] = self.step(self._fail[state], char)
                fallback = self._fail[child]
                if self._found[child] is None:
                    self._found[child] = self._found[fallback]
                self._held[child] = depths[child] if self._next[child] else self._held[fallback]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after `char`."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def held(self, state: int) -> int:
        """How many of the last characters may yet turn out to be the beginning of a stop string."""
        return self._held[state]

    def scan(self, state: int, text: str) -> tuple[int, Match | None]:
        """The state after `text`, or after the stop string in it that ends first.

        Of several that end at the same character the longest one is named. Which one is found, and
        where, does not depend on how the text is cut into pieces.
        """
        for index, char in enumerate(text):
            state = self.step(state, char)
            stop = self._found[state]
            if stop is not None:
                return state, Match(stop, index + 1)
        return state, None

    def skip(self, state: int, text: str) -> int:
        """The state after `text` when stop strings that end in it do not count."""
        for char in text:
            state = self.step(state, char)
        return state


@lru_cache(maxsize=32)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of `stops`, shared by requests that name the same ones."""
    return StopStrings(stops)
