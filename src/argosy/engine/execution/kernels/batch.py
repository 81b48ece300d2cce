"""Inputs of one forward pass, in one format for prefill, decode and any mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


class RowAdapters(Protocol):
    """Adapters of the rows of a batch. A row without an adapter is neither read nor written."""

    def update_linear(self, number: int, x: Tensor, out: Tensor) -> None:
        """Change the outputs [T, N] of linear layer `number` for x [T, K] in place."""
        ...

    def replace_embeddings(self, token_ids: Tensor, out: Tensor) -> None:
        """Overwrite embeddings [T, hidden] of token ids [T] with those that adapters have themselves, unscaled."""
        ...

    def update_embeddings(self, token_ids: Tensor, out: Tensor, scale: float) -> None:
        """Change scaled embeddings [T, hidden] of token ids [T] in place."""
        ...

    def replace_logits(self, x: Tensor, out: Tensor) -> None:
        """Overwrite logits [T, V] of x [T, hidden] with those of output rows that adapters have themselves."""
        ...


@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """Adapters of a batch of which at least one sequence has one."""

    tokens: RowAdapters
    """Adapters of the flat tokens."""
    logits: RowAdapters
    """Adapters of the flat tokens `logit_index`."""


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
    hidden_states: Tensor | None = None
    """[T, hidden], for a draft head: hidden states that it continues, one position before that of each token."""
    adapters: BatchAdapters | None = None
    """Adapters of the sequences. None if none has one."""

    @property
    def token_adapters(self) -> RowAdapters | None:
        """Adapters of the flat tokens, or None if no sequence has one."""
        return None if self.adapters is None else self.adapters.tokens


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
    """Dtype of the cached keys and values. int8 has a scale for each row, which is a token and KV head."""
    value_dim: int | None = None
    """Number of the last elements of a key that are the value, as in multi-head latent attention.

    None stores values beside the keys, with the same size."""
    query_dtype: torch.dtype | None = None
    """Dtype of queries, and of new keys and values. None is that of the cache."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide among {self.num_kv_heads} KV heads; "
                "fix the model's config"
            )

    @property
    def exact_dim(self) -> int:
        """Number of the first elements of an int8 key that are kept in bfloat16: those that are not its value."""
        return 0 if self.value_dim is None else self.head_dim - self.value_dim
