"""Masks over the vocabulary: int32 words with one bit per token, and one more bit for the end of the output."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ALL_TOKENS = -1
"""Word of a mask with all bits set."""


def count_mask_words(vocab_size: int) -> int:
    """Return the number of words of a mask. Bit `vocab_size` stands for the end of the output."""
    return vocab_size // 32 + 1


def full_mask(vocab_size: int) -> NDArray[np.int32]:
    """Return the mask that allows every token, without the bit for the end of the output."""
    return build_mask(np.ones(vocab_size, bool))


def build_mask(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the mask that allows the tokens with a true value in `allowed` [V]."""
    bits = np.zeros(count_mask_words(len(allowed)) * 32, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def set_bits(mask: NDArray[np.int32], ids: Iterable[int]) -> None:
    """Allow tokens. Ids outside the mask are ignored."""
    octets = mask.view(np.uint8)
    for token_id in ids:
        if 0 <= token_id < 8 * len(octets):
            octets[token_id >> 3] |= 1 << (token_id & 7)


def clear_bits(mask: NDArray[np.int32], ids: Iterable[int]) -> None:
    """Exclude tokens. Ids outside the mask are ignored."""
    octets = mask.view(np.uint8)
    for token_id in ids:
        if 0 <= token_id < 8 * len(octets):
            octets[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))


def has_bit(mask: NDArray[np.int32], token_id: int) -> bool:
    """Return whether a token is allowed, whose id must be inside the mask."""
    return bool(mask.view(np.uint8)[token_id >> 3] >> (token_id & 7) & 1)
