"""Base of all architectures: sizes and limits of a model, its attention, and the layout of its KV cache.

The layers are divided into KV cache groups, so that those with a sliding window need less memory. A block holds the
keys and values of as many layers as a group has. All groups take their blocks from one pool.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from argosy.engine.engine_config import DEFAULT_BLOCK_SIZE
from argosy.engine.scheduling import KvCacheGroups

if TYPE_CHECKING:
    from torch import Tensor

SCALE_BYTES = 4
"""Bytes of the float32 scale of an int8 row, which is a key or a value of one token and KV head."""
MAX_GROUPS = 8
"""Maximum number of groups. Each has a block table, which takes time in every step."""


class LayerPlace(NamedTuple):
    """Place of a layer's keys and values."""

    group: int
    layer: int
    """Index of the layer within a block."""


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """KV cache groups of a model."""

    windows: tuple[int | None, ...]
    """Sliding window of each group in tokens, longest first. None is all tokens."""
    layers_per_block: int
    """Number of layers of a group. The last group of a window may have fewer, and leaves their memory unused."""
    places: tuple[LayerPlace, ...]
    """Place of each layer."""

    def block_bytes(self, kv_bytes_per_token: int, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens, given those of a token in all layers."""
        return kv_bytes_per_token // len(self.places) * self.layers_per_block * block_size


def without_kv_cache(num_layers: int) -> KvCacheLayout:
    """Return the layout of a model that computes every sequence in one step, and so keeps no keys and values."""
    return KvCacheLayout((), num_layers, tuple(LayerPlace(0, i) for i in range(num_layers)))


@cache
def arrange_layers(windows: tuple[int | None, ...], max_model_len: int) -> KvCacheLayout:
    """Return the layout that needs the least memory for a sequence of `max_model_len` tokens.

    Args:
        windows: Sliding window of each layer in tokens. None is all tokens.
        max_model_len: Maximum tokens of one sequence. Windows that hold all of them do not count as windows.
    """
    windows = tuple(
        None if window is None or window >= max_model_len else window for window in windows
    )
    candidates = [_arrange((None,) * len(windows), len(windows))]
    candidates += [_arrange(windows, size) for size in range(1, len(windows) + 1)]

    def cost(layout: KvCacheLayout) -> tuple[int, int]:
        tokens = sum(window or max_model_len for window in layout.windows)
        return tokens * layout.layers_per_block, len(layout.windows)

    return min((each for each in candidates if len(each.windows) <= MAX_GROUPS), key=cost)


def _arrange(windows: tuple[int | None, ...], layers_per_block: int) -> KvCacheLayout:
    """Divide the layers of each window into groups of `layers_per_block`."""
    group_windows: list[int | None] = []
    first_group: dict[int | None, int] = {}
    counts = Counter(windows)
    for window in sorted(counts, key=lambda each: -(each or 1 << 62)):
        first_group[window] = len(group_windows)
        group_windows += [window] * -(-counts[window] // layers_per_block)
    seen: Counter[int | None] = Counter()
    places = []
    for window in windows:
        group, layer = divmod(seen[window], layers_per_block)
        places.append(LayerPlace(first_group[window] + group, layer))
        seen[window] += 1
    return KvCacheLayout(tuple(group_windows), layers_per_block, tuple(places))


class HeadNorm(NamedTuple):
    """RMS norm of each head of queries and keys, before their rotation."""

    q_weight: Tensor
    """Factors of the elements of a query, float32 [head_dim]."""
    k_weight: Tensor
    """Factors of the elements of a key, float32 [head_dim]."""
    eps: float
    rounds_before_weight: bool
    """Whether the normalized values are rounded before they are multiplied by the factors, as well as after."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention parameters of one layer."""

    layer: int
    """Index of the layer within a block."""
    scale: float
    sliding_window: int | None = None
    """Number of tokens that a token attends to, including itself. None is all tokens before it."""
    softcap: float | None = None
    """Soft cap of the scores, which become softcap * tanh(scores / softcap)."""
    sinks: Tensor | None = field(default=None, compare=False)
    """Attention sinks, float32 [heads]: scores of a key without value that every token attends to."""
    group: int = 0
    """KV cache group of the layer."""
    head_norm: HeadNorm | None = field(default=None, compare=False)
    """Norm that the attention computes, if the device says `normalizes_heads`. None if queries and keys need none."""


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

    def kv_bytes_per_token(self, dtype_bytes: int, *, has_scales: bool = False) -> int:
        """Return the bytes of keys and values of one token, all layers together.

        Bytes that have scales (int8) keep the part of a key that is not its value in bfloat16.
        """
        if not self.is_causal:
            return 0
        parts = 2 if self.value_dim is None else 1
        row_bytes = self.head_dim * dtype_bytes
        if has_scales:
            row_bytes += SCALE_BYTES
            row_bytes += 0 if self.value_dim is None else self.head_dim - self.value_dim
        return parts * len(self.cached_windows) * self.num_kv_heads * row_bytes

    def kv_bytes_per_sequence(self, dtype_bytes: int) -> int:
        """Return the bytes of the KV cache and of the recurrent state of a sequence of `max_model_len` tokens."""
        layout = self.kv_layout
        groups = KvCacheGroups(layout.windows, DEFAULT_BLOCK_SIZE)
        block_bytes = layout.block_bytes(self.kv_bytes_per_token(dtype_bytes), DEFAULT_BLOCK_SIZE)
        return groups.count_blocks(self.max_model_len) * block_bytes + self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericArchitecture(Architecture):
    """Architecture of a model that transformers implements, and the attention of its layers."""

    rope: str
    """Kinds of the rotary embedding, with the choice between longrope's factors."""
    num_parameters: int
    """Number of weights that generate text. A tied output matrix counts once."""
    num_active_parameters: int
    """Number of weights that compute one token, which is less than `num_parameters` with experts."""
    attention: tuple[AttentionParams, ...]
    """Attention of each layer that has one, in the order of computation."""

    @property
    def cached_windows(self) -> tuple[int | None, ...]:
        return tuple(params.sliding_window for params in self.attention)
