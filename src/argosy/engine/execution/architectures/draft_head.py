"""Architecture of a draft head, a layer that guesses later tokens from hidden states of its target."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from argosy.engine.execution.architectures.decoder import LayerArchitecture, ModelArchitecture
from argosy.engine.execution.architectures.decoder_config import build_architecture
from argosy.engine.execution.architectures.decoder_families import (
    FAMILIES,
    ModelFamily,
    MtpNames,
    WeightNames,
)
from argosy.engine.execution.checkpoint_formats.checkpoint import read_config_values
from argosy.engine.execution.config.checkpoint_config import MAX_WIDTH, CheckpointConfig

DraftHeadMethod = Literal["eagle3", "mtp"]
EAGLE_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Names of EAGLE-3 heads in `architectures`. Early ones have that of Llama, and a `draft_vocab_size`.

Those of the library speculators state a `speculators_model_type`, and their layer in `transformer_layer_config`."""
NUM_EAGLE_LAYERS = 3
"""Number of layers of the target whose hidden states an EAGLE-3 head reads."""
_LLAMA = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadArchitecture(ModelArchitecture):
    """Architecture of a draft head: that of its only layer, and what is around it.

    An EAGLE-3 head (Li et al. 2025) adds to the projected hidden states of its target. A head for multi-token
    prediction (DeepSeek-V3, 2024) projects the target's last hidden state and the embedding of the next token together.
    """

    method: DraftHeadMethod
    tensor_prefix: str
    """Prefix of the tensors of the head in the checkpoint, in which others may be those of the target."""
    names: WeightNames
    """Names of the head's tensors, with those of its layer after `layer.`."""
    unused_tensors: tuple[str, ...]
    """Patterns of tensors with the prefix that are not read."""
    draft_vocab_size: int
    """Number of tokens that it drafts. Those that it reads are all of `vocab_size`."""
    target_hidden_size: int
    target_layers: tuple[int, ...]
    """Numbers of the target's layers after which it reads the hidden states."""
    has_embedding: bool
    """Whether the head has an embedding of its own, instead of the target's."""
    is_hidden_first: bool = False
    """Whether the hidden state comes before the embedding where both are concatenated."""
    adds_normed: bool = False
    """EAGLE-3: whether the layer adds to the normalized hidden state."""

    @property
    def hidden_states_width(self) -> int:
        """Number of elements of the hidden states of a token in all layers that it reads."""
        return len(self.target_layers) * self.target_hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of weights of the head, without those that are its target's."""
        hidden = self.hidden_size
        width = 2 * hidden
        added = 0
        if self.method == "eagle3":
            width = self.hidden_states_width
            heads = self.num_heads + 2 * self.num_kv_heads
            added = hidden * heads * self.head_dim  # for embeddings, beside hidden states
        around = hidden * (width + 3) + added
        layers = sum(map(self._num_layer_parameters, self.layer_architectures))
        rows = self.has_head * self.draft_vocab_size + self.has_embedding * self.vocab_size
        return layers + around + rows * hidden


def is_eagle_head(path: Path) -> bool:
    """Return whether a checkpoint is an EAGLE-3 head.

    Raises:
        ValueError: It has no readable config.json.
    """
    _, values = read_config_values(path)
    names = values.get("architectures")
    stated = {str(name) for name in names} if isinstance(names, list) else set()
    is_early = _LLAMA in stated and "draft_vocab_size" in values
    is_of_speculators = values.get("speculators_model_type") == "eagle3"
    return bool(stated & {*EAGLE_ARCHITECTURES}) or is_early or is_of_speculators


