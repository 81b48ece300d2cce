"""The KV cache events that vLLM and SGLang publish, read as what they say of blocks that can be found again.

Shapes: `vllm/distributed/kv_events.py` (vLLM 0.32), `sglang/srt/disaggregation/kv_events.py` (SGLang 0.5). Both
were arrays before they became maps, and both are read.
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
"""Where a block is had without computing it again. vLLM's host tier ("CPU") is not told of with the tokens."""
FULL_PREFIX_CACHE_KINDS = frozenset(
    {None, "full_attention", "mla_attention", "sink_full_attention"}
)
"""Kinds of caches that hold all of a prefix; what is in the others alone is no hit."""


class _SglangMetadata(msgspec.Struct):
    cache_salt: str | None = None


class _StoredEvent(msgspec.Struct):
    """In the order of the arrays."""

    block_hashes: list[_BlockHash]
    parent_block_hash: _BlockHash | None
    token_ids: list[_TokenId]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | _SglangMetadata | None = None
    """SGLang's arrays end with their metadata here."""
    extra_keys: list[list[Any] | None] | None = None
    """Of each block, what it depends on besides tokens: LoRA, images, and the salt of a prompt's first block."""
    group_idx: _GroupIndex | None = None
    kv_cache_spec_kind: str | None = None


class _StoredEventArray(_StoredEvent, tag="BlockStored", array_like=True):
    @property
    def salt(self) -> str | None:
        """SGLang's."""
        return self.lora_name.cache_salt if isinstance(self.lora_name, _SglangMetadata) else None


class _StoredEventMap(_StoredEvent, tag="BlockStored"):
    cache_salt: str | None = None

    @property
    def salt(self) -> str | None:
        """SGLang's."""
        return self.cache_salt


class _RemovedEvent(msgspec.Struct):
    block_hashes: list[_BlockHash]
    medium: str | None = None
    group_idx: _GroupIndex | None = None


class _RemovedEventArray(_RemovedEvent, tag="BlockRemoved", array_like=True):
    pass


class _RemovedEventMap(_RemovedEvent, tag="BlockRemoved"):
    pass


class _ClearedEventArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _ClearedEventMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredEventArray | _RemovedEventArray | _ClearedEventArray]


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredEventMap | _RemovedEventMap | _ClearedEventMap]


_decode_array_batch = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_map_batch = msgspec.msgpack.Decoder(_MapBatch).decode


class BlockStored(NamedTuple):
    """Blocks that depend on their tokens and, through the prompt's first one, on the salt."""

    block_hashes: list[EngineBlockHash]
    parent_block_hash: EngineBlockHash | None
    """The block before them; None: they begin a prompt."""
    token_ids: list[int]
    block_size: int
    cache_salt: str
    """Of the prompt that they begin; empty: none."""


class BlockRemoved(NamedTuple):
    """Blocks, not all of which need have been told of."""

    block_hashes: list[EngineBlockHash]


class AllBlocksCleared(NamedTuple):
    """There are no blocks any more."""


class KvEventDecoder:
    """Reads what one server publishes, as far as it concerns one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._is_adapter = False
        """The model is a LoRA adapter: it has said so."""
        self._full_prefix_groups: set[int | None] = set()
        """Those that hold whole prefixes."""

    def decode_batch(
        self, payload: bytes
    ) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
        """The events of a batch, in order. Raises msgspec.DecodeError."""
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
            return  # some of a sliding window's, or copies that are told of without their tokens
        if event.lora_name == self._model and not self._is_adapter:
            self._is_adapter = True
            yield AllBlocksCleared()  # what was told before is of the model beneath
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
    """How many of the blocks, from the first, are only tokens (no images), and the salt they begin with."""
    salt = event.salt or ""
    for number, keys in enumerate(event.extra_keys or ()):
        others = [key for key in keys or () if key != event.lora_name]
        match others:
            case []:
                pass
            case [str(first)] if number == 0 and event.parent_block_hash is None:
                salt = first
            case _:
                return number, salt
    return len(event.block_hashes), salt
