"""Memory of a paged KV cache on any device, with operations to copy, read and write whole blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.kernels.huge_pages import PagePrefaulter

if TYPE_CHECKING:
    from torch import Tensor


class KvCacheTensor:
    """KV memory, divided into blocks whose internal layout the attention kernel defines."""

    def __init__(self, keys: Tensor, values: Tensor | None) -> None:
        """Wrap keys and values, each [layers of a block, num_blocks, ...], contiguous, of one dtype and shape.

        `values` is None if they are part of the keys.
        """
        self._parts = [keys] if values is None else [keys, values]
        layers = [layer for part in self._parts for layer in part]
        self._prefaulter = PagePrefaulter(layers if keys.device.type == "cpu" else [])
        self.ensure_block(0)

    def ensure_block(self, block: int) -> None:
        """Prefault memory in the background for the blocks after `block`, up to which blocks are now used."""
        self._prefaulter.ensure(block)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in order, given as (source, destination) pairs."""
        for source, destination in pairs:
            for part in self._parts:
                part[:, destination].copy_(part[:, source])

    def read_block(self, block: int) -> Tensor:
        """Return a copy of a block's keys and then values, as one flat uint8 tensor."""
        return torch.stack([part[:, block] for part in self._parts]).flatten().view(torch.uint8)

    def write_block(self, block: int, data: Tensor) -> None:
        """Write the data that `read_block` returned into a block.

        Raises:
            ValueError: The data has another size or dtype.
        """
        blocks = [part[:, block] for part in self._parts]
        expected = sum(part.numel() * part.element_size() for part in blocks)
        if data.numel() != expected or data.dtype != torch.uint8:
            raise ValueError(
                f"a block is {expected} uint8 bytes, got {data.numel()} of {data.dtype}; "
                "write only data from read_block of the same model and settings"
            )
        stored = data.clone().view(blocks[0].dtype).view(len(blocks), *blocks[0].shape)
        for part, content in zip(blocks, stored, strict=True):
            part.copy_(content)
