"""Radix tree of recent prompts: it counts every shared prefix, and keeps within its limits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import PrefixTree, RecentPrompt, compute_prefix_keys, prefix_tree
from argosy.policy.prefix_tree import RecentPrompts


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
