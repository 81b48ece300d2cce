"""What all who follow a replica's KV blocks have in common: texts of a pool, what is wrong, and when to ask again."""

from __future__ import annotations

from weakref import WeakValueDictionary

import msgspec

from argosy.policy import TextBlockMap
from argosy.protocol import TokenizationKey

RETRY_INTERVAL_S = 0.25
UNSUPPORTED_RETRY_INTERVAL_S = 30.0
"""When a server that does not tell, or too much, is asked again."""

TextBlockMaps = WeakValueDictionary[TokenizationKey, TextBlockMap]
"""The texts of a pool, by how its replicas read; forgotten when nobody reads so any more."""


class TooManyBlocksError(Exception):
    """The replica holds more blocks than can be followed."""


KV_EVENT_ERRORS = (
    ValueError,
    OverflowError,
    RecursionError,
    msgspec.DecodeError,
    TooManyBlocksError,
)
"""What comes of events that cannot be followed."""


def get_text_block_map(
    tokenization_key: TokenizationKey, text_block_maps: TextBlockMaps
) -> TextBlockMap:
    """The texts of the replicas that read like this."""
    texts = text_block_maps.get(tokenization_key)
    if texts is None:
        texts = text_block_maps[tokenization_key] = TextBlockMap()
    return texts
