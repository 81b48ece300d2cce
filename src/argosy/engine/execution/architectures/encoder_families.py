"""Table of the supported encoder families, with switches and a map of tensor names for each."""

from __future__ import annotations

from dataclasses import dataclass, field

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
