"""Table of the supported model families, with switches and a map of tensor names for each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from argosy.engine.execution.architectures.decoder import Activation, NormKind, NormPosition, QkNorm

WeightNames = dict[str, tuple[tuple[str, ...], ...]]
"""Module name in the decoder -> alternatives in which checkpoints store its parameters.

The name of a parameter in place of a module has alternatives of full tensor names. Each alternative names the parts
whose rows are concatenated. `[{e}]` selects entry e of a tensor that holds all experts, and `.T` transposes it."""

_ATTENTION: WeightNames = {
    "attention": (("self_attn",),),
    "attention.qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    "attention.o": (("self_attn.o_proj",),),
    "attention.qk.q_norm": (("self_attn.q_norm",),),
    "attention.qk.k_norm": (("self_attn.k_norm",),),
    "attention_in": (("input_layernorm",),),
    "mlp_in": (("post_attention_layernorm",),),
}
_DENSE: WeightNames = {
    **_ATTENTION,
    "mlp.gate_up": (("mlp.gate_proj", "mlp.up_proj"),),
    "mlp.down": (("mlp.down_proj",),),
}
_FUSED: WeightNames = {
    **_DENSE,
    "attention.qkv": (("self_attn.qkv_proj",),),
    "mlp.gate_up": (("mlp.gate_up_proj",),),
}
_MOE: WeightNames = {
    **_DENSE,
    "mlp.router": (("mlp.gate",), ("block_sparse_moe.gate",)),
    "mlp.experts.gate_up": (
        ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        ("mlp.experts.gate_up_proj[{e}]",),
    ),
    "mlp.experts.down": (
        ("mlp.experts.{e}.down_proj",),
        ("block_sparse_moe.experts.{e}.w2",),
        ("mlp.experts.down_proj[{e}]",),
    ),
}
_GPT_OSS: WeightNames = {
    **_ATTENTION,
    "mlp.router": (("mlp.router",),),
    "mlp.experts.gate_up": (("mlp.experts.gate_up_proj[{e}].T",),),
    "mlp.experts.down": (("mlp.experts.down_proj[{e}].T",),),
}
_DEEPSEEK: WeightNames = {
    **_MOE,
    "attention.first": (
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
    ),
    "attention.q_norm": (("self_attn.q_a_layernorm",),),
    "attention.q": (("self_attn.q_b_proj",),),
    "attention.kv_norm": (("self_attn.kv_a_layernorm",),),
    "attention.expansion": (("self_attn.kv_b_proj",),),
    "mlp.shared.gate_up": (("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),),
    "mlp.shared.down": (("mlp.shared_experts.down_proj",),),
}
_DELTA_NET: WeightNames = {
    **_MOE,
    "attention.qkvz": (
        ("linear_attn.in_proj_qkvz",),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ),
    "attention.factors": (
        ("linear_attn.in_proj_ba",),
        ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ),
    "attention.rule.conv": (("linear_attn.conv1d.weight",),),
    "attention.rule.decay": (("linear_attn.A_log",),),
    "attention.rule.decay_bias": (("linear_attn.dt_bias",),),
    "attention.norm": (("linear_attn.norm",),),
    "attention.o": (("self_attn.o_proj",), ("linear_attn.out_proj",)),
    "mlp.shared.gate_up": (("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),),
    "mlp.shared.down": (("mlp.shared_expert.down_proj",),),
    "mlp.shared_gate": (("mlp.shared_expert_gate",),),
}
_POST_NORM: WeightNames = {
    **_DENSE,
    "attention_out": (("post_attention_layernorm",),),
    "mlp_out": (("post_feedforward_layernorm",),),
}
_SANDWICH_NORM: WeightNames = {
    **_POST_NORM,
    "mlp_in": (("pre_feedforward_layernorm",),),
}

_PRE_NORM_POSITIONS: frozenset[NormPosition] = frozenset({"attention_in", "mlp_in"})
_POST_NORM_POSITIONS: frozenset[NormPosition] = frozenset({"attention_out", "mlp_out"})


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the tensors of a head for multi-token prediction, by default those of DeepSeek-V3."""

    prefix: str
    """Prefix of all of them. `{num_layers}` stands for the number of decoder layers."""
    projection: str = "eh_proj"
    """Projection of embedding and hidden state together."""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    norm: str = "shared_head.norm"
    """Norm before the output matrix."""
    layer: str = ""
    """Prefix of the head's layer, after the other one."""
    is_hidden_first: bool = False
    """Whether the hidden state comes before the embedding where both are concatenated."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Differences between one model family and Llama."""

    weight_names: WeightNames = field(default_factory=lambda: _DENSE)
    prefixes: tuple[str, ...] = ("model.",)
    """Prefixes of the decoder's tensor names. The first one found in the checkpoint is used."""
    unused_tensors: tuple[str, ...] = ()
    """Patterns of stored tensors that text generation does not need, such as those of a vision tower.

    `{num_layers}` stands for the number of decoder layers."""
    defaults: dict[str, object] = field(default_factory=dict)
    """Default values of absent keys in config.json."""
    attention_bias: Literal["stated", "qkv", "none"] = "stated"
    """Attention biases, on all four matrices if config.json's `attention_bias` is set, on q, k and v, or none."""
    sliding_windows: Literal["none", "all", "upper", "pattern"] = "none"
    """Layers with a sliding window if config.json has no `layer_types`.

    "upper" is the layers from `max_window_layers` on. "pattern" is all layers except every n-th."""
    norm_kind: NormKind = "narrow"
    norm_positions: frozenset[NormPosition] = _PRE_NORM_POSITIONS
    qk_norm: QkNorm | None = None
    is_gemma: bool = False
    """Whether the family has an embedding scale of sqrt(hidden), softcaps and `query_pre_attn_scalar`."""
    activation: Activation | None = None
    """Activation of the MLP, if config.json does not state it."""
    has_sinks: bool = False
    moe_style: Literal["mixtral", "qwen", "gpt_oss", "deepseek_v2", "deepseek_v3"] | None = None
    has_shared_gate: bool = False
    has_latent_attention: bool = False
    has_delta_nets: bool = False
    """Whether some layers are gated delta nets, and attention has an output gate."""
    has_grouped_delta_nets: bool = False
    """Whether the rows of a delta net's projections are stored by key head, instead of by kind."""
    mtp: MtpNames | None = None
    """Head for multi-token prediction that checkpoints may have, which is loaded to draft tokens."""


