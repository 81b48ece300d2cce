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

    def close(self) -> None:
        """Prefault no more memory, so that the cache is freed with the last reference to this object."""
        self._prefaulter.close()

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in order, given as (source, destination) pairs."""
        for source, destination in pairs:
            for part in self._parts:
                part[:, destination].copy_(part[:, source])

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values in all layers. 0 without a cache."""
        return sum(part.nbytes // part.shape[1] for part in self._parts)

    def read_blocks(self, blocks: Tensor, out: Tensor) -> None:
        """Copy each block's keys and then values into a row of `out`.

        Args:
            blocks: Blocks, int64 [n], on the device of the cache.
            out: uint8 [n, block_bytes], contiguous, on the same device.

        Raises:
            ValueError: `out` has another size or dtype.
        """
        self._check_data(out)
        for block, data in zip(blocks.tolist(), out, strict=True):
            for part, content in zip(self._parts, self._split_data(data), strict=True):
                content.copy_(part[:, block])

    def write_blocks(self, blocks: Tensor, data: Tensor) -> None:
        """Write data of `read_blocks` into blocks. Arguments and errors are those of `read_blocks`."""
        self._check_data(data)
        for block, row in zip(blocks.tolist(), data, strict=True):
            for part, content in zip(self._parts, self._split_data(row), strict=True):
                part[:, block].copy_(content)

    def _check_data(self, data: Tensor) -> None:
        if data.shape[1:] != (self.block_bytes,) or data.dtype != torch.uint8:
            raise ValueError(
                f"a block is {self.block_bytes} uint8 bytes, got {tuple(data.shape)} of {data.dtype}; "
                "use only data of the same model and settings"
            )

    def _split_data(self, data: Tensor) -> Tensor:
        """Return the parts of a block's data, each [layers, ...]."""
        layers, _, *inner = self._parts[0].shape
        return data.view(self._parts[0].dtype).view(len(self._parts), layers, *inner)


def contiguous_heads(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return rows [T, heads, D] with each token's heads contiguous, in `dtype`. The token stride may be larger."""
    if dtype is not None and rows.dtype != dtype:
        rows = rows.to(dtype)
    _, head_stride, element_stride = rows.stride()
    return rows if element_stride == 1 and head_stride == rows.shape[2] else rows.contiguous()
