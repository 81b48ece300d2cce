"""What is read of published KV cache events: blocks that the model's prompts find again, in both shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.kv_event_publisher import (
    CLEARED,
    Event,
    as_array,
    batch,
    removed,
    stored,
)

from argosy.gateway.kv_events.event_decoder import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventDecoder,
)

SHAPES = pytest.mark.parametrize("shape", [dict, as_array], ids=["maps", "arrays"])
Shape = Callable[[Event], Any]
TWO = range(32)


def read(
    *events: object, model: str = "cat"
) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    return list(KvEventDecoder(model).decode_batch(msgspec.msgpack.encode([1.5, events])))


@SHAPES
def test_both_shapes_are_read(shape: Shape) -> None:
    events = [stored([1, b"2"], TWO), stored([3], range(16), b"2"), removed(1, b"2"), CLEARED]
    assert read(*map(shape, events)) == [
        BlockStored([1, b"2"], None, [*TWO], 16, ""),
        BlockStored([3], b"2", [*range(16)], 16, ""),
        BlockRemoved([1, b"2"]),
        AllBlocksCleared(),
    ]


@SHAPES
@pytest.mark.parametrize(
    "salted",
    [{"cache_salt": "mine"}, {"extra_keys": [["mine"], None]}],
    ids=["sglang", "vllm"],
)
def test_the_salt_is_of_the_prompt_that_is_begun(shape: Shape, salted: Event) -> None:
    (told,) = read(shape(stored([1, 2], TWO, **salted)))
    assert told == BlockStored([1, 2], None, [*TWO], 16, "mine")


def test_a_batch_of_vllm_0_32_is_read() -> None:
    """As it was received: a map for each event, the rank after them."""
    event = stored([1, 2], TWO) | {
        "lora_name": None,
        "extra_keys": [["abc"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "s",
    }
    (told,) = KvEventDecoder("cat").decode_batch(batch(event))
    assert told == BlockStored([1, 2], None, [*TWO], 16, "abc")


@SHAPES
def test_blocks_with_an_image_are_left_out_and_all_after_them(shape: Shape) -> None:
    keys = [["mine"], [["image", 3]], None]
    (told,) = read(shape(stored([1, 2, 3], range(48), extra_keys=keys)))
    assert told == BlockStored([1], None, [*range(16)], 16, "mine")
    assert read(shape(stored([3], range(16), 2, extra_keys=[["image"]]))) == []


@SHAPES
def test_of_a_model_and_its_adapters_only_what_is_asked_for_counts(shape: Shape) -> None:
    events = [
        stored([1], range(16)),
        stored([2], range(16), lora_id=1, lora_name="purr", extra_keys=[["purr", "mine"]]),
        stored([3], range(16), lora_id=7),
    ]
    assert read(*map(shape, events)) == [BlockStored([1], None, [*range(16)], 16, "")]
    assert read(*map(shape, [*events, events[0]]), model="purr") == [
        BlockStored([1], None, [*range(16)], 16, ""),
        AllBlocksCleared(),
        BlockStored([2], None, [*range(16)], 16, "mine"),
    ]


@SHAPES
def test_a_window_and_memory_far_away_do_not_count(shape: Shape) -> None:
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    whole = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    events = [
        stored([1], range(16), **whole),
        stored([1], range(16), **window),
        stored([9], range(16), medium="DISK", **whole),
        stored([9, 8], range(16), block_size=16, **whole),
        removed(1, group_idx=1),
        removed(1, group_idx=0, medium="DISK"),
        removed(1, group_idx=0),
    ]
    assert read(*map(shape, events)) == [
        BlockStored([1], None, [*range(16)], 16, ""),
        BlockRemoved([1]),
    ]


@pytest.mark.parametrize(
    "nonsense",
    [
        {"type": "BlockMelted"},
        stored([1], [-1] * 16),
        stored([1], [1 << 32] * 16),
        stored([b"x" * 65], range(16)),
        stored([1], [(1, 2)] * 16),  # type: ignore[list-item] # SGLang's with EAGLE
        {"type": "BlockStored"},
        "x",
    ],
)
def test_what_is_none_is_refused(nonsense: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        read(nonsense)


@given(st.binary(max_size=64))
def test_rubbish_is_refused(payload: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        list(KvEventDecoder("cat").decode_batch(payload))
