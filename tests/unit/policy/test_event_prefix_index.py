"""Prefix index from KV events: it finds the text that a replica's blocks cover, once a response has named them."""

from __future__ import annotations

import hashlib
from array import array

import pytest
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
BLOCKS_PER_TEXT = 4
"""Token blocks in a text block if a token has four bytes."""


def block_names(prompt: bytes, token_bytes: int = 4) -> array[int]:
    """Return the names of an engine's blocks. Each covers the whole prompt before its end."""
    step = BLOCK_SIZE * token_bytes
    ends = range(step, len(prompt) + 1, step)
    digests = [hashlib.sha256(prompt[:end]).digest()[:8] for end in ends]
    return array("Q", b"".join(digests))


def prefix_keys(prompt: bytes) -> list[bytes]:
    return compute_prefix_keys(b"salt", prompt, BLOCK_BYTES)


def cache_hit_report(prompt: bytes, found: list[int], token_bytes: int = 4) -> CacheHitReport:
    """Return the report of a replica that names its blocks."""
    return CacheHitReport(
        prefix_keys(prompt),
        found,
        len(prompt) / BLOCK_BYTES,
        len(prompt) // token_bytes,
        0,
        block_names(prompt, token_bytes),
    )


def prompt_of_blocks(numbers: list[int]) -> bytes:
    """Return a prompt of text blocks, equal where the numbers are equal."""
    return b"".join(bytes([number]) * BLOCK_BYTES for number in numbers)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)


@example([[0, 0]], [[0, 0]], 7, b"12345")
@settings(max_examples=80)
@given(PROMPTS, PROMPTS, st.integers(0, 100), st.binary(max_size=BLOCK_BYTES - 1))
def test_match_is_the_prefix_that_the_replica_holds(
    reported: list[list[int]], computed: list[list[int]], remaining: int, rest: bytes
) -> None:
    """Any replica reported `reported`. This one computed `computed` and keeps its first `remaining` blocks."""
    text_blocks = TextBlockMap()
    index, other = (
        EventPrefixIndex(text_blocks, BLOCK_SIZE),
        EventPrefixIndex(text_blocks, BLOCK_SIZE),
    )
    blocks = [name for numbers in computed for name in block_names(prompt_of_blocks(numbers))][
        :remaining
    ]
    index.on_blocks_stored(blocks)
    for numbers in reported:
        other.on_cache_hit_report(cache_hit_report(prompt_of_blocks(numbers) + rest, []))
    for numbers in reported + computed:
        known = max(_common(numbers, before) for before in reported)
        names = block_names(prompt_of_blocks(numbers))[: known * BLOCKS_PER_TEXT]
        expected = next((n for n, name in enumerate(names) if name not in blocks), len(names))
        # If a text ends within a token, it has one token less than its bytes suggest, which moves a block's end by one.
        max_expected = expected + (len(rest) % 4 > 0)
        found = len(index.match_prefix(prefix_keys(prompt_of_blocks(numbers))))
        assert expected // BLOCKS_PER_TEXT <= found <= max_expected // BLOCKS_PER_TEXT
    index.on_blocks_removed(blocks)
    assert all(
        index.match_prefix(prefix_keys(prompt_of_blocks(numbers))) == [] for numbers in reported
    )


