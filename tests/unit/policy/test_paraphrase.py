"""Which questions may share an answer, the index that finds them, and the bounds of an evaluation."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from benchmarks.semantic_pairs import GENERATORS
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.paraphrase import (
    GuardName,
    LabelledPair,
    allows_answer,
    count_hits,
    interval,
    upper_bound,
)
from argosy.policy.vectors import VectorIndex

SAME = [
    ("How do I reset my password?", "What are the steps to reset my password"),
    ("What is the price of 5 apples?", "what's the cost of five apples"),
    ("How do I cancel a subscription?", "Please tell me how to cancel subscriptions"),
    ("Gr\u00f6\u00dfe von Bonn", "gr\u00f6\u00dfe von bonn?"),
]
DIFFERENT = [
    ("Is it safe to eat?", "Is it not safe to eat?"),
    ("Is it safe to eat?", "Isn't it safe to eat?"),
    ("Did Rome defeat Carthage?", "Was Rome defeated by Carthage?"),
    ("Does a landlord pay a tenant?", "Does a tenant pay a landlord?"),
    ("Book a flight to Rome", "Book a flight from Rome"),
    ("How can I cancel?", "Can I cancel?"),
    ("How is bread made?", "What is bread made of?"),
    ("Add 3 spoons and 4 cups", "Add 4 spoons and 3 cups"),
    ("Is -5 below zero?", "Is 5 below zero?"),
    ("Is 5 > 3?", "Is 5 < 3?"),
    ("Explain `a = 1`", "Explain `a = 2`"),
    ('Open "north" door', 'Open "south" door'),
    ("Read https://a.example/1", "Read https://a.example/2"),
    ("Order b12", "Order b13"),
    ("Is C++ fast?", "Is C# fast?"),
    ("Can I pay 1\u0662 euros?", "Can I pay 1\u0663 euros?"),
    ("Do you owe me money?", "Do I owe you money?"),
    ("Must I register?", "May I register?"),
    ("What if it rains?", "What if it snows?"),
    ("Ist das gut?", "Ist das nicht gut?"),
    ("x", "x" * 3000),
    ("\u338f" * 1500 + " a", "\u338f" * 1500 + " the"),  # "kg" in one character
    ("\u201c" * 60 + "a", "\u201c" * 60 + "the"),
]


@pytest.mark.parametrize("guard", ["no_substitution", "no_residual"])
def test_guard_knows_the_same_question_from_another_one(guard: GuardName) -> None:
    assert [allows_answer(guard, *pair) for pair in SAME] == [True] * len(SAME)
    assert [pair for pair in DIFFERENT if allows_answer(guard, *pair)] == []


def test_only_one_guard_lets_a_question_have_more_words() -> None:
    pair = ("What is the capital of Peru?", "What is the capital city of Peru?")
    assert allows_answer("no_substitution", *pair)
    assert not allows_answer("no_residual", *pair)


@given(st.text(max_size=60), st.text(max_size=60))
def test_guard_is_symmetric_and_lets_equal_texts_through(one: str, two: str) -> None:
    for guard in ("no_substitution", "no_residual"):
        assert allows_answer(guard, one, two) == allows_answer(guard, two, one)
        assert allows_answer(guard, one, one)


def test_guard_makes_no_mistake_on_the_training_pairs() -> None:
    pairs = [LabelledPair(*pair) for pair in GENERATORS["training"]()]
    right, wrong = count_hits(pairs, [1.0] * len(pairs), "no_substitution", 0.85)
    assert (right, wrong) == (60, 0)
    assert count_hits(pairs, [0.8] * len(pairs), None, 0.85) == (0, 0)


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    assert upper_bound(0, 180) == pytest.approx(1 - 0.05 ** (1 / 180))
    assert list(interval(1, 30)) == pytest.approx([0.000843571, 0.172169456], abs=1e-8)
    assert upper_bound(0, 0) == upper_bound(3, 3) == 1


def test_bounds_of_large_counts_are_normal() -> None:
    """They are computed for each page of figures, in the loop of the gateway."""
    total = 10_000_000
    deviation = (0.25 / total) ** 0.5
    assert upper_bound(total // 2, total) == pytest.approx(0.5 + 1.6449 * deviation, abs=1e-6)
    low, high = interval(total // 2, total)
    assert (high - 0.5, 0.5 - low) == pytest.approx((1.96 * deviation,) * 2, rel=1e-3)


def test_index_equals_a_plain_search_and_keeps_its_bounds() -> None:
    random = np.random.default_rng(1)
    index, kept = VectorIndex(10**6), dict[tuple[str, str], list[tuple[str, np.ndarray]]]()
    for number in range(300):
        vector = random.normal(size=4).astype(np.float32)
        vector /= np.linalg.norm(vector)
        tenant, partition, key = f"t{number % 3}", f"p{number % 2}", f"k{random.integers(40)}"
        index.add(tenant, f"{tenant}{partition}", key, vector, answer_key=key, max_entries=15, now=number)  # fmt: skip
        rows = kept.setdefault((tenant, partition), [])
        for (owner, _), others in kept.items():
            if owner == tenant:
                others[:] = [row for row in others if row[0] != key]
        rows.append((key, vector))
        found = index.find(f"{tenant}{partition}", vector, 0.5, 100, 0)
        assert [each.question.answer_key for each in found][:1] == [key]
        assert {each.question.answer_key for each in found} <= {row[0] for row in rows}
        assert all(each.similarity >= 0.5 for each in found)
    assert len(index) == 45
    index.remove_matching(lambda key: key.startswith("k1"))
    found = index.find("t0p0", vector, -1, 100, 0) + index.find("t0p1", vector, -1, 100, 0)
    keys = {each.question.answer_key for each in found}
    assert keys
    assert not any(each.startswith("k1") for each in keys)
    index.remove_matching(lambda _: True)
    assert len(index) == 0


def test_index_is_bounded_in_bytes() -> None:
    index, vector = VectorIndex(4000), np.array([1, 0], np.float32)
    for number in range(100):
        index.add("t", "p", "q" * 100, vector, answer_key=str(number), max_entries=1000, now=number)
    assert 0 < len(index) < 8
    assert [each.question.answer_key for each in index.find("p", vector, 0.9, 1, 99)] == ["99"]
    assert index.find("other", vector, 0.9, 1, 0) == []


def test_index_releases_the_rows_of_removed_questions() -> None:
    index, vector = VectorIndex(2**20), np.full(256, 1 / 16, np.float32)
    tracemalloc.start()
    try:
        for partition in range(40):
            for number in range(64):
                key = f"{partition}-{number}"
                index.add("t", str(partition), "q", vector, answer_key=key, max_entries=1000, now=0)
            for number in range(63):
                index.remove("t", f"{partition}-{number}")
        assert len(index) == 40
        assert tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()
    assert [each.question.answer_key for each in index.find("7", vector, 0.9, 9, 0)] == ["7-63"]
