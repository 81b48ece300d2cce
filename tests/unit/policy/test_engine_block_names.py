"""Blocks that an engine reports get the same names as the prompts, whatever it evicts or stores twice."""

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
"""A salt, and blocks that each repeat one token."""


def token_ids(blocks: tuple[int, ...]) -> array[int]:
    return array("I", [number for number in blocks for _ in range(SIZE)])


def block_names(prompt: Prompt) -> array[int]:
    return compute_block_names(prompt[0], token_ids(prompt[1]), SIZE)


def engine_hash(prompt: Prompt) -> int:
    """Return the engine's own hash of the prompt's last block."""
    return hash(prompt)


@settings(max_examples=60)
@given(st.data())
def test_stored_blocks_have_the_names_of_their_prompts(data: st.DataObject) -> None:
    engine, named = Counter[Prompt](), set[int]()
    blocks = EngineBlockNames(SIZE)
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) and engine:
            evicted = data.draw(st.sampled_from(sorted(engine)))
            engine[evicted] -= 1
            engine += Counter()
            named -= set(blocks.remove_blocks([engine_hash(evicted)]))
        else:
            salt, numbers = data.draw(PROMPTS)
            chain = [(salt, numbers[:end]) for end in range(1, len(numbers) + 1)]
            cached = data.draw(st.integers(0, sum(engine[each] > 0 for each in chain)))
            while cached and not all(engine[each] for each in chain[:cached]):
                cached -= 1
            parent = engine_hash(chain[cached - 1]) if cached else None
            new = chain[cached:]
            engine.update(new)
            named |= set(
                blocks.add_blocks(
                    [engine_hash(each) for each in new], parent, token_ids(numbers[cached:]), salt
                )
            )
        assert named == {block_names(each)[-1] for each in engine}
        assert len(blocks) == len(engine)


@given(PROMPTS, PROMPTS)
def test_names_agree_up_to_the_first_difference_in_salt_or_tokens(
    first_prompt: Prompt, second_prompt: Prompt
) -> None:
    for first, second, same in zip(
        block_names(first_prompt),
        block_names(second_prompt),
        [first_prompt[1][:end] == second_prompt[1][:end] for end in range(1, 6)],
        strict=False,
    ):
        assert (first == second) == (first_prompt[0] == second_prompt[0] and same)


def test_partial_block_has_no_name() -> None:
    assert len(compute_block_names("", array("I", range(3 * SIZE - 1)), SIZE)) == 2


def test_block_after_unknown_parent_has_no_name() -> None:
    blocks = EngineBlockNames(SIZE)
    assert not blocks.add_blocks([5], 4, range(SIZE), "")
    assert not blocks.remove_blocks([5, 6])
    assert not len(blocks)


def test_blocks_without_their_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="zip"):
        EngineBlockNames(SIZE).add_blocks([1, 2], None, range(SIZE), "")
    with pytest.raises(OverflowError):
        EngineBlockNames(SIZE).add_blocks([1], None, [-1] * SIZE, "")
