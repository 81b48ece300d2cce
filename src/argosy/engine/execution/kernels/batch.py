"""Inputs of one forward pass, in one format for prefill, decode and any mixture, and the attention interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from argosy.engine.execution.architectures.attention_params import AttentionParams
    from argosy.engine.execution.kernels.rope import RopeRotation


@dataclass(frozen=True, slots=True)
class BatchStates:
    """States of the sequences of a batch, whose slots are `batch.rows`."""

    table: Tensor
    """[slots, layers * size of a layer's state] float32."""
    layer_size: int
    """Elements of a layer's state."""
    save_slots: Tensor | None = None
    """[T] int64, slot to which the state after each token is also written, or -1. None if there is no such token."""

    def layer_pointer(self, layer: int) -> int:
        """Return the address of a layer's state in slot 0."""
        return self.table.data_ptr() + layer * self.layer_size * self.table.element_size()

    def layer_state(self, slot: int, layer: int) -> Tensor:
        """Return a view of a layer's state, [elements]."""
        return self.table[slot].narrow(0, layer * self.layer_size, self.layer_size)


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat concatenation of S chunks of S different sequences, T tokens in all."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute position of each token in its sequence."""
    query_start_loc: Tensor
    """[S + 1] int32. Chunk i consists of flat tokens `query_start_loc[i] .. query_start_loc[i + 1]`."""
    seq_lens: Tensor
    """[S] int32, number of tokens of each sequence with KV after this step (start + count)."""
    block_tables: Tensor
    """[G, S, P] int32, blocks of each sequence in order, in each KV cache group.

    Entries past its length are not read, nor those before the window of its first token in the batch."""
    slot_mappings: Tensor
    """[G, T] int64, slot of each token in each KV cache group, which is block * block_size + offset."""
    rows: Tensor
    """[S] int64, row of each sequence in the persistent batch."""
    logit_index: Tensor
    """[L] int64, indices of the flat tokens whose logits, or whose hidden states, are computed."""
    token_types: Tensor | None = None
    """[T] int64, number of the text of a pair that each token belongs to. None if all are 0."""
    states: BatchStates | None = None
    """States of the sequences, for models with recurrent layers."""


@dataclass(frozen=True, slots=True)
class KvCacheShape:
    """Sizes of a paged KV cache, and the number of query heads.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_kv_heads`.
    """

    num_layers: int
    """Number of layers whose keys and values a block holds, those of one KV cache group."""
    num_heads: int
    """Number of query heads. Each KV head serves an equal number of them."""
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    """Tokens per block."""
    dtype: torch.dtype
    """Dtype of the cached keys and values."""
    value_dim: int | None = None
    """Number of the last elements of a key that are the value, as in multi-head latent attention.

    None stores values beside the keys, with the same size."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide among {self.num_kv_heads} KV heads; "
                "fix the model's config"
            )


class Attention(Protocol):
    """Attention over a paged KV cache, whose layout each implementation defines, or without one."""

    @property
    def name(self) -> str:
        """Name of the backend, for the log."""
        ...

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
        ...

    def ensure_block(self, block: int) -> None:
        """Prepare memory for the use of all blocks up to `block`."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (source, destination) pairs."""
        ...

    def read_block(self, block: int) -> Tensor:
        """Return a copy of a block's keys and values, as one flat uint8 tensor in host memory."""
        ...

    def write_block(self, block: int, data: Tensor) -> None:
        """Write the data that `read_block` returned into a block."""
        ...
