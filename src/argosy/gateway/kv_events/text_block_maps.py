"""Parts that all KV event subscribers share: text block maps of a pool, error types, retry intervals."""

from __future__ import annotations

from weakref import WeakValueDictionary

import msgspec

from argosy.policy import TextBlockMap
from argosy.protocol import TokenizationKey

RETRY_INTERVAL_S = 0.25
UNSUPPORTED_RETRY_INTERVAL_S = 30.0
"""Time after which a server without KV events, or with too many blocks, is tried again."""

TextBlockMaps = WeakValueDictionary[TokenizationKey, TextBlockMap]
"""Text block maps of a pool by tokenization. A map disappears when no replica's index uses it any more."""


KV_EVENT_ERRORS = (ValueError, OverflowError, RecursionError, msgspec.DecodeError)
"""Exceptions raised for KV events that cannot be decoded or indexed."""
