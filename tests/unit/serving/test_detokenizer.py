"""Text as tokens come: whole characters only, nothing of a stop string, and exact resumption."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vocabularies import byte_level, sentencepiece

from argosy.engine.serving.text.detokenizer import Detokenizer
from argosy.engine.serving.text.stop_string_matcher import StopStringMatcher
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import SamplingParams

KINDS = [byte_level(), sentencepiece()]
WORDS = [" the", "stop", "END", "\n\n", "你好", "👋🏽", "ü", "st", "op", "th", "a", "aa", " "]


@st.composite
def generations(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    """A tokenizer and tokens as a model might emit: words, and any tokens at all between them."""
    tokenizer = draw(st.sampled_from(KINDS))
    word = st.sampled_from(WORDS).map(lambda w: tokenizer.encode(w, add_special_tokens=False))
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4)
    return tokenizer, list(chain.from_iterable(draw(st.lists(word | anything, max_size=12))))


STOPS = st.lists(
    st.sampled_from(
        ["stop", " the", "END", "aa", "a", "op", "你好", "好", "\n\n", "th s", "ab", "�"]
    )
    | st.text("ashtop ", min_size=1, max_size=3),
    max_size=6,
    unique=True,
).map(tuple)


def cut(text: str, stops: tuple[str, ...], *, include: bool) -> str:
    """The text up to the stop string that ends first (the longest of those that end together)."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text
    end, _, stop = min(ends)
    return text[:end] if include else text[: end - len(stop)]


def emissions(
    tokenizer: Tokenizer, params: SamplingParams, tokens: list[int]
) -> tuple[list[str], str]:
    """The text given out after each token, and at the end."""
    stream = Detokenizer(tokenizer, params, [])
    return [stream.push([token]).text for token in tokens], stream.flush()


@given(generated=generations(), stops=STOPS, include=st.booleans())
def test_emissions_add_up_to_the_text_cut_at_the_first_stop_string(
    generated: tuple[Tokenizer, list[int]], stops: tuple[str, ...], include: bool
) -> None:
    tokenizer, tokens = generated
    stops = tuple(s for s in stops if "�" not in s)  # half a character at the end is no stop
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, ignore_eos=True)
    given_out, rest = emissions(tokenizer, params, tokens)
    piece = tokenizer.token_decoder(skip_special_tokens=True)
    text = b"".join(map(piece, tokens)).decode("utf-8", "replace")
    assert "".join(given_out) + rest == cut(text, stops, include=include)


@given(generated=generations(), stops=STOPS)
def test_what_is_given_out_is_never_taken_back(
    generated: tuple[Tokenizer, list[int]], stops: tuple[str, ...]
) -> None:
    """After any token, the text so far is a beginning of every answer that starts with these tokens."""
    tokenizer, tokens = generated
    params = SamplingParams(stop=stops)
    given_out, _ = emissions(tokenizer, params, tokens)
    for k in range(len(tokens) + 1):
        if_it_ended = Detokenizer(tokenizer, params, [])
        text = if_it_ended.push(tokens[:k]).text
        assert text == "".join(given_out[:k])
        assert (text + if_it_ended.flush()).startswith(text)


