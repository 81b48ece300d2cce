"""The KV cache events that vLLM and SGLang publish, read as what they say of blocks that can be found again.

Shapes: `vllm/distributed/kv_events.py` (vLLM 0.32), `sglang/srt/disaggregation/kv_events.py` (SGLang 0.5). Both
were arrays before they became maps, and both are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from argosy.policy import Hash

_Hash = int | Annotated[bytes, Meta(max_length=64)]
_Token = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Group = Annotated[int, Meta(ge=0, lt=1 << 10)]

NEAR = frozenset({None, "GPU", "CPU_PINNED"})
"""Where a block is had without computing it again. vLLM's host tier ("CPU") is not told of with the tokens."""
WHOLE = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of caches that hold all of a prefix; what is in the others alone is no hit."""


class _Metadata(msgspec.Struct):
    cache_salt: str | None = None


class _Stored(msgspec.Struct):
    """In the order of the arrays."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | _Metadata | None = None
    """SGLang's arrays end with their metadata here."""
    extra_keys: list[list[Any] | None] | None = None
    """Of each block, what it depends on besides tokens: LoRA, images, and the salt of a prompt's first block."""
    group_idx: _Group | None = None
    kv_cache_spec_kind: str | None = None


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    @property
    def salt(self) -> str | None:
        """SGLang's."""
        return self.lora_name.cache_salt if isinstance(self.lora_name, _Metadata) else None


class _StoredMap(_Stored, tag="BlockStored"):
    cache_salt: str | None = None

    @property
    def salt(self) -> str | None:
        """SGLang's."""
        return self.cache_salt


class _Removed(msgspec.Struct):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: _Group | None = None


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _RemovedMap(_Removed, tag="BlockRemoved"):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Arrays(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


class _Maps(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]


_arrays = msgspec.msgpack.Decoder(_Arrays).decode
_maps = msgspec.msgpack.Decoder(_Maps).decode


class Stored(NamedTuple):
    """Blocks that depend on their tokens and, through the prompt's first one, on the salt."""

    hashes: list[Hash]
    parent: Hash | None
    """The block before them; None: they begin a prompt."""
    ids: list[int]
    block_size: int
    salt: str
    """Of the prompt that they begin; empty: none."""


class Removed(NamedTuple):
    """Blocks, not all of which need have been told of."""

    hashes: list[Hash]


class Cleared(NamedTuple):
    """There are no blocks any more."""


class Batches:
    """Reads what one server publishes, as far as it concerns one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._is_adapter = False
        """The model is a LoRA adapter: it has said so."""
        self._groups: set[int | None] = set()
        """Those that hold whole prefixes."""

    def read(self, payload: bytes) -> Iterator[Stored | Removed | Cleared]:
        """The events of a batch, in order. Raises msgspec.DecodeError."""
        try:
            events: list[Any] = _maps(payload).events
        except msgspec.ValidationError:
            events = _arrays(payload).events
        for event in events:
            if isinstance(event, _StoredArray | _StoredMap):
                yield from self._stored(event)
            elif not isinstance(event, _Removed):
                yield Cleared()
            elif event.medium in NEAR and event.group_idx in self._groups:
                yield Removed(event.block_hashes)

    def _stored(self, event: _StoredArray | _StoredMap) -> Iterator[Stored | Cleared]:
        if event.medium not in NEAR or event.kv_cache_spec_kind not in WHOLE:
            return
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return  # some of a sliding window's, or copies that are told of without their tokens
        if event.lora_name == self._model and not self._is_adapter:
            self._is_adapter = True
            yield Cleared()  # what was told before is of the model beneath
        if not self._is_models(event):
            return
        self._groups.add(event.group_idx)
        count, salt = _plain(event)
        if count:
            ids = event.token_ids[: count * event.block_size]
            hashes = event.block_hashes[:count]
            yield Stored(hashes, event.parent_block_hash, ids, event.block_size, salt)

    def _is_models(self, event: _StoredArray | _StoredMap) -> bool:
        if self._is_adapter:
            return event.lora_name == self._model
        return event.lora_id is None and not isinstance(event.lora_name, str)


def _plain(event: _StoredArray | _StoredMap) -> tuple[int, str]:
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
