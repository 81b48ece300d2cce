"""Memory of a paged KV cache on any device, with operations to copy, read and write whole blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.huge_pages import PagePrefaulter

if TYPE_CHECKING:
    from torch import Tensor


class KvCacheTensor:
    """KV memory of all layers, divided into blocks whose internal layout the attention kernel defines."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Wrap keys and values, each [layers, num_blocks, ...], contiguous, of one dtype and shape."""
        self.keys = keys
        self.values = values
        self._prefaulter = PagePrefaulter([*keys, *values] if keys.device.type == "cpu" else [])
        self.ensure_block(0)

    def ensure_block(self, block: int) -> None:
        """Prefault memory in the background for the blocks after `block`, up to which blocks are now used."""
        self._prefaulter.ensure(block)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks of all layers in order, given as (source, destination) pairs."""
        for source, destination in pairs:
            self.keys[:, destination].copy_(self.keys[:, source])
            self.values[:, destination].copy_(self.values[:, source])

    def read_block(self, block: int) -> Tensor:
        """Return a copy of a block's keys and then values of all layers, as one flat uint8 tensor."""
        parts = torch.stack((self.keys[:, block], self.values[:, block]))
        return parts.flatten().view(torch.uint8)

    def write_block(self, block: int, data: Tensor) -> None:
        """Write the data that `read_block` returned into a block.

        Raises:
            ValueError: The data has another size or dtype.
        """
        part = self.keys[:, block]
        expected = 2 * part.numel() * part.element_size()
        if data.numel() != expected or data.dtype != torch.uint8:
            raise ValueError(
                f"a block is {expected} uint8 bytes, got {data.numel()} of {data.dtype}; "
                "write only data from read_block of the same model and settings"
            )
        keys, values = data.clone().view(part.dtype).view(2, *part.shape)
        part.copy_(keys)
        self.values[:, block].copy_(values)
