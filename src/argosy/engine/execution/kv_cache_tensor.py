"""The memory of a paged KV cache, on any device: whole blocks copied, read and put back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.huge_pages import PagePrefaulter

if TYPE_CHECKING:
    from torch import Tensor


class KvCacheTensor:
    """The KV memory of all layers, cut into blocks whose inside is the kernel's own affair."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """keys, values: [layers, num_blocks, ...], contiguous, of one dtype and shape."""
        self.keys = keys
        self.values = values
        self._prefaulter = PagePrefaulter([*keys, *values] if keys.device.type == "cpu" else [])
        self.ensure_block(0)

    def ensure_block(self, block: int) -> None:
        """Blocks up to this one are used now; memory for some more is taken meanwhile."""
        self._prefaulter.ensure(block)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination), in order."""
        for source, destination in pairs:
            self.keys[:, destination].copy_(self.keys[:, source])
            self.values[:, destination].copy_(self.values[:, source])

    def read_block(self, block: int) -> Tensor:
        """All layers' keys, then values, of a block as one flat uint8 tensor (a copy)."""
        parts = torch.stack((self.keys[:, block], self.values[:, block]))
        return parts.flatten().view(torch.uint8)

    def write_block(self, block: int, data: Tensor) -> None:
        """Put back what `read_block` gave. Raises ValueError for data of another size."""
        part = self.keys[:, block]
        expected = 2 * part.numel() * part.element_size()
        if data.numel() != expected or data.dtype != torch.uint8:
            raise ValueError(
                f"a block is {expected} uint8 bytes, got {data.numel()} of {data.dtype}; "
                "write only what read_block of the same model and settings gave"
            )
        keys, values = data.clone().view(part.dtype).view(2, *part.shape)
        part.copy_(keys)
        self.values[:, block].copy_(values)
