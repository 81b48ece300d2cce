"""Base of all models, with the memory that they need for keys, values and states."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from argosy.engine.execution.architectures.architecture import Architecture
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.recurrent_states import RecurrentStates
from argosy.engine.execution.kernels.torch.attention import BidirectionalAttention


class Model(ABC):
    """Model that maps a batch of tokens to logits or hidden states."""

    architecture: Architecture
    _device: Device
    dtype: torch.dtype
    """Dtype of weights and activations."""

    @abstractmethod
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """Return the outputs of the flat tokens `batch.logit_index`, which may be none.

        These are logits [L, vocab_size] float32, or hidden states [L, hidden] float32 of a model without a head.
        `attention` writes the keys and values of every token of the batch.
        """

    def create_attention(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> Attention:
        """Allocate a KV cache in `dtype` (the model's by default), and create the attention over it.

        A model whose tokens attend in both directions has no KV cache.
        """
        sizes = self.architecture
        if not sizes.is_causal:
            return BidirectionalAttention()
        shape = KvCacheShape(
            num_layers=sizes.kv_layout.layers_per_block,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype or self.dtype,
            value_dim=sizes.value_dim,
            query_dtype=self.dtype,
        )
        return self._device.create_attention(shape)

    def create_states(self, num_rows: int, num_snapshots: int) -> RecurrentStates | None:
        """Allocate the states of recurrent layers. None if the model has no such layers."""
        del num_rows, num_snapshots
        return None
