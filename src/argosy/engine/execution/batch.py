"""The inputs of one forward pass: one kind of batch for prefill, decode and every mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from argosy.engine.execution.rope import RopeRotation


@dataclass(frozen=True, slots=True)
class Batch:
    """S chunks of S different sequences, T tokens in all, flattened one after the other."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: absolute position of each token in its sequence."""
    query_start_loc: Tensor
    """[S + 1] int32: chunk i holds flat tokens cu_q[i] .. cu_q[i + 1]."""
    seq_lens: Tensor
    """[S] int32: tokens of sequence i with KV once this step is done (start + count)."""
    block_table: Tensor
    """[S, P] int32: KV blocks of each sequence in order; entries past its length are not read."""
    slot_mapping: Tensor
    """[T] int64: where each token's KV goes: block * block_size + offset."""
    rows: Tensor
    """[S] int64: the sequence's permanent row."""
    logit_index: Tensor
    """[L] int64: flat tokens whose logits are wanted."""


@dataclass(frozen=True, slots=True)
class KvCacheShape:
    """The sizes of a paged KV cache, and how many heads ask it. ValueError: heads that do not divide."""

    num_layers: int
    num_heads: int
    """Of queries; each KV head serves as many of them."""
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    """Tokens of a block."""
    dtype: torch.dtype
    """Of the keys and values that are kept."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide among {self.num_kv_heads} KV heads; "
                "fix the model's config"
            )


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The attention of one layer."""

    layer: int
    scale: float
    sliding_window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None: all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""


class Attention(Protocol):
    """Paged attention over a KV cache whose layout is the backend's own affair."""

    @property
    def name(self) -> str:
        """What is in use, for the log."""
        ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        """Rotate q and k, write k and v into the cache at `batch.slots`, then attend causally.

        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], none of them changed; returns
        [T, heads, head_dim], contiguous, in q's dtype. A token sees its own sequence's cache.
        rope: how each token's q and k are rotated, as `rope.rotated` does it; None: not at all.
        The result for a token depends on its own sequence only, bit for bit: not on the other
        chunks of the batch nor on how its sequence was cut into chunks.
        """
        ...

    def ensure_block(self, block: int) -> None:
        """Blocks up to this one are used from now on."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination)."""
        ...

    def read_block(self, block: int) -> Tensor:
        """All layers' keys and values of a block as one flat uint8 tensor in host memory (a copy)."""
        ...

    def write_block(self, block: int, data: Tensor) -> None:
        """Put back what `read_block` gave."""
        ...
