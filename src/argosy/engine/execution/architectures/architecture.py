"""Base of all architectures: sizes and limits of a model, and the layout of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.engine.execution.architectures.kv_cache_layout import (
    KvCacheLayout,
    arrange_layers,
    without_kv_cache,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and limits of a model, as plain values."""

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the widest inner activations of a dense layer."""
    num_heads: int
    num_kv_heads: int
    """Number of key and value heads. Each serves an equal number of query heads."""
    head_dim: int
    """Elements of a head."""
    vocab_size: int
    max_model_len: int
    """Maximum tokens of one sequence."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence."""
    tied_embeddings: bool
    """Whether the output matrix is the embedding, or there is none."""
    is_causal: bool = True
    """Whether tokens attend only to earlier ones. Otherwise sliding windows reach as far in both directions."""
    has_head: bool = True
    """Whether the model computes logits of tokens, and not only hidden states."""

    @property
    def cached_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer that keeps keys and values. None is all tokens."""
        return (None,) * self.num_layers

    @property
    def value_dim(self) -> int | None:
        """Number of the last elements of a key that are the value, or None if values are stored beside the keys."""
        return None

    @property
    def kv_layout(self) -> KvCacheLayout:
        """KV cache groups. A model that is not causal has none, because every sequence is computed in one step."""
        if not self.is_causal:
            return without_kv_cache(self.num_layers)
        return arrange_layers(self.cached_windows, self.max_model_len)

    @property
    def state_bytes(self) -> int:
        """Bytes of the float32 state of a sequence in all recurrent layers."""
        return 0

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of keys and values of one token, all layers together."""
        if not self.is_causal:
            return 0
        parts = 2 if self.value_dim is None else 1
        return parts * len(self.cached_windows) * self.num_kv_heads * self.head_dim * dtype_bytes
