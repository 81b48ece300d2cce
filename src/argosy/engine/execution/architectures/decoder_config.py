"""Reader that converts a checkpoint's config.json to a `ModelArchitecture`, by the entry of its model family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from argosy.engine.execution.architectures.decoder import (
    Activation,
    DeltaNetArchitecture,
    LatentArchitecture,
    LayerArchitecture,
    ModelArchitecture,
)
from argosy.engine.execution.architectures.decoder_families import (
    FAMILIES,
    ModelFamily,
    find_decoder_family,
)
from argosy.engine.execution.architectures.moe_config import moe_layers, parse_moe
from argosy.engine.execution.architectures.rope import RopeParams, max_supported_len, parse_ropes
from argosy.engine.execution.checkpoint_formats import parse_quantization
from argosy.engine.execution.checkpoint_formats.checkpoint import read_config_values
from argosy.engine.execution.config.checkpoint_config import (
    AUTO_CONFIG,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    CheckpointConfig,
    read_generation_config,
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_TOP_LEVEL_KEYS = ("eos_token_id", "quantization_config", "tie_word_embeddings")
"""Keys that a multimodal model may have next to its `text_config`."""
MAX_CONV_WIDTH = 8
"""Largest accepted width of a causal convolution."""
_LAYER_KINDS = {"full_attention", "sliding_attention"}


def read_architecture(
    path: Path, generation_config: str = AUTO_CONFIG, *, has_head: bool = True
) -> ModelArchitecture:
    """Read config.json, and the end-of-sequence ids as `read_generation_config` does, of the directory `path`.

    The hidden states of a model without a head are pooled.

    Raises:
        ValueError: Argosy cannot compute the model exactly as intended. The message says what to do.
    """
    file, values = read_config_values(path)
    architecture, family = _find_family(file, values, has_head=has_head)
    text = values.get("text_config")
    if isinstance(text, dict):
        values = {key: values[key] for key in _TOP_LEVEL_KEYS if key in values} | text
    config = CheckpointConfig(file, values, family.defaults)
    _reject_unsupported(config, family, has_head=has_head)
    eos_token_ids = read_eos_token_ids(
        path, config, config.integer("vocab_size"), generation_config
    )
    built = build_architecture(architecture, family, config, eos_token_ids)
    return built if has_head else replace(built, has_head=False)


def _find_family(
    file: Path, values: dict[str, object], *, has_head: bool
) -> tuple[str, ModelFamily]:
    names = values.get("architectures")
    for name in names if isinstance(names, list) else ():
        family_name = name if has_head else find_decoder_family(str(name))
        if family_name in FAMILIES:
            return family_name, FAMILIES[family_name]
    raise ValueError(f"{file}: architectures is {names}; Argosy serves {', '.join(FAMILIES)}")


def _reject_unsupported(config: CheckpointConfig, family: ModelFamily, *, has_head: bool) -> None:
    """Raise ValueError for settings that change the results in an unsupported way."""
    parse_quantization(config)
    if config.flag("use_bidirectional_attention"):
        if has_head:
            raise ValueError(
                f"{config.path}: the model attends to later tokens and cannot generate; use a causal model"
            )
        if not family.is_gemma or config.get("attn_logit_softcapping") is not None:
            raise config.error("use_bidirectional_attention", "false for this architecture")
    if family.qk_norm and config.get("attn_logit_softcapping") is not None:
        raise config.error("attn_logit_softcapping", "null for this architecture")
    if family.has_delta_nets and config.get("attn_output_gate") is False:
        raise config.error("attn_output_gate", "true for this architecture")
    if family.activation == "clamped_swiglu":
        for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if config.optional_number(key) not in (None, value):
                raise config.error(key, f"{value}, or absent")


def read_eos_token_ids(
    path: Path, config: CheckpointConfig, vocab_size: int, generation_config: str = "auto"
) -> tuple[int, ...]:
    """Return the end-of-sequence token ids of the generation config, or else of config.json."""
    declared = config.token_ids("eos_token_id", vocab_size)  # invalid ones are refused anyway
    preferred = read_generation_config(path, generation_config)
    return preferred.token_ids("eos_token_id", vocab_size) or declared


def build_architecture(
    architecture: str, family: ModelFamily, config: CheckpointConfig, eos_token_ids: tuple[int, ...]
) -> ModelArchitecture:
    """Build the architecture of a config.json by the entry of its family.

    Raises:
        ValueError: A setting is missing, invalid or unsupported. The message names it.
    """
    hidden = config.integer("hidden_size", maximum=MAX_WIDTH)
    latent = _parse_latent(family, config)
    heads, kv_heads, head_dim = _parse_heads(config, hidden, latent)
    if latent is None:
        ropes = parse_ropes(config, head_dim)
        scale = (config.number("query_pre_attn_scalar") if family.is_gemma else head_dim) ** -0.5
    else:
        ropes = parse_ropes(config, latent.rope_dim)
        scale = latent.query_dim**-0.5 * ropes[0].score_factor
    moe = parse_moe(family, config)
    layer_architectures = _build_layers(family, config, ropes, has_moe=moe is not None)
    has_attention_bias = family.attention_bias == "stated" and config.flag("attention_bias")
    return ModelArchitecture(
        family=architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration"),
        architecture=architecture,
        num_layers=len(layer_architectures),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", maximum=MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_model_len=max_supported_len(config, ropes),
        eos_token_ids=eos_token_ids,
        activation=_activation(family, config),
        norm_kind=family.norm_kind,
        norm_eps=config.number("rms_norm_eps", exclusive=False),
        norm_positions=family.norm_positions,
        qk_norm=family.qk_norm,
        qkv_bias=has_attention_bias or family.attention_bias == "qkv",
        o_bias=has_attention_bias,
        mlp_bias=config.flag("mlp_bias"),
        has_sinks=family.has_sinks,
        attention_scale=scale,
        attention_softcap=_gemma_number(family, config, "attn_logit_softcapping"),
        logit_softcap=_gemma_number(family, config, "final_logit_softcapping"),
        embedding_scale=float(hidden) ** 0.5 if family.is_gemma else None,
        tied_embeddings=config.flag("tie_word_embeddings"),
        ropes=ropes,
        layer_architectures=layer_architectures,
        moe=moe,
        latent=latent,
        delta_net=_parse_delta_net(family, config),
        has_output_gate=family.has_delta_nets,
        is_causal=not config.flag("use_bidirectional_attention"),
    )


def _parse_heads(
    config: CheckpointConfig, hidden: int, latent: LatentArchitecture | None
) -> tuple[int, int, int]:
    """Return the numbers of query heads and of KV heads, and the elements of a head."""
    heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.optional_integer("num_key_value_heads", maximum=MAX_HEADS) or heads
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    if latent is not None:
        return heads, 1, latent.rope_dim + latent.kv_rank
    head_dim = config.optional_integer("head_dim", maximum=MAX_HEADS)
    if head_dim is None and hidden % heads:
        raise config.error("hidden_size", f"a multiple of the {heads} attention heads")
    head_dim = head_dim or hidden // heads
    if head_dim > MAX_HEADS:
        raise config.error(
            "num_attention_heads", f"at least {hidden // MAX_HEADS} for a hidden_size of {hidden}"
        )
    return heads, kv_heads, head_dim


def _gemma_number(family: ModelFamily, config: CheckpointConfig, key: str) -> float | None:
    return config.optional_number(key) if family.is_gemma else None


def _activation(family: ModelFamily, config: CheckpointConfig) -> Activation:
    if family.activation is not None:
        return family.activation
    name = (
        config.string("hidden_activation")
        if family.is_gemma
        else config.string("hidden_act") or "silu"
    )
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{config.path}: activation {name!r} is unknown; Argosy supports {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _parse_latent(family: ModelFamily, config: CheckpointConfig) -> LatentArchitecture | None:
    if not family.has_latent_attention:
        return None
    return LatentArchitecture(
        q_rank=config.optional_integer("q_lora_rank", maximum=MAX_WIDTH),
        kv_rank=config.integer("kv_lora_rank", maximum=MAX_WIDTH),
        nope_dim=config.integer("qk_nope_head_dim", maximum=MAX_HEADS),
        rope_dim=config.integer("qk_rope_head_dim", maximum=MAX_HEADS),
        value_dim=config.integer("v_head_dim", maximum=MAX_HEADS),
        has_rope_pairs=config.flag("rope_interleave"),
    )


def _parse_delta_net(family: ModelFamily, config: CheckpointConfig) -> DeltaNetArchitecture | None:
    if not family.has_delta_nets:
        return None
    key_heads = config.integer("linear_num_key_heads", maximum=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", maximum=MAX_HEADS)
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of the {key_heads} key heads")
    return DeltaNetArchitecture(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim", maximum=MAX_HEADS),
        value_dim=config.integer("linear_value_head_dim", maximum=MAX_HEADS),
        conv_width=config.integer("linear_conv_kernel_dim", 2, MAX_CONV_WIDTH),
        is_grouped=family.has_grouped_delta_nets,
    )


def _build_layers(
    family: ModelFamily,
    config: CheckpointConfig,
    ropes: tuple[RopeParams, ...],
    *,
    has_moe: bool,
) -> tuple[LayerArchitecture, ...]:
    count = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    window = _sliding_window(family, config)
    types = config.strings("layer_types") or _layer_types(family, config, count, window)
    kinds = {"full_attention", "linear_attention"} if family.has_delta_nets else _LAYER_KINDS
    if set(types) - kinds or len(types) != count:
        raise config.error("layer_types", f"{count} times {' or '.join(sorted(kinds))}")
    if "linear_attention" in types and "full_attention" not in types:
        raise config.error("layer_types", "a list with at least one full_attention")
    if "sliding_attention" in types and window is None:
        raise config.error(
            "sliding_window", "a number of tokens, as layer_types has sliding layers"
        )
    sparse_layers = moe_layers(config, count) if has_moe else frozenset()
    return tuple(
        LayerArchitecture(
            sliding_window=window if kind == "sliding_attention" else None,
            rope_index=len(ropes) - 1 if kind == "sliding_attention" else 0,
            is_moe=index in sparse_layers,
            is_recurrent=kind == "linear_attention",
        )
        for index, kind in enumerate(types)
    )


def _sliding_window(family: ModelFamily, config: CheckpointConfig) -> int | None:
    if family.sliding_windows == "upper" and not config.flag("use_sliding_window"):
        return None
    window = config.optional_integer("sliding_window")
    if window is not None and config.flag("use_bidirectional_attention"):
        return window // 2 + 1  # config.json states the width of both directions together
    return window


def _layer_types(
    family: ModelFamily, config: CheckpointConfig, count: int, window: int | None
) -> tuple[str, ...]:
    """Derive each layer's attention type from the family's rule, for a config without `layer_types`."""
    if family.has_delta_nets:
        interval = config.integer("full_attention_interval")
        return tuple(
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
        )
    first_sliding = count
    period = count + 1
    if window is not None and family.sliding_windows != "none":
        is_upper = family.sliding_windows == "upper" and family.moe_style is None
        first_sliding = config.integer("max_window_layers", minimum=0) if is_upper else 0
        period = (
            config.integer("sliding_window_pattern")
            if family.sliding_windows == "pattern"
            else period
        )
    return tuple(
        "sliding_attention" if i >= first_sliding and (i + 1) % period else "full_attention"
        for i in range(count)
    )
