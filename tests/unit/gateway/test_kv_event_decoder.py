"""Decoding of published KV cache events, encoded as maps or as arrays, into blocks that prompts can find again."""

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
    blocks_removed,
    blocks_stored,
    encode_batch,
    to_array,
)

from argosy.gateway.kv_events.event_decoder import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventDecoder,
)

ENCODINGS = pytest.mark.parametrize("encode", [dict, to_array], ids=["maps", "arrays"])
Encoder = Callable[[Event], Any]
TWO_BLOCKS = range(32)


def decode(
    *events: object, model: str = "cat"
) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    return list(KvEventDecoder(model).decode_batch(msgspec.msgpack.encode([1.5, events])))


@ENCODINGS
def test_maps_and_arrays_are_decoded_alike(encode: Encoder) -> None:
    events = [
        blocks_stored([1, b"2"], TWO_BLOCKS),
        blocks_stored([3], range(16), b"2"),
        blocks_removed(1, b"2"),
        CLEARED,
    ]
    assert decode(*map(encode, events)) == [
        BlockStored([1, b"2"], None, [*TWO_BLOCKS], 16, ""),
        BlockStored([3], b"2", [*range(16)], 16, ""),
        BlockRemoved([1, b"2"]),
        AllBlocksCleared(),
    ]


@ENCODINGS
@pytest.mark.parametrize(
    "salt_field",
    [{"cache_salt": "mine"}, {"extra_keys": [["mine"], None]}],
    ids=["sglang", "vllm"],
)
def test_salt_of_first_block_is_decoded(encode: Encoder, salt_field: Event) -> None:
    (event,) = decode(encode(blocks_stored([1, 2], TWO_BLOCKS, **salt_field)))
    assert event == BlockStored([1, 2], None, [*TWO_BLOCKS], 16, "mine")


def test_batch_of_vllm_0_32_is_decoded() -> None:
    """The batch has the form in which it was received: a map for each event, followed by the rank."""
    published = blocks_stored([1, 2], TWO_BLOCKS) | {
        "lora_name": None,
        "extra_keys": [["abc"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "s",
    }
    (event,) = KvEventDecoder("cat").decode_batch(encode_batch(published))
    assert event == BlockStored([1, 2], None, [*TWO_BLOCKS], 16, "abc")


@ENCODINGS
def test_blocks_with_image_and_their_successors_are_skipped(encode: Encoder) -> None:
    keys = [["mine"], [["image", 3]], None]
    (event,) = decode(encode(blocks_stored([1, 2, 3], range(48), extra_keys=keys)))
    assert event == BlockStored([1], None, [*range(16)], 16, "mine")
    assert decode(encode(blocks_stored([3], range(16), 2, extra_keys=[["image"]]))) == []


@ENCODINGS
def test_blocks_of_other_adapters_are_skipped(encode: Encoder) -> None:
    events = [
        blocks_stored([1], range(16)),
        blocks_stored([2], range(16), lora_id=1, lora_name="purr", extra_keys=[["purr", "mine"]]),
        blocks_stored([3], range(16), lora_id=7),
    ]
    assert decode(*map(encode, events)) == [BlockStored([1], None, [*range(16)], 16, "")]
    assert decode(*map(encode, [*events, events[0]]), model="purr") == [
        BlockStored([1], None, [*range(16)], 16, ""),
        AllBlocksCleared(),
        BlockStored([2], None, [*range(16)], 16, "mine"),
    ]


@ENCODINGS
def test_sliding_window_and_disk_blocks_are_skipped(encode: Encoder) -> None:
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    full_attention = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    events = [
        blocks_stored([1], range(16), **full_attention),
        blocks_stored([1], range(16), **window),
        blocks_stored([9], range(16), medium="DISK", **full_attention),
        blocks_stored([9, 8], range(16), block_size=16, **full_attention),
        blocks_removed(1, group_idx=1),
        blocks_removed(1, group_idx=0, medium="DISK"),
        blocks_removed(1, group_idx=0),
    ]
    assert decode(*map(encode, events)) == [
        BlockStored([1], None, [*range(16)], 16, ""),
        BlockRemoved([1]),
    ]


@pytest.mark.parametrize(
    "nonsense",
    [
        {"type": "BlockMelted"},
        blocks_stored([1], [-1] * 16),
        blocks_stored([1], [1 << 32] * 16),
        blocks_stored([b"x" * 65], range(16)),
        blocks_stored([1], [(1, 2)] * 16),  # type: ignore[list-item] # SGLang's with EAGLE
        {"type": "BlockStored"},
        "x",
    ],
)
def test_invalid_event_is_rejected(nonsense: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(nonsense)


@given(st.binary(max_size=64))
def test_random_bytes_are_rejected(payload: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        list(KvEventDecoder("cat").decode_batch(payload))