def _common(first: list[int], second: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def test_sent_prompt_is_assumed_cached_until_the_response() -> None:
    prompt = prompt_of_blocks([1, 2, 3])
    index, keys = EventPrefixIndex(TextBlockMap(), BLOCK_SIZE), prefix_keys(prompt)
    index.on_prompt_sent(keys)
    assert len(index.match_prefix(keys)) == 3
    index.on_blocks_stored(block_names(prompt)[:BLOCKS_PER_TEXT])
    index.on_cache_hit_report(cache_hit_report(prompt, []))
    assert len(index.match_prefix(keys)) == 1
    index.on_prompt_sent(keys)
    assert len(index.match_prefix(keys)) == 3
    index.clear()
    assert len(index.match_prefix(keys)) == 1
    index.on_prompt_sent(keys)
    index.resize(2)
    assert len(index.match_prefix(keys)) == 2


def test_response_without_block_names_corrects_the_estimate() -> None:
    index, plain, keys = (
        EventPrefixIndex(TextBlockMap(), BLOCK_SIZE),
        EstimatedPrefixIndex(),
        prefix_keys(b"x" * 2560),
    )
    for each in (index, plain):
        each.on_prompt_sent(prefix_keys(b"y" * 2560))
        each.on_prompt_sent(keys)
        found = each.match_prefix(keys)
        each.on_cache_hit_report(CacheHitReport(keys, found, 10.0, 640, 0, array("Q")))
    assert len(index.match_prefix(keys)) == len(plain.match_prefix(keys))
    assert len(index) == len(plain) == 10


@given(st.integers(2, 12), st.integers(1, 12))
def test_prompts_with_a_shared_prefix_do_not_hide_each_other(
    first_growth: int, second_growth: int
) -> None:
    """Their token densities differ, so each estimate of the shared part is too long or too short."""
    shared, text_blocks = prompt_of_blocks([1, 2, 3, 4]), TextBlockMap()
    first, second = (
        EventPrefixIndex(text_blocks, BLOCK_SIZE),
        EventPrefixIndex(text_blocks, BLOCK_SIZE),
    )
    long, short = (
        shared + prompt_of_blocks([5] * first_growth),
        shared + prompt_of_blocks([6] * second_growth),
    )
    for index, prompt in ((first, long), (second, short)):
        index.on_blocks_stored(block_names(prompt))
        index.on_cache_hit_report(cache_hit_report(prompt, []))
    assert len(first.match_prefix(prefix_keys(long))) == 4 + first_growth
    assert len(second.match_prefix(prefix_keys(short))) == 4 + second_growth
    assert (
        len(first.match_prefix(prefix_keys(short)))
        == len(second.match_prefix(prefix_keys(long)))
        == 4
    )


def test_latest_response_replaces_block_names_of_a_text() -> None:
    """A chat template with the date gives other tokens on the next day."""
    prompt, index = prompt_of_blocks([1, 2, 3]), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_cache_hit_report(cache_hit_report(prompt, []))
    index.on_blocks_stored(block_names(b"!" * 64 + prompt))
    assert index.match_prefix(prefix_keys(prompt)) == []
    index.on_cache_hit_report(
        cache_hit_report(prompt, [])._replace(block_names=block_names(b"!" * 64 + prompt))
    )
    assert len(index.match_prefix(prefix_keys(prompt))) == 3


def test_text_map_is_bounded_and_evicts_the_oldest() -> None:
    text_blocks = TextBlockMap(max_weight=1000)
    index = EventPrefixIndex(text_blocks, BLOCK_SIZE)
    for number in range(2000):
        prompt = prompt_of_blocks([7, 7]) + b"%d" % number * BLOCK_BYTES
        index.on_cache_hit_report(cache_hit_report(prompt, []))
        index.on_blocks_stored(block_names(prompt))
        assert len(text_blocks) <= 250
    assert len(index.match_prefix(prefix_keys(prompt))) == len(prefix_keys(prompt))
    assert len(index.match_prefix(prefix_keys(prompt_of_blocks([7, 7]) + b"0" * BLOCK_BYTES))) == 2


def test_growing_conversation_is_stored_once() -> None:
    text_blocks = TextBlockMap(max_weight=816)
    index = EventPrefixIndex(text_blocks, BLOCK_SIZE)
    for numbers in ([200, 201], *map(list, map(range, range(1, 101)))):
        for _ in range(2):
            index.on_cache_hit_report(cache_hit_report(prompt_of_blocks(numbers), []))
    assert len(text_blocks) == 102


def test_large_token_blocks_count_for_the_text_block_where_they_end() -> None:
    prompt, size = prompt_of_blocks([1, 2, 3, 4]), 2 * BLOCKS_PER_TEXT * BLOCK_SIZE
    index = EventPrefixIndex(TextBlockMap(), size)
    index.on_prompt_tokens_report(prompt_tokens_report(prompt))
    index.on_blocks_stored(compute_block_names("", token_ids(prompt), size))
    prompts = ([1], [1, 9], [1, 2], [1, 2, 9], [1, 2, 3, 4])
    assert [
        len(index.match_prefix(prefix_keys(prompt_of_blocks(numbers)))) for numbers in prompts
    ] == [0, 0, 2, 2, 4]


def test_prompt_shorter_than_a_block_is_unknown() -> None:
    index = EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_cache_hit_report(CacheHitReport([], [], 0.1, 6, 0, array("Q", [1])))
    assert index.match_prefix([]) == []


def token_ids(prompt: bytes) -> array[int]:
    """Return the tokens of a prompt, four bytes each."""
    return array("I", prompt[: len(prompt) // 4 * 4])


def prompt_tokens_report(prompt: bytes, salt: str = "") -> PromptTokensReport:
    """Return the report of a replica that returns the prompt's tokens."""
    return PromptTokensReport(
        prefix_keys(prompt), len(prompt) / BLOCK_BYTES, salt, token_ids(prompt)
    )


@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 24), st.booleans())
def test_prompt_is_found_by_its_tokens(numbers: list[int], remaining: int, salted: bool) -> None:
    prompt, index = prompt_of_blocks(numbers), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    index.on_prompt_tokens_report(prompt_tokens_report(prompt, "mine" if salted else ""))
    names = compute_block_names("", token_ids(prompt), BLOCK_SIZE)[:remaining]
    index.on_blocks_stored(names)
    assert len(index.match_prefix(prefix_keys(prompt))) == (
        0 if salted else len(names) // BLOCKS_PER_TEXT
    )


@pytest.mark.parametrize("report_first", [True, False])
def test_reported_blocks_replace_the_estimate(report_first: bool) -> None:
    """The response may arrive before the KV events or after them."""
    prompt, index = prompt_of_blocks([1, 2, 3]), EventPrefixIndex(TextBlockMap(), BLOCK_SIZE)
    keys, names = prefix_keys(prompt), compute_block_names("", token_ids(prompt), BLOCK_SIZE)
    index.on_prompt_sent(keys)
    if report_first:
        index.on_prompt_tokens_report(prompt_tokens_report(prompt))
        index.on_blocks_stored(names)
    else:
        index.on_blocks_stored(names)
        index.on_prompt_tokens_report(prompt_tokens_report(prompt))
    assert index.match_prefix(keys) == [0, 0, 0]
    index.on_blocks_removed(names[2 * BLOCKS_PER_TEXT :])
    assert index.match_prefix(keys) == [0, 0]
    index.on_blocks_removed(names)
    assert index.match_prefix(keys) == []
