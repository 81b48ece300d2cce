"""What is found of a text is what the replica's blocks cover, once an answer has told of it."""

from __future__ import annotations

import hashlib
from array import array

from hypothesis import example, given, settings
from hypothesis import strategies as st

from argosy.policy import (
    BLOCK_BYTES,
    CacheHitReport,
    EstimatedPrefixIndex,
    EventPrefixIndex,
    PromptTokensReport,
    TextBlockMap,
    compute_block_names,
    compute_prefix_keys,
)

BLOCK_SIZE = 16
PER_TEXT = 4
"""Token blocks of a text block, where a token is four bytes."""


def names_of(prompt: bytes, token_bytes: int = 4) -> array[int]:
    """Of the blocks that an engine makes of it: each covers all before it."""
    step = BLOCK_SIZE * token_bytes
    ends = range(step, len(prompt) + 1, step)
    digests = [hashlib.sha256(prompt[:end]).digest()[:8] for end in ends]
    return array("Q", b"".join(digests))


def keys_of(prompt: bytes) -> list[bytes]:
    return compute_prefix_keys(b"salt", prompt, BLOCK_BYTES)


def answered(prompt: bytes, found: list[int], token_bytes: int = 4) -> CacheHitReport:
    """The answer to it, of a replica that names blocks."""
    return CacheHitReport(
        keys_of(prompt),
        found,
        len(prompt) / BLOCK_BYTES,
        len(prompt) // token_bytes,
        0,
        names_of(prompt, token_bytes),
    )


def texts_of(numbers: list[int]) -> bytes:
    """A prompt of text blocks that are alike where the numbers are."""
    return b"".join(bytes([number]) * BLOCK_BYTES for number in numbers)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)


@example([[0, 0]], [[0, 0]], 7, b"12345")
@settings(max_examples=500)
@given(PROMPTS, PROMPTS, st.integers(0, 100), st.binary(max_size=BLOCK_BYTES - 1))
def test_what_is_found_is_what_the_replica_would_find(
    told: list[list[int]], held: list[list[int]], most: int, rest: bytes
) -> None:
    """`told` were answered by any replica, `held` were computed by this one, of which `most` blocks are left."""
    texts = TextBlockMap()
    index, other = EventPrefixIndex(texts, BLOCK_SIZE), EventPrefixIndex(texts, BLOCK_SIZE)
    blocks = [name for numbers in held for name in names_of(texts_of(numbers))][:most]
    index.on_blocks_stored(blocks)
    for numbers in told:
        other.on_cache_hit_report(answered(texts_of(numbers) + rest, []))
    for numbers in told + held:
        known = max(_common(numbers, before) for before in told)
        names = names_of(texts_of(numbers))[: known * PER_TEXT]
        there = next((n for n, name in enumerate(names) if name not in blocks), len(names))
        # Where a text ends within a token, its tokens are one fewer than would be even: a block's end is a block off.
        most_there = there + (len(rest) % 4 > 0)
        found = len(index.match_prefix(keys_of(texts_of(numbers))))
        assert there // PER_TEXT <= found <= most_there // PER_TEXT
    index.on_blocks_removed(blocks)
    assert all(index.match_prefix(keys_of(texts_of(numbers))) == [] for numbers in told)


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def test_what_is_on_its_way_is_believed_until_it_is_answered() -> None:
    prompt = texts_of([1, 2, 3])
    index, keys = EventPrefixIndex(TextBlockMap(), BLOCK_SIZE), keys_of(prompt)
    index.on_prompt_sent(keys)
    assert len(index.match_prefix(keys)) == 3
    index.on_blocks_stored(names_of(prompt)[:PER_TEXT])
    index.on_cache_hit_report(answered(prompt, []))
    assert len(index.match_prefix(keys)) == 1
    index.on_prompt_sent(keys)
    assert len(index.match_prefix(keys)) == 3
    index.clear()
    assert len(index.match_prefix(keys)) == 1
    index.on_prompt_sent(keys)
    index.resize(2)
    assert len(index.match_prefix(keys)) == 2


def test_text_that_continues_what_is_held_is_believed_on_top_of_it() -> None:
    index, first = EventPrefixIndex(TextBlockMap(), BLOCK_SIZE), texts_of([1, 2])
    index.on_prompt_sent(keys_of(first))
    index.on_prompt_sent(keys_of(first + texts_of([3])))
    index.on_blocks_stored(names_of(first))
    index.on_cache_hit_report(answered(first, []))
    assert len(index.match_prefix(keys_of(first + texts_of([3, 4])))) == 3


def test_an_answer_without_names_corrects_what_was_believed() -> None:
    index, plain, keys = (
        EventPrefixIndex(TextBlockMap(), BLOCK_SIZE),
        EstimatedPrefixIndex(),
        keys_of(b"x" * 2560),
    )
    for one in (index, plain):
        one.on_prompt_sent(keys_of(b"y" * 2560))
        one.on_prompt_sent(keys)
        found = one.match_prefix(keys)
        one.on_cache_hit_report(CacheHitReport(keys, found, 10.0, 640, 0, array("Q")))
    assert len(index.match_prefix(keys)) == len(plain.match_prefix(keys))
    assert len(index) == len(plain) == 10


