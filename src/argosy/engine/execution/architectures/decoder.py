"""Architecture of a decoder as plain values, read from config.json and used by the loader and by `argosy models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from argosy.engine.execution.architectures.architecture import Architecture
from argosy.engine.execution.architectures.rope import RopeParams

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "sigmoid"]
"""Activation of a gate, x * sigmoid(x), the tanh approximation of GELU, that of gpt-oss, or sigmoid(x).

"clamped_swiglu" is x * sigmoid(1.702 x) * (up + 1), with x at most 7 and up from -7 to 7."""
NormKind = Literal["narrow", "wide", "offset"]
"""Kind of RMS norm, which is computed in float32.

"narrow" rounds and then multiplies by w, "wide" multiplies by w and then rounds, and "offset" multiplies by 1 + w and
then rounds."""
QkNorm = Literal["head", "full"]
"""Scope of the norm of queries and keys, which is each head or all heads together."""
NormPosition = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]


@dataclass(frozen=True, slots=True)
class LayerArchitecture:
    """Properties that differ between layers."""

    sliding_window: int | None
    """Number of tokens that a token attends to, including itself. None is all tokens before it."""
    rope_index: int
    """Index into `ModelArchitecture.ropes`."""
    is_moe: bool
    """Whether the MLP is a mixture of experts."""
    is_recurrent: bool = False
    """Whether a gated delta net takes the place of attention."""


@dataclass(frozen=True, slots=True)
class LatentArchitecture:
    """Sizes of multi-head latent attention (DeepSeek-V2, 2024). A token caches `rope_dim + kv_rank` elements."""

    q_rank: int | None
    """Size of the latent of queries. None computes queries directly."""
    kv_rank: int
    """Size of the latent of keys and values."""
    nope_dim: int
    """Elements of a head's query and key that are not rotated."""
    rope_dim: int
    """Elements of a head's query, and of the key of all heads, that are rotated."""
    value_dim: int
    has_rope_pairs: bool
    """Whether neighbouring elements are rotated together in the checkpoint, instead of two halves."""

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.rope_dim + self.nope_dim


@dataclass(frozen=True, slots=True)
class DeltaNetArchitecture:
    """Sizes of a gated delta net (Yang et al. 2024), which keeps a state of constant size for each sequence."""

    key_heads: int
    """Number of heads of queries and keys. Each serves an equal number of value heads."""
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Number of tokens that the causal convolution of queries, keys and values reads."""
    is_grouped: bool = False
    """Whether the rows of projections are stored by key head, instead of all queries first."""

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        """Elements of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def matrix_elements(self) -> int:
        """Elements of a layer's matrices in a state, one for each value head."""
        return self.key_dim * self.value_size

    @property
    def state_elements(self) -> int:
        """Elements of a layer's state: its matrices, and the tokens that the next convolution reads."""
        return self.matrix_elements + (self.conv_width - 1) * self.channels


@dataclass(frozen=True, slots=True)
class RoutingGroups:
    """Groups of experts (DeepSeek-V2, 2024). A token's experts are in the groups with the highest scores."""

    num_groups: int
    num_active_groups: int
    scored_experts: int
    """Number of a group's best experts whose scores are added to its score."""


