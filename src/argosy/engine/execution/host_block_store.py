"""Evicted KV blocks in host memory, each with a checksum that is verified when it comes back."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class HostBlockStore:
    """Slot -> the bytes of one KV block of all layers."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}
        self._checksums: dict[int, int] = {}

    def save(self, slot: int, data: Tensor) -> None:
        """Keep a block (flat uint8, owned by the store from now on); replaces what the slot held."""
        self.blocks[slot] = data
        self._checksums[slot] = _checksum(data)

    def pop(self, slot: int) -> Tensor | None:
        """The slot's block, given up by the store; None when it is missing or not what was saved."""
        data = self.blocks.pop(slot, None)
        if data is None or _checksum(data) != self._checksums.pop(slot):
            return None
        return data


def _checksum(data: Tensor) -> int:
    return zlib.crc32(data.numpy().data)
