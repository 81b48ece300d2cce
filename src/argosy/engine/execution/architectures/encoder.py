"""Architecture of an encoder as plain values, read from config.json by the table of the supported families."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from argosy.engine.execution.architectures.architecture import Architecture
from argosy.engine.execution.architectures.rope import RopeParams, max_supported_len, parse_ropes
from argosy.engine.execution.checkpoint_formats import parse_quantization
from argosy.engine.execution.checkpoint_formats.checkpoint import read_config_values
from argosy.engine.execution.config.checkpoint_config import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    CheckpointConfig,
)

EncoderActivation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh"]


@dataclass(frozen=True, slots=True)
class ClassifierArchitecture:
    """Architecture of a classification head: a layer of the encoder's width, and the projection to labels."""

    num_labels: int
    activation: EncoderActivation
    has_norm: bool
    has_dense_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderArchitecture(Architecture):
    """Architecture of a transformer whose tokens attend in both directions."""

    activation: EncoderActivation
    norm_eps: float
    has_norm_bias: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    is_modern: bool
    """Whether norms come before attention and MLP, the MLP is gated, and positions are rotations."""
    num_positions: int
    """Rows of the table of positions, or 0 if the model rotates queries and keys."""
    first_position: int
    """Row of a sequence's first token in that table."""
    num_token_types: int
    """Rows of the table of token types, or 0 if the model has none."""
    ropes: tuple[RopeParams, ...]
    rope_indices: tuple[int, ...]
    """Index into `ropes` of each layer. Empty without rotations."""
    sliding_windows: tuple[int | None, ...]
    """Window of each layer: a token attends to those nearer than this many positions. None is all tokens."""
    classifier: ClassifierArchitecture | None
    """Classification head, or None for an embedding model."""

    @property
    def num_parameters(self) -> int:
        """Number of weights that compute vectors."""
        width, inner = self.hidden_size, self.intermediate_size
        norm = width * (1 + self.has_norm_bias)
        attention = 4 * width * width + self.has_attention_bias * 4 * width
        up_rows = inner * (1 + self.is_modern)
        mlp = width * (up_rows + inner) + self.has_mlp_bias * (up_rows + width)
        tables = (self.vocab_size + self.num_positions + self.num_token_types) * width
        total = tables + norm + self.num_layers * (attention + mlp + 2 * norm)
        if self.classifier is not None:
            head = self.classifier
            total += width * (width + head.has_dense_bias + head.num_labels) + head.num_labels
            total += norm if head.has_norm else 0
        return total  # a pre-norm encoder has a final norm, but none in the first layer's attention

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that compute one token, which are all."""
        return self.num_parameters


def read_encoder_architecture(path: Path, num_labels: int | None) -> EncoderArchitecture:
    """Read config.json of an encoder, whose classification head is ignored if `num_labels` is None.

    Raises:
        ValueError: Argosy cannot compute the model exactly as intended. The message says what to do.
    """
    file, values = read_config_values(path)
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    family_name, _ = split_architecture(name)
    family = ENCODER_FAMILIES[family_name]
    config = CheckpointConfig(file, values, family.defaults)
    _reject_unsupported(config)
    hidden = config.integer("hidden_size", maximum=MAX_WIDTH)
    heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    if hidden % heads:
        raise config.error("hidden_size", f"a multiple of the {heads} attention heads")
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    positions = config.integer("max_position_embeddings")
    offset = config.integer("pad_token_id", minimum=0) + 1 if family.has_padding_offset else 0
    ropes, kinds = _parse_layers(family, config, hidden // heads, num_layers)
    window = config.integer("local_attention") // 2 + 1 if family.is_modern else None
    return EncoderArchitecture(
        family=family_name,
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", maximum=MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=config.integer("vocab_size"),
        max_model_len=max_supported_len(config, ropes) if ropes else positions - offset,
        eos_token_ids=(),
        tied_embeddings=True,
        is_causal=False,
        has_head=False,
        activation=_activation(
            config, "hidden_activation" if family.is_modern else "hidden_act", "gelu"
        ),
        norm_eps=config.number("norm_eps" if family.is_modern else "layer_norm_eps"),
        has_norm_bias=config.flag("norm_bias") if family.is_modern else True,
        has_attention_bias=config.flag("attention_bias") if family.is_modern else True,
        has_mlp_bias=config.flag("mlp_bias") if family.is_modern else True,
        is_modern=family.is_modern,
        num_positions=0 if family.is_modern else positions,
        first_position=offset,
        num_token_types=0 if family.is_modern else config.integer("type_vocab_size"),
        ropes=ropes,
        rope_indices=tuple(
            len(ropes) - 1 if kind == "sliding_attention" else 0 for kind in kinds if ropes
        ),
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        classifier=None if num_labels is None else _parse_classifier(family, config, num_labels),
    )


def _reject_unsupported(config: CheckpointConfig) -> None:
    """Raise ValueError for settings that change the results in an unsupported way."""
    if parse_quantization(config) is not None:
        raise config.error("quantization_config", "absent, because encoders are not quantized")
    if config.string("position_embedding_type") not in (None, "absolute"):
        raise config.error("position_embedding_type", "absolute")
    if config.flag("is_decoder") or config.flag("add_cross_attention"):
        raise config.error("is_decoder", "false for an encoder")


def _parse_classifier(
    family: EncoderFamily, config: CheckpointConfig, num_labels: int
) -> ClassifierArchitecture:
    return ClassifierArchitecture(
        num_labels=num_labels,
        activation=_activation(config, "classifier_activation", family.head_activation),
        has_norm="head.norm" in family.head_names,
        has_dense_bias=config.flag("classifier_bias") if family.is_modern else True,
    )


def _parse_layers(
    family: EncoderFamily, config: CheckpointConfig, head_dim: int, num_layers: int
) -> tuple[tuple[RopeParams, ...], tuple[str, ...]]:
    """Return the ropes, and the attention type of each layer."""
    if not family.is_modern:
        return (), ("full_attention",) * num_layers
    thetas = {
        "rope_theta": config.optional_number("global_rope_theta", 1.0) or 160_000.0,
        "rope_local_base_freq": config.optional_number("local_rope_theta", 1.0) or 10_000.0,
    }
    ropes = parse_ropes(config.with_values({**config.values, **thetas}), head_dim)
    period = config.integer("global_attn_every_n_layers")
    kinds = config.strings("layer_types") or tuple(
        "sliding_attention" if index % period else "full_attention" for index in range(num_layers)
    )
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise config.error("layer_types", f"{num_layers} times full_attention or sliding_attention")
    return ropes, kinds


def _activation(config: CheckpointConfig, key: str, default: str) -> EncoderActivation:
    name = config.string(key) or default
    if name not in get_args(EncoderActivation):
        raise config.error(key, f"one of {', '.join(get_args(EncoderActivation))}")
    return cast("EncoderActivation", name)


TensorNames = dict[str, tuple[str, ...]]
"""Parameter of the encoder without its kind -> stored parts whose rows are concatenated. `{i}` is the layer."""

_BERT: TensorNames = {
    "embed.words": ("embeddings.word_embeddings",),
    "embed.positions": ("embeddings.position_embeddings",),
    "embed.token_types": ("embeddings.token_type_embeddings",),
    "embed.norm": ("embeddings.LayerNorm",),
    "attention.qkv": tuple(
        f"encoder.layer.{{i}}.attention.self.{part}" for part in ("query", "key", "value")
    ),
    "attention.o": ("encoder.layer.{i}.attention.output.dense",),
    "attention_out": ("encoder.layer.{i}.attention.output.LayerNorm",),
    "mlp.up": ("encoder.layer.{i}.intermediate.dense",),
    "mlp.down": ("encoder.layer.{i}.output.dense",),
    "mlp_out": ("encoder.layer.{i}.output.LayerNorm",),
}
_MODERN_BERT: TensorNames = {
    "embed.words": ("embeddings.tok_embeddings",),
    "embed.norm": ("embeddings.norm",),
    "attention.qkv": ("layers.{i}.attn.Wqkv",),
    "attention.o": ("layers.{i}.attn.Wo",),
    "attention_in": ("layers.{i}.attn_norm",),
    "mlp.up": ("layers.{i}.mlp.Wi",),
    "mlp.down": ("layers.{i}.mlp.Wo",),
    "mlp_in": ("layers.{i}.mlp_norm",),
    "norm": ("final_norm",),
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Differences between encoder families."""

    tensor_names: TensorNames
    prefix: str
    """Prefix of the encoder's tensors in a checkpoint with a head. Other checkpoints have none."""
    head_names: TensorNames
    """Parameters of the classification head, with their full names."""
    unused_tensors: tuple[str, ...]
    """Patterns of stored tensors that pooling does not need, such as the heads of the training."""
    is_modern: bool = False
    """Whether norms come before attention and MLP, the MLP is gated, and positions are rotations."""
    has_padding_offset: bool = False
    """Whether positions are counted from the padding token's id plus 1."""
    states_classifier_pooling: bool = False
    """Whether `classifier_pooling` of config.json selects the vector that the head classifies."""
    head_activation: str = "tanh"
    """Activation of the classification head, unless config.json states it."""
    defaults: dict[str, object] = field(default_factory=dict)
    """Default values of absent keys in config.json."""


