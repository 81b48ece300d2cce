"""What a decoder is made of, as plain numbers: read from config.json, used by loader and planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""The gate of the MLP: x * sigmoid(x), or the tanh approximation of GELU."""
NormKind = Literal["narrow", "wide", "offset"]
"""RMS norm in float32 and then: round and multiply by w; multiply by w and round; the same by 1 + w."""
QkNorm = Literal["head", "full"]
"""Norm of queries and keys over each head, or over all heads together."""
NormPosition = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeParams:
    """One rotary position embedding (Su et al. 2021) with its scaling."""

    kind: RopeKind
    theta: float
    rotary_dim: int
    """How many of a head's leading elements are rotated."""
    original_max_len: int
    """The context the model was first trained for."""
    factor: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """llama3: wavelengths between original_max_len / high and / low are blended."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    round_bounds: bool = True
    """yarn (Peng et al. 2023): rotations that bound the blend, and whether its ends are whole."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope (Ding et al. 2024): a divisor for each frequency, up to and beyond original_max_len."""


@dataclass(frozen=True, slots=True)
class LayerArchitecture:
    """What differs from layer to layer."""

    sliding_window: int | None
    """A token sees itself and the `window - 1` tokens before it; None: all before it."""
    rope_index: int
    """Index into `ModelSpec.ropes`."""
    is_moe: bool
    """Whether the MLP is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class MoeArchitecture:
    """A mixture of experts (Shazeer et al. 2017) in place of the MLP."""

    num_experts: int
    num_experts_per_token: int
    """Experts that a token visits."""
    intermediate_size: int
    normalize_weights: bool
    """Whether the chosen experts' weights are scaled to sum to 1."""
    round_weights: bool
    """Whether those weights are rounded to the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """A decoder-only transformer: everything that the loader, the decoder and the planner need.

    `dataclasses.replace(spec, max_model_len=n)` serves a shorter context: the rope tables, and the
    choice between longrope's factors, follow `max_model_len`.
    """

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of a dense layer's MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most tokens of one sequence."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """The dtype that the checkpoint names; float32 where it names none."""
    activation: Activation
    norm_kind: NormKind
    norm_eps: float
    norm_positions: frozenset[NormPosition]
    """Where a layer has norms."""
    qk_norm: QkNorm | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_scale: float | None
    tied_embeddings: bool
    """Whether the output matrix is the embedding."""
    ropes: tuple[RopeParams, ...]
    layer_architectures: tuple[LayerArchitecture, ...]
    moe: MoeArchitecture | None

    @property
    def num_parameters(self) -> int:
        """Weights of the checkpoint, a tied output matrix counted once."""
        embedding = self.vocab_size * self.hidden_size
        ends = embedding if self.tied_embeddings else 2 * embedding
        return (
            ends
            + self.hidden_size
            + sum(self._num_layer_parameters(spec) for spec in self.layer_architectures)
        )

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token passes through; fewer than `parameters` with experts."""
        if self.moe is None:
            return self.num_parameters
        idle = self.moe.num_experts - self.moe.num_experts_per_token
        sparse = sum(spec.is_moe for spec in self.layer_architectures)
        return (
            self.num_parameters - sparse * idle * 3 * self.hidden_size * self.moe.intermediate_size
        )

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token leaves in the cache, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def _num_layer_parameters(self, spec: LayerArchitecture) -> int:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key)
        attention += self.qkv_bias * (query + 2 * key) + self.o_bias * self.hidden_size
        if self.qk_norm is not None:
            attention += query + key if self.qk_norm == "full" else 2 * self.head_dim
        norms = len(self.norm_positions) * self.hidden_size
        if spec.is_moe and self.moe is not None:
            expert = 3 * self.hidden_size * self.moe.intermediate_size
            return attention + norms + self.moe.num_experts * (expert + self.hidden_size)
        biases = self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return attention + norms + 3 * self.hidden_size * self.intermediate_size + biases


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The figures that `argosy models` shows."""

    architecture: str
    num_parameters: int
    num_active_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int


def summarize_model(architecture: ModelArchitecture, dtype_bytes: int) -> ModelSummary:
    """The model's size when weights and KV cache are held in elements of `dtype_bytes`."""
    return ModelSummary(
        architecture=architecture.architecture,
        num_parameters=architecture.num_parameters,
        num_active_parameters=architecture.num_active_parameters,
        weight_bytes=architecture.num_parameters * dtype_bytes,
        kv_bytes_per_token=architecture.kv_bytes_per_token(dtype_bytes),
        max_model_len=architecture.max_model_len,
    )
