"""The native index of tokens against a plain search of all earlier positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.execution.drafting.token_index import (
    MAX_CANDIDATES,
    MAX_CONTINUATION,
    MAX_MATCH,
    MIN_MATCH,
    SEPARATOR,
    Continuation,
    TokenIndex,
)

tokens = st.integers(0, 3) | st.sampled_from([SEPARATOR, 2**31 - 1])
texts = st.lists(st.lists(tokens, max_size=40), max_size=6)
LARGE_TEXT = [i * i % 1009 for i in range(5000)]


def find_plainly(
    text: list[int], limit: int, tail: list[int] | None
) -> tuple[list[int], int, int] | None:
    """Return the longest and then latest match among the latest positions with `MIN_MATCH` tokens in common."""
    is_own = tail is None
    tail = (text if tail is None else tail)[-MAX_MATCH:]
    if len(tail) < MIN_MATCH or limit <= 0:
        return None
    best = None
    tried = 0
    for end in range(len(text) - is_own, MIN_MATCH - 1, -1):
        size = 0
        while size < min(end, len(tail)) and text[end - 1 - size] == tail[-1 - size] >= 0:
            size += 1
        if text[end - MIN_MATCH : end] == tail[-MIN_MATCH:]:
            tried += 1
        has_next = end < len(text) and (is_own or text[end] >= 0)
        if tried <= MAX_CANDIDATES and has_next and size > (best[1] if best else MIN_MATCH - 1):
            best = end, size
    if best is None:
        return None
    continuation: list[int] = []
    while len(continuation) < limit:
        position = best[0] + len(continuation)
        if position < len(text):
            token = text[position]
        elif is_own:
            token = continuation[position - len(text)]
        else:
            break
        if token < 0:
            break
        continuation.append(token)
    return (continuation, best[1], len(text) - best[0]) if continuation else None


@given(texts, st.integers(0, MAX_CONTINUATION), st.none() | st.lists(tokens, max_size=40))
def test_finds_what_a_plain_search_finds(
    parts: list[list[int]], limit: int, tail: list[int] | None
) -> None:
    index = TokenIndex()
    text: list[int] = []
    for part in parts:
        index.append(part)
        text += part
        assert index.find(limit, tail) == find_plainly(text, limit, tail)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 16))
def test_forgets_tokens_beyond_its_size(text: list[int], size: int) -> None:
    index = TokenIndex(size)
    index.append(LARGE_TEXT + text)
    kept = max(8, 1 << (size - 1).bit_length())
    assert index.find(8) == find_plainly((LARGE_TEXT + text)[-kept:], 8, None)


def test_keeps_a_large_text() -> None:
    index = TokenIndex()
    for start in range(0, len(LARGE_TEXT), 100):
        index.append(LARGE_TEXT[start : start + 100])
    tail = LARGE_TEXT[700:740]
    assert index.find(8, tail) == find_plainly(LARGE_TEXT, 8, tail)
    index.append(range(2000, 2040))
    assert index.find(8, list(range(2000, 2010))) == Continuation(list(range(2010, 2018)), 10, 30)


def test_repeats_a_match_that_reaches_the_end() -> None:
    index = TokenIndex()
    index.append([7, 1, 2, 1, 2, 1, 2])
    assert index.find(5) == Continuation([1, 2, 1, 2, 1], 4, 2)
