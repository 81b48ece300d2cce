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
NormPlace = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
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
    truncate: bool = True
    """yarn (Peng et al. 2023): rotations that bound the blend, and whether its ends are whole."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope (Ding et al. 2024): a divisor for each frequency, up to and beyond original_max_len."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer."""

    window: int | None
    """A token sees itself and the `window - 1` tokens before it; None: all before it."""
    rope: int
    """Index into `ModelSpec.ropes`."""
    sparse: bool
    """Whether the MLP is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts (Shazeer et al. 2017) in place of the MLP."""

    experts: int
    active: int
    """Experts that a token visits."""
    intermediate: int
    normalize: bool
    """Whether the chosen experts' weights are scaled to sum to 1."""
    round_weights: bool
    """Whether those weights are rounded to the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: everything that the loader, the decoder and the planner need.

    `dataclasses.replace(spec, max_model_len=n)` serves a shorter context: the rope tables, and the
    choice between longrope's factors, follow `max_model_len`.
    """

    family: str
    architecture: str
    layers: int
    hidden: int
    intermediate: int
    """Width of a dense layer's MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most tokens of one sequence."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """The dtype that the checkpoint names; float32 where it names none."""
    activation: Activation
    norm: NormKind
    norm_eps: float
    norms: frozenset[NormPlace]
    """Where a layer has norms."""
    qk_norm: QkNorm | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embed_scale: float | None
    tied: bool
    """Whether the output matrix is the embedding."""
    ropes: tuple[RopeSpec, ...]
    layer_specs: tuple[LayerSpec, ...]
    moe: MoeSpec | None

    @property
    def parameters(self) -> int:
        """Weights of the checkpoint, a tied output matrix counted once."""
        embedding = self.vocab_size * self.hidden
        ends = embedding if self.tied else 2 * embedding
        return ends + self.hidden + sum(self._layer_parameters(spec) for spec in self.layer_specs)

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes through; fewer than `parameters` with experts."""
        if self.moe is None:
            return self.parameters
        idle = self.moe.experts - self.moe.active
        sparse = sum(spec.sparse for spec in self.layer_specs)
        return self.parameters - sparse * idle * 3 * self.hidden * self.moe.intermediate

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token leaves in the cache, all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes

    def _layer_parameters(self, spec: LayerSpec) -> int:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key)
        attention += self.qkv_bias * (query + 2 * key) + self.o_bias * self.hidden
        if self.qk_norm is not None:
            attention += query + key if self.qk_norm == "full" else 2 * self.head_dim
        norms = len(self.norms) * self.hidden
        if spec.sparse and self.moe is not None:
            expert = 3 * self.hidden * self.moe.intermediate
            return attention + norms + self.moe.experts * (expert + self.hidden)
        biases = self.mlp_bias * (2 * self.intermediate + self.hidden)
        return attention + norms + 3 * self.hidden * self.intermediate + biases


@dataclass(frozen=True, slots=True)
class Description:
    """The figures that `argosy models` shows."""

    architecture: str
    parameters: int
    active_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int


def describe(spec: ModelSpec, dtype_bytes: int) -> Description:
    """The model's size when weights and KV cache are held in elements of `dtype_bytes`."""
    return Description(
        architecture=spec.architecture,
        parameters=spec.parameters,
        active_parameters=spec.active_parameters,
        weight_bytes=spec.parameters * dtype_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token(dtype_bytes),
        max_model_len=spec.max_model_len,
    )
