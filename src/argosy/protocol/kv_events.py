"""What a replica tells of the KV blocks that requests would find there: names, and events in which they come and go.

A block's name is the first `NAME_BYTES` of the hash that it is published under. That hash covers the cache domain
and every token before the block's end, so equal names mean equal prefixes of one domain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

BLOCK_NAME_BYTES = 8
"""Two of 10 million blocks share a name once in 300,000 times; then some prompt goes to a second-best replica."""


class TokenizationKey(msgspec.Struct, frozen=True, kw_only=True):
    """How texts become blocks. Replicas that read alike give the same text the same names."""

    tokenizer: str
    """Stands for the tokenizer and the chat template."""
    block_size: Annotated[int, Meta(ge=1)]
    """Tokens of a block."""


class KvEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came and went in a replica's prefix cache."""

    reset: TokenizationKey | None = None
    """Forget what was told before: from here on everything is told anew."""
    stored: bytes = b""
    """Names, one after the other."""
    removed: bytes = b""


def pack_block_names(names: Iterable[int]) -> bytes:
    """Names as they travel."""
    return array("Q", names).tobytes()


def unpack_block_names(packed: bytes) -> array[int]:
    """The names, as numbers that mean nothing. Raises ValueError for what are none."""
    names = array("Q")
    names.frombytes(packed)
    return names
