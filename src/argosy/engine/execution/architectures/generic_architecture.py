"""Architecture of a model that transformers implements, as far as the engine needs to know it."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.engine.execution.architectures.attention_params import AttentionParams
from argosy.engine.execution.architectures.kv_cache_layout import KvCacheLayout, arrange_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericArchitecture:
    """Sizes and limits of a model that transformers implements, and the attention of its layers.

    `ModelArchitecture` has the properties of the same names for the families of Argosy's own decoder.
    """

    family: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    """Width of the widest inner activations of a layer."""
    tied_embeddings: bool
    rope: str
    """Kinds of the rotary embedding, with the choice between longrope's factors."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Maximum tokens of one sequence."""
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    """Number of weights that generate text. A tied output matrix counts once."""
    num_active_parameters: int
    """Number of weights that compute one token, which is less than `num_parameters` with experts."""
    attention: tuple[AttentionParams, ...]
    """Attention of each layer that has one, in the order of computation."""

    @property
    def has_head(self) -> bool:
        """Whether the model computes logits of tokens."""
        return True

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values."""
        return len(self.attention)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of a sequence, which the model does not have."""
        return 0

    @property
    def kv_layout(self) -> KvCacheLayout:
        """KV cache groups of the layers."""
        windows = tuple(params.sliding_window for params in self.attention)
        return arrange_layers(windows, self.max_model_len)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of keys and values of one token, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes
