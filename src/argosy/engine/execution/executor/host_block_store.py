"""Store of evicted KV blocks in host memory, with checksums that are verified on restore."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class HostBlockStore:
    """Store that maps a host slot to the bytes of one KV block, all layers together."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}
        self._checksums: dict[int, int] = {}

    def save(self, slot: int, data: Tensor) -> None:
        """Save a block (flat uint8) and take ownership of it. The slot's previous content is replaced."""
        self.blocks[slot] = data
        self._checksums[slot] = _checksum(data)

    def pop(self, slot: int) -> Tensor | None:
        """Remove and return the slot's block, or None if it is missing or its checksum is wrong."""
        data = self.blocks.pop(slot, None)
        if data is None or _checksum(data) != self._checksums.pop(slot):
            return None
        return data


def _checksum(data: Tensor) -> int:
    return zlib.crc32(data.numpy().data)