@dataclass(frozen=True, slots=True)
class MoeArchitecture:
    """Architecture of a mixture of experts (Shazeer et al. 2017) in place of the MLP."""

    num_experts: int
    num_experts_per_token: int
    """Number of experts that compute each token."""
    intermediate_size: int
    normalize_weights: bool
    """Whether the selected experts' weights are scaled to sum to 1."""
    round_weights: bool
    """Whether those weights are rounded to the model's dtype."""
    has_biases: bool = False
    """Whether router and experts have biases."""
    is_interleaved: bool = False
    """Whether the rows of the experts' gate and up matrices alternate in the checkpoint."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_score_correction: bool = False
    """Whether a learned correction is added to the scores that select experts, but not to their weights."""
    routes_in_float32: bool = False
    groups: RoutingGroups | None = None
    weight_factor: float = 1.0
    """Factor of the selected experts' weights."""
    shared_intermediate_size: int = 0
    """Hidden width of the expert that computes every token. 0 is none."""
    has_shared_gate: bool = False
    """Whether the output of that expert is multiplied by the sigmoid of a linear function of the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture(Architecture):
    """Architecture of a decoder-only transformer, with all that the loader and the decoder need.

    `dataclasses.replace(architecture, max_model_len=n)` limits the context. The rope tables, and the choice between
    longrope's factors, depend on `max_model_len`.
    """

    activation: Activation
    norm_kind: NormKind
    norm_eps: float
    norm_positions: frozenset[NormPosition]
    """Positions of the norms in a layer."""
    qk_norm: QkNorm | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    has_sinks: bool
    """Whether each query head has an attention sink."""
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_scale: float | None
    ropes: tuple[RopeParams, ...]
    layer_architectures: tuple[LayerArchitecture, ...]
    moe: MoeArchitecture | None
    latent: LatentArchitecture | None = None
    """Sizes of latent attention, whose cache has one KV head of `head_dim` elements and no separate values."""
    delta_net: DeltaNetArchitecture | None = None
    """Sizes of the gated delta nets of recurrent layers."""
    has_output_gate: bool = False
    """Whether attention multiplies its output by the sigmoid of a linear function of its input."""

    @property
    def num_parameters(self) -> int:
        """Number of weights in the checkpoint. A tied output matrix counts once."""
        embedding = self.vocab_size * self.hidden_size
        embeddings = embedding if self.tied_embeddings or not self.has_head else 2 * embedding
        return (
            embeddings
            + self.hidden_size
            + sum(self._num_layer_parameters(layer) for layer in self.layer_architectures)
        )

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that compute one token, which is less than `num_parameters` with experts."""
        if self.moe is None:
            return self.num_parameters
        num_idle_experts = self.moe.num_experts - self.moe.num_experts_per_token
        num_moe_layers = sum(layer.is_moe for layer in self.layer_architectures)
        expert = self._num_expert_parameters(self.moe)
        return self.num_parameters - num_moe_layers * num_idle_experts * expert

    @property
    def num_recurrent_layers(self) -> int:
        """Number of layers that keep a state instead of keys and values."""
        return sum(layer.is_recurrent for layer in self.layer_architectures)

    @property
    def cached_windows(self) -> tuple[int | None, ...]:
        return tuple(
            layer.sliding_window for layer in self.layer_architectures if not layer.is_recurrent
        )

    @property
    def value_dim(self) -> int | None:
        return None if self.latent is None else self.latent.kv_rank

    @property
    def state_bytes(self) -> int:
        if self.delta_net is None:
            return 0
        return 4 * self.num_recurrent_layers * self.delta_net.state_elements

    def _num_layer_parameters(self, layer: LayerArchitecture) -> int:
        if layer.is_recurrent and self.delta_net is not None:
            attention = self._num_delta_net_parameters(self.delta_net)
        elif self.latent is not None:
            attention = self._num_latent_parameters(self.latent)
        else:
            attention = self._num_attention_parameters()
        norms = len(self.norm_positions) * self.hidden_size
        if layer.is_moe and self.moe is not None:
            expert = self._num_expert_parameters(self.moe)
            router = self.hidden_size + self.moe.has_biases + self.moe.has_score_correction
            shared = 3 * self.hidden_size * self.moe.shared_intermediate_size
            shared += self.moe.has_shared_gate * self.hidden_size
            return attention + norms + self.moe.num_experts * (expert + router) + shared
        biases = self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return attention + norms + 3 * self.hidden_size * self.intermediate_size + biases

    def _num_attention_parameters(self) -> int:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gate = self.has_output_gate * query
        biases = self.qkv_bias * (query + gate + 2 * key) + self.o_bias * self.hidden_size
        norms = {None: 0, "head": 2 * self.head_dim, "full": query + key}[self.qk_norm]
        sinks = self.has_sinks * self.num_heads
        return self.hidden_size * (2 * query + gate + 2 * key) + biases + norms + sinks

    def _num_delta_net_parameters(self, net: DeltaNetArchitecture) -> int:
        projections = net.channels + 2 * net.value_size + 2 * net.value_heads
        heads = 2 * net.value_heads + net.value_dim
        return self.hidden_size * projections + net.conv_width * net.channels + heads

    def _num_latent_parameters(self, latent: LatentArchitecture) -> int:
        query = self.num_heads * latent.query_dim
        key = latent.kv_rank + latent.rope_dim
        expansion = self.num_heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
        output = self.num_heads * latent.value_dim * self.hidden_size
        first = query if latent.q_rank is None else latent.q_rank
        queries = 0 if latent.q_rank is None else latent.q_rank * (query + 1)
        biases = self.o_bias * (first + key + self.hidden_size)
        return (
            self.hidden_size * (first + key)
            + queries
            + latent.kv_rank
            + expansion
            + output
            + biases
        )

    def _num_expert_parameters(self, moe: MoeArchitecture) -> int:
        biases = moe.has_biases * (2 * moe.intermediate_size + self.hidden_size)
        return 3 * self.hidden_size * moe.intermediate_size + biases
