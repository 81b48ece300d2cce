"""KV events, by which a replica publishes the blocks in its prefix cache.

A block's name is the first `BLOCK_NAME_BYTES` of its published hash. The hash covers the cache domain and all tokens
up to the end of the block, so equal names stand for equal prefixes in one domain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

BLOCK_NAME_BYTES = 8
"""Bytes of a block name.

In 10 million blocks, two share a name with a probability of 1 in 300,000. A prompt then goes to a second-best replica.
"""


class TokenizationKey(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that determine which blocks a text becomes. Equal keys give the same text the same block names."""

    tokenizer: str
    """Identifier of the tokenizer and the chat template."""
    block_size: Annotated[int, Meta(ge=1)]
    """Tokens per block."""


class KvEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Change of a replica's prefix cache."""

    reset: TokenizationKey | None = None
    """Present if the reader has to forget all earlier events, because all blocks are published again."""
    stored: bytes = b""
    """Packed names of the stored blocks."""
    removed: bytes = b""
    """Packed names of the removed blocks."""


def pack_block_names(names: Iterable[int]) -> bytes:
    """Encode block names for a `KvEvent`."""
    return array("Q", names).tobytes()


def unpack_block_names(packed: bytes) -> array[int]:
    """Decode the block names of a `KvEvent`.

    Raises:
        ValueError: The length is not a multiple of `BLOCK_NAME_BYTES`.
    """
    names = array("Q")
    names.frombytes(packed)
    return names