_UNUSED = (r"(.*\.)?position_ids$", r"(.*\.)?pooler\.")
_ROBERTA = EncoderFamily(
    tensor_names=_BERT,
    prefix="roberta.",
    head_names={"head.dense": ("classifier.dense",), "head.out": ("classifier.out_proj",)},
    unused_tensors=(*_UNUSED, r"(lm_head|classifier)\."),
    has_padding_offset=True,
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "pad_token_id": 1,
    },
)
ENCODER_FAMILIES: dict[str, EncoderFamily] = {
    "Bert": EncoderFamily(
        tensor_names=_BERT,
        prefix="bert.",
        head_names={"head.dense": ("bert.pooler.dense",), "head.out": ("classifier",)},
        unused_tensors=(*_UNUSED, r"(cls|classifier)\."),
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2},
    ),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "ModernBert": EncoderFamily(
        tensor_names=_MODERN_BERT,
        prefix="model.",
        head_names={
            "head.dense": ("head.dense",),
            "head.norm": ("head.norm",),
            "head.out": ("classifier",),
        },
        unused_tensors=(r"(head|decoder|classifier)\.",),
        is_modern=True,
        states_classifier_pooling=True,
        head_activation="gelu",
        defaults={
            "hidden_activation": "gelu",
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
        },
    ),
}
"""Encoder families by the start of the name in `architectures`. To support a new family, add an entry."""
_SUFFIXES = ("ForSequenceClassification", "ForMaskedLM", "ForPreTraining", "Model")


def split_architecture(name: str) -> tuple[str, str]:
    """Return the family of a name in `architectures`, and its suffix, which names the head."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def encoder_tensor_names(
    architecture: EncoderArchitecture, parameter: str
) -> tuple[tuple[str, ...], ...]:
    """Return the alternatives in which a checkpoint may store a parameter of the encoder, most common first."""
    family = ENCODER_FAMILIES[architecture.family]
    module, _, kind = parameter.rpartition(".")
    if module.startswith("head."):
        return (tuple(f"{name}.{kind}" for name in family.head_names[module]),)
    layer = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
    names = [name.replace("{i}", layer) for name in family.tensor_names[module]]
    kinds = [kind]
    if names[0].endswith("LayerNorm"):  # in checkpoints that were converted from TensorFlow
        kinds.append({"weight": "gamma", "bias": "beta"}[kind])
    return tuple(
        tuple(f"{prefix}{name}.{each}" for name in names)
        for each in kinds
        for prefix in (family.prefix, "")
    )
