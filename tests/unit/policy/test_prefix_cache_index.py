"""Recent prompts: the estimated cache of a replica, the placements, and the tree that counts shared prefixes."""

from __future__ import annotations

from array import array
from collections import Counter
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    CacheHitReport,
    EstimatedPrefixIndex,
    PrefixTree,
    RecentPlacements,
    RecentPrompt,
    compute_prefix_keys,
    prefix_tree,
)
from argosy.policy.prefix_tree import RecentPrompts


def prefix_keys(prompt: str) -> list[bytes]:
    """Return the keys of a prompt whose blocks have one character."""
    return compute_prefix_keys(b"salt", prompt.encode(), 1)


def common_blocks(first: str, second: str) -> int:
    """Return the number of common prefix blocks."""
    return len(set(prefix_keys(first)) & set(prefix_keys(second)))


def test_resent_prompt_becomes_most_recent() -> None:
    index = EstimatedPrefixIndex(capacity_blocks=4)
    for prompt in ("ab", "cd", "ab", "ef"):
        index.on_prompt_sent(prefix_keys(prompt))
    assert [len(index.match_prefix(prefix_keys(prompt))) for prompt in ("ab", "cd", "ef")] == [
        2,
        0,
        2,
    ]


@pytest.mark.parametrize(
    ("tokens", "cached", "expected_older"),
    [(1000, 1000, 10), (1000, 801, 10), (1000, 800, 0), (1000, 0, 0), (0, 0, 0)],
)
def test_cache_miss_evicts_all_older_prompts(tokens: int, cached: int, expected_older: int) -> None:
    """A shortfall of one block is tolerated, because block sizes and chat templates differ."""
    index = EstimatedPrefixIndex()
    old, prompt, new = "o" * 10, "p" * 10, "n" * 10
    for sent in (old, prompt, new):
        index.on_prompt_sent(prefix_keys(sent))
    matched = index.match_prefix(prefix_keys(prompt))
    index.on_prompt_sent(prefix_keys(prompt))
    index.on_cache_hit_report(
        CacheHitReport(prefix_keys(prompt), matched, 10.0, tokens, cached, array("Q"))
    )
    assert [len(index.match_prefix(prefix_keys(sent))) for sent in (old, prompt, new)] == [
        expected_older,
        10,
        10,
    ]


def test_report_from_before_a_clear_is_ignored() -> None:
    index, keys = EstimatedPrefixIndex(), prefix_keys("prompt")
    index.on_prompt_sent(keys)
    matched = index.match_prefix(keys)
    index.clear()
    index.on_cache_hit_report(CacheHitReport(keys, matched, 6.0, 100, 0, array("Q")))
    assert index.match_prefix(keys) == []


@given(st.lists(st.text("ab", max_size=20), max_size=20), st.text("ab", max_size=20))
def test_prompt_goes_to_latest_placement_with_half_of_the_longest_match(
    placed: list[str], prompt: str
) -> None:
    placements = RecentPlacements()
    for number, earlier in enumerate(placed):
        placements.record_placement(prefix_keys(earlier), str(number))
    matched = placements.find_replica(prefix_keys(prompt))
    longest = max((common_blocks(prompt, o) for o in placed), default=0)
    if matched is None:
        assert longest == 0
    else:
        assert 2 * common_blocks(prompt, placed[int(matched)]) >= longest
        later = [o for o in placed[int(matched) + 1 :] if common_blocks(prompt, o) >= longest > 0]
        assert not later


def test_least_recent_placement_is_evicted_at_capacity() -> None:
    with mock.patch.object(RecentPlacements, "MAX_ENTRIES", 2):
        placements = RecentPlacements()
        for prompt in "abac":
            placements.record_placement(prefix_keys(prompt), prompt)
        assert [placements.find_replica(prefix_keys(prompt)) for prompt in "abc"] == [
            "a",
            None,
            "c",
        ]


@given(st.binary(max_size=400), st.binary(max_size=400), st.binary(max_size=4))
def test_prefix_keys_agree_exactly_as_far_as_the_prompts(a: bytes, b: bytes, salt: bytes) -> None:
    shared = sum(
        x == y
        for x, y in zip(
            compute_prefix_keys(salt, a, 16), compute_prefix_keys(salt, b, 16), strict=False
        )
    )
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    assert shared == same // 16
    assert not set(compute_prefix_keys(salt, a, 16)) & set(compute_prefix_keys(salt + b"!", a, 16))


def test_match_starts_at_the_beginning_and_least_recent_tail_is_evicted() -> None:
    index = EstimatedPrefixIndex(capacity_blocks=4)
    first, second = compute_prefix_keys(b"", b"a" * 48, 16), compute_prefix_keys(b"", b"b" * 32, 16)
    index.on_prompt_sent(first)
    assert len(index.match_prefix(first)) == 3
    index.on_prompt_sent(second)
    assert len(index.match_prefix(first)) == len(index.match_prefix(second)) == 2
    index.resize(3)
    assert len(index.match_prefix(first)) == 1
    index.clear()
    assert index.match_prefix(first) == index.match_prefix(second) == []


@given(st.lists(st.binary(min_size=16, max_size=64), max_size=100))
def test_prefix_index_stays_within_capacity(prompts: list[bytes]) -> None:
    index = EstimatedPrefixIndex(capacity_blocks=7)
    for prompt in prompts:
        index.on_prompt_sent(compute_prefix_keys(b"", prompt, 16))
        assert len(index) <= 7


# --- radix tree of recent prompts ---------------------------------------------------------------


def to_prompt(text: str, tenant: str = "t", at: float = 0.0) -> RecentPrompt:
    """Return a prompt whose blocks have one character."""
    return RecentPrompt(compute_prefix_keys(b"", text.encode(), 1), tenant, at)


@given(st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=30))
def test_tree_counts_the_prompts_with_every_prefix(texts: list[str]) -> None:
    tree = PrefixTree()
    for number, text in enumerate(texts):
        tree.add(to_prompt(text, f"t{number % 2}", float(number)))
    nodes = tree.find_heaviest(1000)
    expected = Counter(
        to_prompt(text[: n + 1]).keys[-1] for text in texts for n in range(len(text))
    )
    counted = {node.keys[n]: node.prompts for node in nodes for n in range(node.start, node.end)}
    assert counted == expected
    for node in nodes:
        assert node.prompts == node.tenants.total()
        assert node.last_sent_at == max(
            number
            for number, text in enumerate(texts)
            if node.keys[node.end - 1] in to_prompt(text).keys
        )


@given(st.lists(st.text("ab", min_size=1, max_size=12), max_size=30), st.integers(1, 10))
def test_heaviest_nodes_are_connected(texts: list[str], count: int) -> None:
    tree = PrefixTree()
    for text in texts:
        tree.add(to_prompt(text))
    nodes = tree.find_heaviest(count)
    assert len(nodes) <= count
    for index, node in enumerate(nodes):
        assert node.start == 0 or node.parent in nodes[:index]


def test_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "MAX_PROMPTS", 3)
    monkeypatch.setattr(prefix_tree, "MAX_KEYS", 10)
    prompts = RecentPrompts()
    for text in ("a", "b", "c", "d"):
        prompts.add(to_prompt(text))
    assert [each.keys for each in prompts] == [to_prompt(text).keys for text in "bcd"]
    prompts.add(to_prompt("e" * 9))
    assert [len(each.keys) for each in prompts] == [1, 9]
