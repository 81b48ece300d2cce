"""Interface of attention, with the memory of its paged KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.huge_pages import PagePrefaulter
from argosy.engine.execution.kernels.rope import RopeRotation


class Attention(ABC):
    """Attention over a paged KV cache, divided into blocks whose layout each kernel defines, or without a cache."""

    name: str
    """Name of the backend, for the log."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """Wrap keys and values, each [layers of a block, num_blocks, ...], contiguous, of one dtype and shape.

        `values` is None if they are part of the keys, and both are None without a cache.
        """
        self._parts = [part for part in (keys, values) if part is not None]
        layers = [layer for part in self._parts for layer in part]
        is_on_cpu = keys is not None and keys.device.type == "cpu"
        self._prefaulter = PagePrefaulter(layers if is_on_cpu else [])
        self.ensure_block(0)

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        """Rotate q and k, write k and v into the cache at `batch.slot_mappings`, then attend causally.

        A token attends to its own sequence's cache. Attention without a cache attends to all tokens of a sequence,
        which is one chunk. The result for a token depends only on its own sequence, bit for bit. The other chunks of
        the batch, and the division of its sequence into chunks, do not change it. The arguments are not modified.

        Args:
            q: Queries [T, heads, head_dim].
            k: Keys [T, kv_heads, head_dim].
            v: Values, shaped like k, or None if they are part of the keys.
            batch: The batch.
            params: Parameters of the layer.
            rope: Rotation, see `rope.apply_rope`. None rotates nothing.

        Returns:
            Tensor [T, heads, size of a value], contiguous, in q's dtype.
        """

    def ensure_block(self, block: int) -> None:
        """Prefault memory in the background for the blocks after `block`, up to which blocks are now used."""
        self._prefaulter.ensure(block)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in order, given as (source, destination) pairs."""
        for source, destination in pairs:
            for part in self._parts:
                part[:, destination].copy_(part[:, source])

    def read_block(self, block: int) -> Tensor:
        """Return a copy of a block's keys and then values, as one flat uint8 tensor in host memory."""
        parts = self._block_parts(block)
        return torch.stack(parts).flatten().view(torch.uint8).cpu()

    def write_block(self, block: int, data: Tensor) -> None:
        """Write the data that `read_block` returned into a block.

        Raises:
            ValueError: The data has another size or dtype.
        """
        parts = self._block_parts(block)
        expected = sum(part.numel() * part.element_size() for part in parts)
        if data.numel() != expected or data.dtype != torch.uint8:
            raise ValueError(
                f"a block is {expected} uint8 bytes, got {data.numel()} of {data.dtype}; "
                "write only data from read_block of the same model and settings"
            )
        stored = data.clone().view(parts[0].dtype).view(len(parts), *parts[0].shape)
        for part, content in zip(parts, stored, strict=True):
            part.copy_(content)

    def _block_parts(self, block: int) -> list[Tensor]:
        if not self._parts:
            raise IndexError(f"there is no block {block}, because there is no KV cache")
        return [part[:, block] for part in self._parts]


def contiguous_heads(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return rows [T, heads, D] with each token's heads contiguous, in `dtype`. The token stride may be larger."""
    if dtype is not None and rows.dtype != dtype:
        rows = rows.to(dtype)
    _, head_stride, element_stride = rows.stride()
    return rows if element_stride == 1 and head_stride == rows.shape[2] else rows.contiguous()
