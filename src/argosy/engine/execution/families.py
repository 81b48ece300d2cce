"""The table of model families: a row of switches and a map of tensor names for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from argosy.engine.execution.model_config import ModelConfig, read_json
from argosy.engine.execution.rope_config import read_ropes, served_len
from argosy.engine.execution.spec import (
    Activation,
    Description,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    NormPlace,
    QkNorm,
    RopeSpec,
    describe,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Description", "ModelSpec", "RopeSpec", "describe", "parts_of", "read_spec"]

Names = dict[str, tuple[tuple[str, ...], ...]]
"""Our name for a matrix or a norm -> the ways checkpoints store it; each way names the parts that
are concatenated, rows after rows. `[{e}]` takes entry e of a tensor that holds all experts."""

_ATTENTION: Names = {
    "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    "o": (("self_attn.o_proj",),),
    "qk.q_norm": (("self_attn.q_norm",),),
    "qk.k_norm": (("self_attn.k_norm",),),
    "attention_in": (("input_layernorm",),),
    "mlp_in": (("post_attention_layernorm",),),
}
_DENSE: Names = {
    **_ATTENTION,
    "mlp.gate_up": (("mlp.gate_proj", "mlp.up_proj"),),
    "mlp.down": (("mlp.down_proj",),),
}
_FUSED: Names = {
    **_DENSE,
    "qkv": (("self_attn.qkv_proj",),),
    "mlp.gate_up": (("mlp.gate_up_proj",),),
}
_MOE: Names = {
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
_AFTER: Names = {
    **_DENSE,
    "attention_out": (("post_attention_layernorm",),),
    "mlp_out": (("post_feedforward_layernorm",),),
}
_AROUND: Names = {
    **_AFTER,
    "mlp_in": (("pre_feedforward_layernorm",),),
}

_BEFORE_NORMS: frozenset[NormPlace] = frozenset({"attention_in", "mlp_in"})
_AFTER_NORMS: frozenset[NormPlace] = frozenset({"attention_out", "mlp_out"})

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_OUTER_KEYS = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
)
"""What a model of text and images may state beside its `text_config`."""
_DTYPES = {"float32", "float16", "bfloat16"}


@dataclass(frozen=True, slots=True)
class Family:
    """How one family departs from Llama."""

    names: Names = field(default_factory=lambda: _DENSE)
    prefixes: tuple[str, ...] = ("model.",)
    """Where a checkpoint keeps the decoder; the first that is there counts."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What an absent key of config.json stands for."""
    bias: Literal["stated", "qkv", "none"] = "stated"
    """Attention biases: on all four matrices if `attention_bias` says so, on q, k, v, or none."""
    windows: Literal["none", "all", "upper", "pattern"] = "none"
    """Which layers slide when `layer_types` does not say: all, those from `max_window_layers` up,
    or all but each n-th."""
    norm: NormKind = "narrow"
    norms: frozenset[NormPlace] = _BEFORE_NORMS
    qk_norm: QkNorm | None = None
    gemma: bool = False
    """Embedding times sqrt(hidden), softcaps, and queries scaled by `query_pre_attn_scalar`."""
    moe: Literal["mixtral", "qwen"] | None = None


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
_GEMMA_2 = Family(
    names=_AROUND,
    windows="pattern",
    norm="offset",
    norms=_BEFORE_NORMS | _AFTER_NORMS,
    gemma=True,
    defaults=_GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
)
_GEMMA_3 = Family(
    names=_AROUND,
    windows="pattern",
    norm="offset",
    norms=_BEFORE_NORMS | _AFTER_NORMS,
    qk_norm="head",
    gemma=True,
    prefixes=("model.", "language_model.model.", "model.language_model."),
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
_SLIDING: dict[str, object] = {**_COMMON, "sliding_window": 4096}
_QWEN: dict[str, object] = {**_SLIDING, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(defaults=_COMMON),
    "MistralForCausalLM": Family(bias="none", windows="all", defaults=_SLIDING),
    "Qwen2ForCausalLM": Family(bias="qkv", windows="upper", defaults=_QWEN),
    "Qwen3ForCausalLM": Family(
        qk_norm="head", windows="upper", defaults={**_QWEN, "head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": Family(
        names=_MOE, qk_norm="head", windows="upper", moe="qwen", defaults=_QWEN
    ),
    "MixtralForCausalLM": Family(
        names=_MOE,
        bias="none",
        windows="all",
        moe="mixtral",
        defaults={
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
    ),
    "Phi3ForCausalLM": Family(
        names=_FUSED,
        bias="none",
        windows="all",
        defaults={**_COMMON, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "Olmo2ForCausalLM": Family(
        names=_AFTER,
        norm="wide",
        norms=_AFTER_NORMS,
        qk_norm="full",
        defaults={**_COMMON, "rms_norm_eps": 1e-5},
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": _GEMMA_3,
}
"""By the name in `architectures`. A new family is a row here."""


def read_spec(path: Path) -> ModelSpec:
    """Read config.json and generation_config.json in the directory `path`.

    Raises ValueError, with what to do, for a model that we cannot compute exactly as it was meant.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json; give a directory in Hugging Face layout")
    values = read_json(file)
    architecture, family = _family(file, values)
    text = values.get("text_config")
    if isinstance(text, dict):
        values = {key: values[key] for key in _OUTER_KEYS if key in values} | text
    config = ModelConfig(file, values, family.defaults)
    _refuse_unknown(config, family)
    return _spec(architecture, family, config, _eos_token_ids(path, config))


def parts_of(spec: ModelSpec, parameter: str) -> tuple[tuple[str, ...], ...]:
    """The ways a checkpoint may store a parameter of the decoder, most usual first.

    A way is the tensors whose rows, one after the other, make the parameter; `name[i]` is entry i
    of the tensor `name`.
    """
    family = FAMILIES[spec.architecture]
    place, _, kind = parameter.rpartition(".")
    if place in ("embed", "head", "norm"):
        stored = {"embed": "embed_tokens", "head": "lm_head", "norm": "norm"}[place]
        if place == "head":
            return tuple((f"{p.removesuffix('model.')}lm_head.{kind}",) for p in family.prefixes)
        return tuple((f"{prefix}{stored}.{kind}",) for prefix in family.prefixes)
    _, layer, inner = place.split(".", 2)
    expert = ""
    if inner.startswith("mlp.experts."):
        _, _, expert, inner = inner.split(".", 3)
        inner = f"mlp.experts.{inner}"
    return tuple(
        tuple(_stored(f"{prefix}layers.{layer}.{part}", expert, kind) for part in way)
        for prefix in family.prefixes
        for way in family.names[inner]
    )


def _stored(part: str, expert: str, kind: str) -> str:
    """A part's full name; a tensor that holds all experts carries no `.weight`."""
    name = part.replace("{e}", expert)
    return name if name.endswith("]") else f"{name}.{kind}"


def _family(file: Path, values: dict[str, object]) -> tuple[str, Family]:
    names = values.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise ValueError(f"{file}: architectures is {names}; Argosy serves {', '.join(FAMILIES)}")


def _refuse_unknown(config: ModelConfig, family: Family) -> None:
    """Raise ValueError for settings that change the numbers in a way that we do not have."""
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"{config.path}: the checkpoint is quantized; "
            "take the float16, bfloat16 or float32 one of the same model"
        )
    if config.flag("use_bidirectional_attention"):
        raise ValueError(f"{config.path}: the model attends to later tokens; it cannot generate")
    if family.qk_norm and config.get("attn_logit_softcapping") is not None:
        raise config.error("attn_logit_softcapping", "null for this architecture")


def _eos_token_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's, else config.json's."""
    file = path / "generation_config.json"
    if file.is_file():
        stated = ModelConfig(file, read_json(file), {}).token_ids("eos_token_id")
        if stated:
            return stated
    return config.token_ids("eos_token_id")


def _spec(
    architecture: str, family: Family, config: ModelConfig, eos_token_ids: tuple[int, ...]
) -> ModelSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    head_dim = config.optional_integer("head_dim") or hidden // heads
    ropes = read_ropes(config, head_dim)
    moe = _moe(family, config)
    layer_specs = _layer_specs(family, config, ropes, moe)
    biased = family.bias == "stated" and config.flag("attention_bias")
    scale = config.number("query_pre_attn_scalar") if family.gemma else head_dim
    dtype = config.text("dtype") or config.text("torch_dtype") or "float32"
    return ModelSpec(
        family=architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration"),
        architecture=architecture,
        layers=len(layer_specs),
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_model_len=served_len(config, ropes),
        eos_token_ids=eos_token_ids,
        bos_token_id=config.optional_integer("bos_token_id"),
        dtype=dtype if dtype in _DTYPES else "float32",
        activation=_activation(family, config),
        norm=family.norm,
        norm_eps=config.number("rms_norm_eps"),
        norms=family.norms,
        qk_norm=family.qk_norm,
        qkv_bias=biased or family.bias == "qkv",
        o_bias=biased,
        mlp_bias=config.flag("mlp_bias"),
        attention_scale=float(scale) ** -0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping")
        if family.gemma
        else None,
        logit_softcap=config.optional_number("final_logit_softcapping") if family.gemma else None,
        embed_scale=float(hidden) ** 0.5 if family.gemma else None,
        tied=config.flag("tie_word_embeddings"),
        ropes=ropes,
        layer_specs=layer_specs,
        moe=moe,
    )


def _activation(family: Family, config: ModelConfig) -> Activation:
    name = config.text("hidden_activation") if family.gemma else config.text("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{config.path}: activation {name!r} is unknown; Argosy has {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _moe(family: Family, config: ModelConfig) -> MoeSpec | None:
    if family.moe is None:
        return None
    qwen = family.moe == "qwen"
    stated = config.optional_integer("num_local_experts")
    return MoeSpec(
        experts=stated or config.integer("num_experts"),
        active=config.integer("num_experts_per_tok"),
        intermediate=config.integer("moe_intermediate_size" if qwen else "intermediate_size"),
        normalize=config.flag("norm_topk_prob") if qwen else True,
        round_weights=qwen,
    )


def _layer_specs(
    family: Family, config: ModelConfig, ropes: tuple[RopeSpec, ...], moe: MoeSpec | None
) -> tuple[LayerSpec, ...]:
    count = config.integer("num_hidden_layers")
    window = _window(family, config)
    types = config.names("layer_types") or _layer_types(family, config, count, window)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != count:
        raise config.error("layer_types", f"{count} times full_attention or sliding_attention")
    if "sliding_attention" in types and window is None:
        raise config.error(
            "sliding_window", "a number of tokens, as layer_types has sliding layers"
        )
    step = config.optional_integer("decoder_sparse_step") or 1
    dense = {int(index) for index in config.numbers("mlp_only_layers")}
    return tuple(
        LayerSpec(
            window=window if kind == "sliding_attention" else None,
            rope=len(ropes) - 1 if kind == "sliding_attention" else 0,
            sparse=moe is not None and index not in dense and (index + 1) % step == 0,
        )
        for index, kind in enumerate(types)
    )


def _window(family: Family, config: ModelConfig) -> int | None:
    if family.windows == "upper" and not config.flag("use_sliding_window"):
        return None
    return config.optional_integer("sliding_window")


def _layer_types(
    family: Family, config: ModelConfig, count: int, window: int | None
) -> tuple[str, ...]:
    """Which layers slide, by the family's habit."""
    first = count
    period = count + 1
    if window is not None and family.windows != "none":
        upper = family.windows == "upper" and family.moe is None
        first = config.integer("max_window_layers") if upper else 0
        period = config.integer("sliding_window_pattern") if family.windows == "pattern" else period
    return tuple(
        "sliding_attention" if i >= first and (i + 1) % period else "full_attention"
        for i in range(count)
    )
