"""Detokenizer and reasoning gate: whole characters without stop strings, exact resumes, and where reasoning ends."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vocabularies import byte_level, sentencepiece

from argosy.engine.reasoning_gate import ReasoningGate
from argosy.engine.serving.text.detokenizer import Detokenizer, StopStringMatcher
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import ReasoningBlock, SamplingParams

TOKENIZERS = [byte_level(), sentencepiece()]
WORDS = [" the", "stop", "END", "\n\n", "你好", "👋🏽", "ü", "st", "op", "th", "a", "aa", " "]


@st.composite
def generations(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    """Draw a tokenizer and a model's output: words, with arbitrary tokens between them."""
    tokenizer = draw(st.sampled_from(TOKENIZERS))
    word = st.sampled_from(WORDS).map(lambda w: tokenizer.encode(w, add_special_tokens=False))
    any_tokens = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4)
    return tokenizer, list(chain.from_iterable(draw(st.lists(word | any_tokens, max_size=12))))


STOPS = st.lists(
    st.sampled_from(
        ["stop", " the", "END", "aa", "a", "op", "你好", "好", "\n\n", "th s", "ab", "�"]
    )
    | st.text("ashtop ", min_size=1, max_size=3),
    max_size=6,
    unique=True,
).map(tuple)


def truncate_at_stop(text: str, stops: tuple[str, ...], *, include: bool) -> str:
    """Return the text up to the stop string that ends first; the longest one if several end there."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text
    end, _, stop = min(ends)
    return text[:end] if include else text[: end - len(stop)]


def push(stream: Detokenizer, tokens: list[int]) -> str:
    """Return the text that tokens add."""
    return "".join([piece for piece in stream.push(tokens)[0] if isinstance(piece, str)])


def emit(tokenizer: Tokenizer, params: SamplingParams, tokens: list[int]) -> tuple[list[str], str]:
    """Return the text emitted after each token, and at the end."""
    stream = Detokenizer(tokenizer, params, [])
    return [push(stream, [token]) for token in tokens], stream.flush()


@given(generated=generations(), stops=STOPS, include=st.booleans())
def test_emitted_text_ends_at_the_first_stop_string(
    generated: tuple[Tokenizer, list[int]], stops: tuple[str, ...], include: bool
) -> None:
    tokenizer, tokens = generated
    stops = tuple(
        s for s in stops if "�" not in s
    )  # a replacement character only appears at the end
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, ignore_eos=True)
    emitted, rest = emit(tokenizer, params, tokens)
    token_bytes = tokenizer.token_decoder(skip_special_tokens=True)
    text = b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")
    assert "".join(emitted) + rest == truncate_at_stop(text, stops, include=include)


@given(generated=generations(), stops=STOPS)
def test_emitted_text_is_final(
    generated: tuple[Tokenizer, list[int]], stops: tuple[str, ...]
) -> None:
    """The text after any token is a prefix of the text of every longer output."""
    tokenizer, tokens = generated
    params = SamplingParams(stop=stops)
    emitted, _ = emit(tokenizer, params, tokens)
    for k in range(len(tokens) + 1):
        shorter = Detokenizer(tokenizer, params, [])
        text = push(shorter, tokens[:k])
        assert text == "".join(emitted[:k])
        assert (text + shorter.flush()).startswith(text)


@given(generated=generations(), stops=STOPS, include=st.booleans(), data=st.data())
def test_grouping_of_tokens_does_not_change_the_text(
    generated: tuple[Tokenizer, list[int]],
    stops: tuple[str, ...],
    include: bool,
    data: st.DataObject,
) -> None:
    tokenizer, tokens = generated
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    one_by_one, rest = emit(tokenizer, params, tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    stream = Detokenizer(tokenizer, params, [])
    grouped = [stream.push(tokens[a:b]) for a, b in pairwise([0, *cuts, len(tokens)])]
    assert "".join(map(str, chain.from_iterable(pieces for pieces, _ in grouped))) == "".join(
        one_by_one
    )
    assert stream.flush() == rest
    ungrouped = Detokenizer(tokenizer, params, [])
    assert sum(used for _, used in grouped) == ungrouped.push(tokens)[1]
    assert stream.stop_string == ungrouped.stop_string


@given(generated=generations(), stops=STOPS, min_tokens=st.integers(0, 4))
def test_resume_at_any_token_gives_exactly_the_rest(
    generated: tuple[Tokenizer, list[int]], stops: tuple[str, ...], min_tokens: int
) -> None:
    tokenizer, tokens = generated
    params = SamplingParams(stop=stops, min_tokens=min_tokens)
    emitted, rest = emit(tokenizer, params, tokens)
    for k in range(len(tokens) + 1):
        resumed = Detokenizer(tokenizer, params, tokens[:k])
        assert push(resumed, tokens[k:]) == "".join(emitted[k:])
        assert resumed.flush() == rest


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
def test_stop_string_matcher_agrees_with_a_search(text: str, stops: list[str]) -> None:
    _, match = StopStringMatcher(tuple(stops)).scan(0, text)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    assert (match and (match.end, match.stop_string)) == (min(ends)[::2] if ends else None)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
def test_matcher_holds_exactly_the_longest_stop_string_prefix(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(tuple(stops))
    state = matcher.skip(0, text)
    stop_prefixes = {s[:k] for s in stops for k in range(1, len(s))}
    longest = max((k for k in range(1, len(text) + 1) if text[-k:] in stop_prefixes), default=0)
    assert matcher.held_chars(state) == longest


def test_used_tokens_count_up_to_the_stop_string() -> None:
    tokenizer = TOKENIZERS[0]
    tokens = [tokenizer.encode(c)[0] for c in "ab stop xyz"]
    stream = Detokenizer(tokenizer, SamplingParams(stop=("nope", "stop")), [])
    pieces, used_tokens = stream.push(tokens)
    assert ("".join(map(str, pieces)), used_tokens, stream.stop_string) == ("ab ", 7, "stop")
    included = SamplingParams(stop=("stop",), include_stop_str_in_output=True)
    assert push(Detokenizer(tokenizer, included, []), tokens) == "ab stop"


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [("b", 0, "a"), ("b", 1, "a"), ("b", 2, "abca"), ("b", 5, "abcab"), ("ca", 3, "ab")],
)
def test_stop_string_within_min_tokens_is_ignored(stop: str, min_tokens: int, text: str) -> None:
    tokenizer = TOKENIZERS[0]
    tokens = [tokenizer.encode(c)[0] for c in "abcab"]
    stream = Detokenizer(tokenizer, SamplingParams(stop=(stop,), min_tokens=min_tokens), [])
    assert push(stream, tokens) + stream.flush() == text


def test_stop_token_has_no_text_unless_included() -> None:
    tokenizer = TOKENIZERS[0]
    a, end = tokenizer.encode("a"), tokenizer.encode("<|end|>")
    with_special = SamplingParams(skip_special_tokens=False)
    assert "".join(emit(tokenizer, with_special, a + end)[0]) == "a"
    ids = SamplingParams(stop_token_ids=(a[0],))
    assert "".join(emit(tokenizer, ids, end + a)[0]) == ""
    with_stop = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert "".join(emit(tokenizer, with_stop, a + end)[0]) == "a<|end|>"
    ignoring_eos = SamplingParams(skip_special_tokens=False, ignore_eos=True)
    assert "".join(emit(tokenizer, ignoring_eos, end + a)[0]) == "<|end|>a"
    assert Detokenizer(tokenizer, with_special, []).push(a + end)[1] == 2


# --- reasoning gate ---

OPEN, CLOSE = 8, 9


def run_gate(block: ReasoningBlock, tokens: list[int]) -> tuple[ReasoningGate, list[bool]]:
    gate = ReasoningGate(block)
    return gate, [gate.accept(token) for token in tokens]


@pytest.mark.parametrize(
    ("start_ids", "tokens", "inside", "count"),
    [
        ((), [1, 2, CLOSE, 3], [True, True, True, False], 2),
        ((OPEN,), [OPEN, 1, CLOSE, 3], [True, True, True, False], 1),
        ((OPEN,), [3, OPEN, 1], [False, False, False], 0),
        ((), [CLOSE, CLOSE], [True, False], 0),
    ],
)
def test_the_block_ends_at_its_closing_token(
    start_ids: tuple[int, ...], tokens: list[int], inside: list[bool], count: int
) -> None:
    gate, belongs = run_gate(ReasoningBlock(end_ids=(CLOSE,), start_ids=start_ids), tokens)
    assert belongs == inside
    assert gate.tokens == count
    assert gate.is_past


@given(st.lists(st.integers(0, 2), max_size=30))
def test_a_closing_sequence_is_found_where_it_first_occurs(tokens: list[int]) -> None:
    end_ids = (1, 1, 2)
    gate, belongs = run_gate(ReasoningBlock(end_ids=end_ids), tokens)
    found = next(
        (i for i in range(len(tokens)) if tuple(tokens[i : i + len(end_ids)]) == end_ids), None
    )
    assert gate.is_past == (found is not None)
    if found is not None:
        assert gate.tokens == found
        assert sum(belongs) == found + len(end_ids)