_COMMON: dict[str, object] = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
_GEMMA: dict[str, object] = {
    **_COMMON,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_2 = ModelFamily(
    weight_names=_SANDWICH_NORM,
    sliding_windows="pattern",
    norm_kind="offset",
    norm_positions=_PRE_NORM_POSITIONS | _POST_NORM_POSITIONS,
    is_gemma=True,
    defaults=_GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
)
_GEMMA_3 = ModelFamily(
    weight_names=_SANDWICH_NORM,
    sliding_windows="pattern",
    norm_kind="offset",
    norm_positions=_PRE_NORM_POSITIONS | _POST_NORM_POSITIONS,
    qk_norm="head",
    is_gemma=True,
    prefixes=("model.", "language_model.model.", "model.language_model."),
    unused_tensors=(r"(model\.)?(vision_tower|multi_modal_projector)\.",),
    defaults=_GEMMA
    | {
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
)
_DEEPSEEK_DEFAULTS: dict[str, object] = {
    **_COMMON,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
_DEEPSEEK_V3 = ModelFamily(
    weight_names=_DEEPSEEK,
    moe_style="deepseek_v3",
    has_latent_attention=True,
    prefixes=("model.", "language_model.model.", "model.language_model."),
    unused_tensors=(
        r"model\.layers\.{num_layers}\.",  # the head for multi-token prediction
        r"(model\.)?(vision_tower|mm_projector)\.",
    ),
    mtp=MtpNames("model.layers.{num_layers}."),
    defaults=_DEEPSEEK_DEFAULTS
    | {
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
    },
)
_QWEN_3_5 = ModelFamily(
    weight_names=_DELTA_NET,
    norm_kind="offset",
    qk_norm="head",
    has_delta_nets=True,
    prefixes=("model.", "model.language_model."),
    unused_tensors=(r"mtp\.", r"model\.visual\."),
    mtp=MtpNames(
        "mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", layer="layers.0."
    ),
    defaults={
        **_COMMON,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_QWEN_3_5_MOE = replace(
    _QWEN_3_5,
    moe_style="qwen",
    has_shared_gate=True,
    defaults=_QWEN_3_5.defaults
    | {
        "intermediate_size": 512,  # of dense layers, which the family does not have
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
)
_QWEN_3_NEXT = replace(
    _QWEN_3_5_MOE,
    has_grouped_delta_nets=True,
    prefixes=("model.",),
    defaults=_QWEN_3_5_MOE.defaults
    | {"intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10},
)
_SLIDING: dict[str, object] = {**_COMMON, "sliding_window": 4096}
_QWEN: dict[str, object] = {**_SLIDING, "max_window_layers": 28}

FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(defaults=_COMMON),
    "MistralForCausalLM": ModelFamily(
        attention_bias="none", sliding_windows="all", defaults=_SLIDING
    ),
    "Qwen2ForCausalLM": ModelFamily(attention_bias="qkv", sliding_windows="upper", defaults=_QWEN),
    "MiMoForCausalLM": ModelFamily(
        attention_bias="qkv",
        sliding_windows="upper",
        unused_tensors=(r"model\.mtp_layers\.",),
        mtp=MtpNames(
            "model.mtp_layers.0.",
            "input_proj",
            "token_layernorm",
            "hidden_layernorm",
            "final_layernorm",
            is_hidden_first=True,
        ),
        defaults=_QWEN,
    ),
    "Qwen3ForCausalLM": ModelFamily(
        qk_norm="head", sliding_windows="upper", defaults={**_QWEN, "head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        weight_names=_MOE, qk_norm="head", sliding_windows="upper", moe_style="qwen", defaults=_QWEN
    ),
    "Qwen3NextForCausalLM": _QWEN_3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_3_5_MOE,
    "MixtralForCausalLM": ModelFamily(
        weight_names=_MOE,
        attention_bias="none",
        sliding_windows="all",
        moe_style="mixtral",
        defaults={
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
    ),
    "Phi3ForCausalLM": ModelFamily(
        weight_names=_FUSED,
        attention_bias="none",
        sliding_windows="all",
        defaults={**_COMMON, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "Olmo2ForCausalLM": ModelFamily(
        weight_names=_POST_NORM,
        norm_kind="wide",
        norm_positions=_POST_NORM_POSITIONS,
        qk_norm="full",
        defaults={**_COMMON, "rms_norm_eps": 1e-5},
    ),
    "GptOssForCausalLM": ModelFamily(
        weight_names=_GPT_OSS,
        sliding_windows="pattern",
        norm_kind="wide",
        activation="clamped_swiglu",
        has_sinks=True,
        moe_style="gpt_oss",
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
        },
    ),
    "DeepseekV2ForCausalLM": ModelFamily(
        weight_names=_DEEPSEEK,
        moe_style="deepseek_v2",
        has_latent_attention=True,
        defaults=_DEEPSEEK_DEFAULTS
        | {
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 1.0,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        defaults=_DEEPSEEK_V3.defaults
        | {
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "first_k_dense_replace": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "moe_intermediate_size": 1536,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": _GEMMA_3,
}
"""Model families by the name in `architectures`. To support a new family, add an entry."""
_HEADLESS_SUFFIXES = (
    "TextForSequenceClassification",
    "ForSequenceClassification",
    "TextModel",
    "Model",
)
"""Ends of the names of decoders without a language-model head."""


def find_decoder_family(name: str) -> str:
    """Return the entry of `FAMILIES` that computes the hidden states of the architecture `name`.

    Embedding models name the decoder without its head, and rerankers the one of a classifier.
    """
    for suffix in _HEADLESS_SUFFIXES:
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)}ForCausalLM"
    return name
