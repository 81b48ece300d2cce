"""What is believed to be cached, and where prompts went: the least recent goes first, and answers correct it."""

from __future__ import annotations

from array import array
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    CacheHitReport,
    EstimatedPrefixIndex,
    RecentPlacements,
    compute_prefix_keys,
)


def keys_of(prompt: str) -> list[bytes]:
    """A block for each character."""
    return compute_prefix_keys(b"salt", prompt.encode(), 1)


def common(one: str, other: str) -> int:
    """Blocks from the beginning that both have."""
    return len(set(keys_of(one)) & set(keys_of(other)))


def test_what_is_sent_again_is_the_most_recent() -> None:
    index = EstimatedPrefixIndex(capacity_blocks=4)
    for prompt in ("ab", "cd", "ab", "ef"):
        index.on_prompt_sent(keys_of(prompt))
    assert [len(index.match_prefix(keys_of(prompt))) for prompt in ("ab", "cd", "ef")] == [2, 0, 2]


@pytest.mark.parametrize(
    ("tokens", "cached", "older"),
    [(1000, 1000, 10), (1000, 801, 10), (1000, 800, 0), (1000, 0, 0), (0, 0, 0)],
)
def test_an_answer_that_found_less_than_was_believed_tells_of_all_that_is_older(
    tokens: int, cached: int, older: int
) -> None:
    """By more than a block: neither blocks nor templates are the same there."""
    index = EstimatedPrefixIndex()
    old, prompt, new = "o" * 10, "p" * 10, "n" * 10
    for one in (old, prompt, new):
        index.on_prompt_sent(keys_of(one))
    found = index.match_prefix(keys_of(prompt))
    index.on_prompt_sent(keys_of(prompt))
    index.on_cache_hit_report(
        CacheHitReport(keys_of(prompt), found, 10.0, tokens, cached, array("Q"))
    )
    assert [len(index.match_prefix(keys_of(one))) for one in (old, prompt, new)] == [older, 10, 10]


def test_an_answer_from_before_the_cache_was_lost_tells_nothing() -> None:
    index, keys = EstimatedPrefixIndex(), keys_of("prompt")
    index.on_prompt_sent(keys)
    found = index.match_prefix(keys)
    index.clear()
    index.on_cache_hit_report(CacheHitReport(keys, found, 6.0, 100, 0, array("Q")))
    assert index.match_prefix(keys) == []


@given(st.lists(st.text("ab", max_size=20), max_size=20), st.text("ab", max_size=20))
def test_a_prompt_goes_where_the_last_went_that_had_half_of_what_any_had_in_common_with_it(
    before: list[str], prompt: str
) -> None:
    places = RecentPlacements()
    for number, one in enumerate(before):
        places.record_placement(keys_of(one), str(number))
    found, most = (
        places.find_replica(keys_of(prompt)),
        max((common(prompt, o) for o in before), default=0),
    )
    if found is None:
        assert most == 0
    else:
        assert 2 * common(prompt, before[int(found)]) >= most
        later = [one for one in before[int(found) + 1 :] if common(prompt, one) >= most > 0]
        assert not later


def test_of_very_many_beginnings_the_least_recent_are_forgotten() -> None:
    with mock.patch.object(RecentPlacements, "MAX_ENTRIES", 2):
        places = RecentPlacements()
        for prompt in "abac":
            places.record_placement(keys_of(prompt), prompt)
        assert [places.find_replica(keys_of(prompt)) for prompt in "abc"] == ["a", None, "c"]