@given(st.integers(2, 12), st.integers(1, 12))
def test_prompts_that_share_a_beginning_do_not_hide_each_other(one: int, two: int) -> None:
    """Their densities differ, so that each reaches too far or too short into the shared part."""
    shared, texts = texts_of([1, 2, 3, 4]), TextBlockMap()
    first, second = EventPrefixIndex(texts, BLOCK_SIZE), EventPrefixIndex(texts, BLOCK_SIZE)
    long, short = shared + texts_of([5] * one), shared + texts_of([6] * two)
    for index, prompt in ((first, long), (second, short)):
        index.on_blocks_stored(names_of(prompt))
        index.on_cache_hit_report(answered(prompt, []))
    assert len(first.match_prefix(keys_of(long))) == 4 + one
    assert len(second.match_prefix(keys_of(short))) == 4 + two
    assert len(first.match_prefix(keys_of(short))) == len(second.match_prefix(keys_of(long))) == 4


def test_the_latest_answer_says_what_a_text_is() -> None:
    """A template with today's date gives other tokens tomorrow."""
    prompt, index = texts_of([1, 2, 3]), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_cache_hit_report(answered(prompt, []))
    index.on_blocks_stored(names_of(b"!" * 64 + prompt))
    assert index.match_prefix(keys_of(prompt)) == []
    index.on_cache_hit_report(
        answered(prompt, [])._replace(block_names=names_of(b"!" * 64 + prompt))
    )
    assert len(index.match_prefix(keys_of(prompt))) == 3


def test_texts_take_bounded_memory_and_the_oldest_go_first() -> None:
    texts = TextBlockMap(max_weight=1000)
    index = EventPrefixIndex(texts, BLOCK_SIZE)
    for number in range(2000):
        prompt = texts_of([7, 7]) + b"%d" % number * BLOCK_BYTES
        index.on_cache_hit_report(answered(prompt, []))
        index.on_blocks_stored(names_of(prompt))
        assert len(texts) <= 250
    assert len(index.match_prefix(keys_of(prompt))) == len(keys_of(prompt))
    assert len(index.match_prefix(keys_of(texts_of([7, 7]) + b"0" * BLOCK_BYTES))) == 2


def test_a_growing_conversation_is_kept_once() -> None:
    texts = TextBlockMap(max_weight=816)
    index = EventPrefixIndex(texts, BLOCK_SIZE)
    for numbers in ([200, 201], *map(list, map(range, range(1, 101)))):
        for _ in range(2):
            index.on_cache_hit_report(answered(texts_of(numbers), []))
    assert len(texts) == 102


def test_a_prompt_of_which_the_beginning_is_named_is_known_so_far() -> None:
    prompt, index = texts_of([1, 2, 3, 4]), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_blocks_stored(names_of(prompt))
    index.on_cache_hit_report(
        answered(prompt, [])._replace(block_names=names_of(prompt)[: 2 * PER_TEXT + 1])
    )
    assert len(index.match_prefix(keys_of(prompt))) == 2


def test_of_token_blocks_larger_than_a_text_block_those_count_that_end_in_it() -> None:
    prompt, size = texts_of([1, 2, 3, 4]), 2 * PER_TEXT * BLOCK_SIZE
    index = EventPrefixIndex(TextBlockMap(), size)
    index.on_prompt_tokens_report(read(prompt))
    index.on_blocks_stored(compute_block_names("", ids_of(prompt), size))
    asked = ([1], [1, 9], [1, 2], [1, 2, 9], [1, 2, 3, 4])
    assert [len(index.match_prefix(keys_of(texts_of(one)))) for one in asked] == [0, 0, 2, 2, 4]


def test_a_prompt_shorter_than_a_block_is_not_known() -> None:
    index = EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_cache_hit_report(CacheHitReport([], [], 0.1, 6, 0, array("Q", [1])))
    assert index.match_prefix([]) == []


def ids_of(prompt: bytes) -> array[int]:
    """Tokens of four bytes."""
    return array("I", prompt[: len(prompt) // 4 * 4])


def read(prompt: bytes, salt: str = "") -> PromptTokensReport:
    """The answer to it, of a replica that tells its tokens."""
    return PromptTokensReport(keys_of(prompt), len(prompt) / BLOCK_BYTES, salt, ids_of(prompt))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 24), st.booleans())
def test_a_prompt_is_found_by_its_tokens(numbers: list[int], most: int, salted: bool) -> None:
    prompt, index = texts_of(numbers), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_prompt_tokens_report(read(prompt, "mine" if salted else ""))
    names = compute_block_names("", ids_of(prompt), BLOCK_SIZE)[:most]
    index.on_blocks_stored(names)
    assert len(index.match_prefix(keys_of(prompt))) == (0 if salted else len(names) // PER_TEXT)


@given(st.booleans())
def test_what_is_told_of_is_no_longer_believed(late: bool) -> None:
    """Whether the answer comes before what is told of its blocks, or after."""
    prompt, index = texts_of([1, 2, 3]), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    keys, names = keys_of(prompt), compute_block_names("", ids_of(prompt), BLOCK_SIZE)
    index.on_prompt_sent(keys)
    if late:
        index.on_prompt_tokens_report(read(prompt))
        index.on_blocks_stored(names)
    else:
        index.on_blocks_stored(names)
        index.on_prompt_tokens_report(read(prompt))
    assert index.match_prefix(keys) == [0, 0, 0]
    index.on_blocks_removed(names[2 * PER_TEXT :])
    assert index.match_prefix(keys) == [0, 0]
    index.on_blocks_removed(names)
    assert index.match_prefix(keys) == []


def test_what_was_there_before_it_was_told_of_stays_believed() -> None:
    prompt, index = texts_of([1, 2, 3]), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_prompt_sent(keys_of(prompt))
    index.on_prompt_tokens_report(read(prompt))
    index.on_blocks_stored(compute_block_names("", ids_of(prompt), BLOCK_SIZE)[:PER_TEXT])
    assert index.match_prefix(keys_of(prompt)) == [0, 1, 1]
    index.clear()
    assert index.match_prefix(keys_of(prompt)) == [0]
