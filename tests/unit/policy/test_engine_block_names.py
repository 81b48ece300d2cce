"""The blocks that an engine tells of have the names that prompts are given, whatever it evicts and keeps twice."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy import EngineBlockNames, compute_block_names

SIZE = 8
SALTS = ("", "one", "two")

Prompt = tuple[str, tuple[int, ...]]
PROMPTS = st.tuples(
    st.sampled_from(SALTS), st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
)
"""A salt, and blocks of tokens that are all alike."""


def ids_of(numbers: tuple[int, ...]) -> array[int]:
    return array("I", [number for number in numbers for _ in range(SIZE)])


def names_of(prompt: Prompt) -> array[int]:
    return compute_block_names(prompt[0], ids_of(prompt[1]), SIZE)


def hash_of(prompt: Prompt) -> int:
    """An engine's, of the prompt's last block."""
    return hash(prompt)


@settings(max_examples=300)
@given(st.data())
def test_what_is_held_has_the_names_of_its_prompts(data: st.DataObject) -> None:
    engine, held = Counter[Prompt](), set[int]()
    blocks = EngineBlockNames(SIZE)
    for _ in range(data.draw(st.integers(1, 12))):
        evicts = data.draw(st.booleans())
        if evicts and engine:
            gone = data.draw(st.sampled_from(sorted(engine)))
            engine[gone] -= 1
            engine += Counter()
            held -= set(blocks.remove_blocks([hash_of(gone)]))
        else:
            salt, numbers = data.draw(PROMPTS)
            chain = [(salt, numbers[:end]) for end in range(1, len(numbers) + 1)]
            hit = data.draw(st.integers(0, sum(engine[each] > 0 for each in chain)))
            while hit and not all(engine[each] for each in chain[:hit]):
                hit -= 1
            parent = hash_of(chain[hit - 1]) if hit else None
            new = chain[hit:]
            engine.update(new)
            held |= set(
                blocks.add_blocks(
                    [hash_of(each) for each in new], parent, ids_of(numbers[hit:]), salt
                )
            )
        assert held == {names_of(each)[-1] for each in engine}
        assert len(blocks) == len(engine)


@given(PROMPTS, PROMPTS)
def test_names_are_alike_as_far_as_salt_and_tokens_are(one: Prompt, other: Prompt) -> None:
    for first, second, same in zip(
        names_of(one),
        names_of(other),
        [one[1][:end] == other[1][:end] for end in range(1, 6)],
        strict=False,
    ):
        assert (first == second) == (one[0] == other[0] and same)


def test_half_a_block_has_no_name() -> None:
    assert len(compute_block_names("", array("I", range(3 * SIZE - 1)), SIZE)) == 2


def test_what_comes_after_an_unknown_block_cannot_be_named() -> None:
    blocks = EngineBlockNames(SIZE)
    assert not blocks.add_blocks([5], 4, range(SIZE), "")
    assert not blocks.remove_blocks([5, 6])
    assert not len(blocks)


def test_blocks_without_their_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        EngineBlockNames(SIZE).add_blocks([1, 2], None, range(SIZE), "")
    with pytest.raises(OverflowError):
        EngineBlockNames(SIZE).add_blocks([1], None, [-1] * SIZE, "")
