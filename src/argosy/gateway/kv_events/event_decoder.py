"""Decoder for the KV cache events of vLLM and SGLang, reduced to blocks that a later prompt can hit.

The formats are defined in `vllm/distributed/kv_events.py` (vLLM 0.32) and
`sglang/srt/disaggregation/kv_events.py` (SGLang 0.5). Older versions encode events as arrays, newer ones as maps.
The decoder reads both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from argosy.policy import EngineBlockHash

_BlockHash = int | Annotated[bytes, Meta(max_length=64)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
_GroupIndex = Annotated[int, Meta(ge=0, lt=1 << 10)]

REUSABLE_MEDIA = frozenset({None, "GPU", "CPU_PINNED"})
"""Memory tiers whose blocks need no recomputation. Events of vLLM's host tier ("CPU") carry no tokens."""
FULL_PREFIX_CACHE_KINDS = frozenset(
    {None, "full_attention", "mla_attention", "sink_full_attention"}
)
"""Kinds of KV caches that hold a whole prefix. Blocks in other kinds alone are no cache hit."""


class _SglangMetadata(msgspec.Struct):
    cache_salt: str | None = None


class _StoredEvent(msgspec.Struct):
    """Fields of a stored event, in the order of the array format."""

    block_hashes: list[_BlockHash]
    parent_block_hash: _BlockHash | None
    token_ids: list[_TokenId]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | _SglangMetadata | None = None
    """Name of the LoRA adapter. In this place SGLang's arrays end with their metadata."""
    extra_keys: list[list[Any] | None] | None = None
    """Other inputs of each block besides tokens: LoRA, images, and the salt in the first block of a prompt."""
    group_idx: _GroupIndex | None = None
    kv_cache_spec_kind: str | None = None


class _StoredEventArray(_StoredEvent, tag="BlockStored", array_like=True):
    @property
    def salt(self) -> str | None:
        """Cache salt that SGLang sends."""
        return self.lora_name.cache_salt if isinstance(self.lora_name, _SglangMetadata) else None


class _StoredEventMap(_StoredEvent, tag="BlockStored"):
    cache_salt: str | None = None

    @property
    def salt(self) -> str | None:
        """Cache salt that SGLang sends."""
        return self.cache_salt


class _RemovedEvent(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_BlockHash]
    medium: str | None = None
    group_idx: _GroupIndex | None = None


class _RemovedEventArray(_RemovedEvent, tag="BlockRemoved", array_like=True):
    pass


class _ClearedEvent(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ClearedEventArray(_ClearedEvent, tag="AllBlocksCleared", array_like=True):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredEventArray | _RemovedEventArray | _ClearedEventArray]


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredEventMap | _RemovedEvent | _ClearedEvent]


_decode_array_batch = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_map_batch = msgspec.msgpack.Decoder(_MapBatch).decode


class BlockStored(NamedTuple):
    """Event for stored blocks, which depend only on their tokens and on the salt of their prompt."""

    block_hashes: list[EngineBlockHash]
    parent_block_hash: EngineBlockHash | None
    """Hash of the block before them; None if they begin a prompt."""
    token_ids: list[int]
    block_size: int
    cache_salt: str
    """Salt of the prompt that they begin; empty if none."""


class BlockRemoved(NamedTuple):
    """Event for removed blocks. Some of them may never have been reported as stored."""

    block_hashes: list[EngineBlockHash]


class AllBlocksCleared(NamedTuple):
    """Event for the removal of all blocks."""


class KvEventDecoder:
    """Decoder for the batches of one server, restricted to the events of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._is_adapter = False
        """Whether an event showed that the model is a LoRA adapter."""
        self._full_prefix_groups: set[int | None] = set()
        """Cache groups that hold whole prefixes."""

    def decode_batch(
        self, payload: bytes
    ) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Yield the events of an encoded batch in order. Raises msgspec.DecodeError."""
        try:
            events: list[Any] = _decode_map_batch(payload).events
        except msgspec.ValidationError:
            events = _decode_array_batch(payload).events
        for event in events:
            if isinstance(event, _StoredEventArray | _StoredEventMap):
                yield from self._decode_stored(event)
            elif not isinstance(event, _RemovedEvent):
                yield AllBlocksCleared()
            elif event.medium in REUSABLE_MEDIA and event.group_idx in self._full_prefix_groups:
                yield BlockRemoved(event.block_hashes)

    def _decode_stored(
        self, event: _StoredEventArray | _StoredEventMap
    ) -> Iterator[BlockStored | AllBlocksCleared]:
        if (
            event.medium not in REUSABLE_MEDIA
            or event.kv_cache_spec_kind not in FULL_PREFIX_CACHE_KINDS
        ):
            return
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return  # part of a sliding window, or copies of blocks without their tokens
        if event.lora_name == self._model and not self._is_adapter:
            self._is_adapter = True
            yield AllBlocksCleared()  # earlier events belong to the base model
        if not self._is_for_model(event):
            return
        self._full_prefix_groups.add(event.group_idx)
        count, salt = _count_text_only_blocks(event)
        if count:
            ids = event.token_ids[: count * event.block_size]
            hashes = event.block_hashes[:count]
            yield BlockStored(hashes, event.parent_block_hash, ids, event.block_size, salt)

    def _is_for_model(self, event: _StoredEventArray | _StoredEventMap) -> bool:
        if self._is_adapter:
            return event.lora_name == self._model
        return event.lora_id is None and not isinstance(event.lora_name, str)


def _count_text_only_blocks(event: _StoredEventArray | _StoredEventMap) -> tuple[int, str]:
    """Return the number of leading blocks that depend only on tokens (no images), and the salt of the first block."""
    salt = event.salt or ""
    for number, keys in enumerate(event.extra_keys or ()):
        other_keys = [key for key in keys or () if key != event.lora_name]
        match other_keys:
            case []:
                pass
            case [str(first)] if number == 0 and event.parent_block_hash is None:
                salt = first
            case _:
                return number, salt
    return len(event.block_hashes), salt