@given(generated=generations(), stops=STOPS, include=st.booleans(), data=st.data())
def test_grouping_of_tokens_changes_nothing(
    generated: tuple[Tokenizer, list[int]],
    stops: tuple[str, ...],
    include: bool,
    data: st.DataObject,
) -> None:
    tokenizer, tokens = generated
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    one_by_one, rest = emissions(tokenizer, params, tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    stream = Detokenizer(tokenizer, params, [])
    grouped = [stream.push(tokens[a:b]) for a, b in pairwise([0, *cuts, len(tokens)])]
    assert "".join(d.text for d in grouped) == "".join(one_by_one)
    assert stream.flush() == rest
    alone = Detokenizer(tokenizer, params, []).push(tokens)
    assert sum(d.used_tokens for d in grouped) == alone.used_tokens
    assert stream.stop_string == alone.stop_string


@given(generated=generations(), stops=STOPS, min_tokens=st.integers(0, 4))
def test_resuming_at_every_index_gives_exactly_the_rest(
    generated: tuple[Tokenizer, list[int]], stops: tuple[str, ...], min_tokens: int
) -> None:
    tokenizer, tokens = generated
    params = SamplingParams(stop=stops, min_tokens=min_tokens)
    given_out, rest = emissions(tokenizer, params, tokens)
    for k in range(len(tokens) + 1):
        resumed = Detokenizer(tokenizer, params, tokens[:k])
        assert resumed.push(tokens[k:]).text == "".join(given_out[k:])
        assert resumed.flush() == rest


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
def test_the_automaton_finds_what_a_search_finds(text: str, stops: list[str]) -> None:
    _, match = StopStringMatcher(tuple(stops)).scan(0, text)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    assert (match and (match.end, match.stop_string)) == (min(ends)[::2] if ends else None)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
def test_exactly_what_may_begin_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    automaton = StopStringMatcher(tuple(stops))
    state = automaton.skip(0, text)
    beginnings = {s[:k] for s in stops for k in range(1, len(s))}
    longest = max((k for k in range(1, len(text) + 1) if text[-k:] in beginnings), default=0)
    assert automaton.held_chars(state) == longest


@pytest.mark.parametrize("tokenizer", KINDS)
def test_a_character_comes_whole(tokenizer: Tokenizer) -> None:
    tokens = [
        t
        for t in tokenizer.encode("👋", add_special_tokens=False)
        if tokenizer.token_text(t) != " "
    ]
    assert len(tokens) > 1
    given_out, rest = emissions(tokenizer, SamplingParams(), tokens)
    assert given_out == [""] * (len(tokens) - 1) + ["👋"]
    assert rest == ""
    given_out, rest = emissions(tokenizer, SamplingParams(), tokens[:-1])
    assert ("".join(given_out), rest) == ("", "�")


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    tokenizer = KINDS[0]
    tokens = [tokenizer.encode(c)[0] for c in "a stoop stop it"]
    given_out, rest = emissions(tokenizer, SamplingParams(stop=("stop",)), tokens)
    assert given_out[:12] == ["a", " ", "", "", "", "stoo", "p", " ", "", "", "", ""]
    assert ("".join(given_out), rest) == ("a stoop ", "")


def test_used_counts_the_tokens_up_to_the_stop_string() -> None:
    tokenizer = KINDS[0]
    tokens = [tokenizer.encode(c)[0] for c in "ab stop xyz"]
    delta = Detokenizer(tokenizer, SamplingParams(stop=("nope", "stop")), []).push(tokens)
    assert (delta.text, delta.used_tokens, delta.stop_string) == ("ab ", 7, "stop")
    included = SamplingParams(stop=("stop",), include_stop_str_in_output=True)
    assert Detokenizer(tokenizer, included, []).push(tokens).text == "ab stop"


def test_nothing_is_taken_after_a_stop_string() -> None:
    tokenizer = KINDS[0]
    stream = Detokenizer(tokenizer, SamplingParams(stop=("b",)), [])
    stream.push(tokenizer.encode("ab"))
    after = stream.push(tokenizer.encode("cd"))
    assert (after.text, after.used_tokens, after.stop_string, stream.flush()) == ("", 0, "b", "")


def test_held_text_comes_at_the_end() -> None:
    tokenizer = KINDS[0]
    given_out, rest = emissions(tokenizer, SamplingParams(stop=("stop",)), tokenizer.encode("sto"))
    assert ("".join(given_out), rest) == ("", "sto")


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [("b", 0, "a"), ("b", 1, "a"), ("b", 2, "abca"), ("b", 5, "abcab"), ("ca", 3, "ab")],
)
def test_stop_strings_that_end_within_min_tokens_do_not_count(
    stop: str, min_tokens: int, text: str
) -> None:
    tokenizer = KINDS[0]
    tokens = [tokenizer.encode(c)[0] for c in "abcab"]
    stream = Detokenizer(tokenizer, SamplingParams(stop=(stop,), min_tokens=min_tokens), [])
    assert stream.push(tokens).text + stream.flush() == text


def test_the_token_that_ends_an_answer_has_no_text() -> None:
    tokenizer = KINDS[0]
    a, end = tokenizer.encode("a"), tokenizer.encode("<|end|>")
    shown = SamplingParams(skip_special_tokens=False)
    assert "".join(emissions(tokenizer, shown, a + end)[0]) == "a"
    ids = SamplingParams(stop_token_ids=(a[0],))
    assert "".join(emissions(tokenizer, ids, end + a)[0]) == ""
    kept = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert "".join(emissions(tokenizer, kept, a + end)[0]) == "a<|end|>"
    going_on = SamplingParams(skip_special_tokens=False, ignore_eos=True)
    assert "".join(emissions(tokenizer, going_on, end + a)[0]) == "<|end|>a"
    assert Detokenizer(tokenizer, shown, []).push(a + end).used_tokens == 2


def test_stop_strings_match_over_skipped_special_tokens() -> None:
    tokenizer = KINDS[0]
    tokens = tokenizer.encode("st<|user|>op!")
    assert (
        Detokenizer(tokenizer, SamplingParams(stop=("stop",)), []).push(tokens).stop_string
        == "stop"
    )