def read_eagle_head(
    path: Path, stored_names: Collection[str], target: ModelArchitecture
) -> DraftHeadArchitecture:
    """Read the architecture of an EAGLE-3 head for a target.

    Raises:
        ValueError: It is the head of another model, or a kind of head that Argosy does not have.
    """
    file, values = read_config_values(path)
    family = FAMILIES[_LLAMA]
    config = CheckpointConfig(file, values, family.defaults)
    config = replace(config, values=config.section("transformer_layer_config") | values)
    layer = build_architecture(_LLAMA, family, config, ())
    if layer.num_layers != 1:
        raise config.error("num_hidden_layers", "1, because an EAGLE-3 head has one layer")
    section = config.with_values(config.section("eagle_config"))
    if section.get("use_aux_hidden_state") is False:
        raise section.error("use_aux_hidden_state", "true, or absent")
    if config.flag("norm_before_fc"):
        raise config.error("norm_before_fc", "false, or absent")
    hidden_size = config.optional_integer("target_hidden_size", maximum=MAX_WIDTH)
    hidden_size = hidden_size or layer.hidden_size
    has_embedding = "embed_tokens.weight" in stored_names
    if (hidden_size, layer.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"{file}: the head belongs to a model with hidden_size {hidden_size} and vocab_size {layer.vocab_size}, "
            f"not to this {target.family} with {target.hidden_size} and {target.vocab_size}; use its own head, or none"
        )
    if not has_embedding and layer.hidden_size != target.hidden_size:
        raise ValueError(f"{path} has no tensor embed_tokens.weight; the download is incomplete")
    has_head = "lm_head.weight" in stored_names
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in stored_names else "layers.0."
    return _extend(
        replace(
            layer,
            max_model_len=target.max_model_len,
            has_head=has_head,
            tied_embeddings=False,
            norm_positions=layer.norm_positions - {"attention_in"},
        ),
        method="eagle3",
        tensor_prefix="",
        names=_name_layer(family, prefix)
        | {
            "embed": (("embed_tokens",),),
            "projection": (("fc",),),
            "embedding_norm": ((f"{prefix}input_layernorm",),),
            "hidden_norm": ((f"{prefix}hidden_norm",),),
            "norm": (("norm",),),
            "head": (("lm_head",),),
        },
        unused_tensors=(r"[td]2[td]$",),
        draft_vocab_size=config.optional_integer("draft_vocab_size") or layer.vocab_size,
        target_hidden_size=hidden_size,
        target_layers=_find_eagle_layers(config, section, target.num_layers),
        has_embedding=has_embedding,
        adds_normed=config.flag("norm_before_residual"),
    )


def create_mtp_head(
    path: Path, stored_names: Collection[str], target: ModelArchitecture
) -> DraftHeadArchitecture:
    """Return the architecture of the first head for multi-token prediction in the checkpoint of a target.

    Raises:
        ValueError: The checkpoint has none that Argosy knows.
    """
    family = FAMILIES[target.architecture]
    mtp = family.mtp or MtpNames("mtp.")
    prefix = mtp.prefix.replace("{num_layers}", str(target.num_layers))
    if family.mtp is None or f"{prefix}{mtp.hidden_norm}.weight" not in stored_names:
        known = ", ".join(name for name, each in FAMILIES.items() if each.mtp is not None)
        raise ValueError(
            f"{path} has no head for multi-token prediction ({prefix}{mtp.hidden_norm}.weight), which checkpoints of "
            f"{known} may have; use another method of speculative_config"
        )
    layer = LayerArchitecture(None, 0, is_moe=target.layer_architectures[-1].is_moe)
    return _extend(
        replace(
            target,
            num_layers=1,
            layer_architectures=(layer,),
            delta_net=None,
            has_head=False,
            tied_embeddings=False,
        ),
        method="mtp",
        tensor_prefix=prefix,
        names=_name_layer(family, prefix + mtp.layer)
        | {
            module: ((prefix + getattr(mtp, module),),)
            for module in ("projection", "embedding_norm", "hidden_norm", "norm")
        },
        # copies of the target's matrices, and further heads
        unused_tensors=(r".*(embed_tokens|shared_head\.head)\.weight$",),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        target_layers=(target.num_layers,),
        has_embedding=False,
        is_hidden_first=mtp.is_hidden_first,
    )


def _extend(layer: ModelArchitecture, **values: object) -> DraftHeadArchitecture:
    """Return the architecture of a head with this layer."""
    inherited = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return DraftHeadArchitecture(**inherited | values)


def _name_layer(family: ModelFamily, prefix: str) -> WeightNames:
    """Return the names of the tensors of a family's layer with another prefix."""
    return {
        f"layer.{module}": tuple(tuple(prefix + part for part in parts) for parts in alternatives)
        for module, alternatives in family.weight_names.items()
    }


def _find_eagle_layers(
    config: CheckpointConfig, section: CheckpointConfig, num_layers: int
) -> tuple[int, ...]:
    """Return the numbers of layers after which the head reads hidden states.

    In `eagle_config`, as SGLang writes it, they are indices of layers. At the top level, as vLLM writes them, they are
    numbers of layers.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    layers = tuple(int(index) + 1 for index in section.numbers(key)) if section.values else ()
    layers = layers or tuple(map(int, config.numbers(key)))
    layers = layers or (2, num_layers // 2, num_layers - 3)
    if len(layers) != NUM_EAGLE_LAYERS or not all(0 <= layer <= num_layers for layer in layers):
        raise config.error(key, f"{NUM_EAGLE_LAYERS} layers of the target, which has {num_layers}")
    return layers
