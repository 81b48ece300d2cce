"""Layout of a model that computes vectors: pooling, dense layers and prompts, as sentence-transformers writes them.

A checkpoint computes vectors if `modules.json` lists a `Pooling` or a `LogitScore` module. So do encoders, classifiers,
and decoders without a language-model head. A chat model whose `modules.json` lists only its `Transformer` generates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import tokenizers

from argosy.engine.execution.architecture_config import read_architecture
from argosy.engine.execution.checkpoint import read_config_values
from argosy.engine.execution.checkpoint_config import (
    MAX_INTEGER,
    MAX_WIDTH,
    CheckpointConfig,
    read_json,
)
from argosy.engine.execution.encoder_architecture import read_encoder_architecture
from argosy.engine.execution.encoder_families import ENCODER_FAMILIES, split_architecture
from argosy.engine.execution.model_families import FAMILIES, find_decoder_family
from argosy.engine.pooling import PoolingActivation, Similarity

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from argosy.engine.execution.encoder_architecture import EncoderArchitecture
    from argosy.engine.execution.model_architecture import ModelArchitecture
    from argosy.engine.pooling import ModelTask

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""Reduction of a text's hidden states to a vector. Several are concatenated."""
PoolingHead = Literal["embedding", "classification", "logit_score"]
"""Computation on the hidden states: a pooled vector, the outputs of a classifier, or the logit of a token."""
DenseActivation = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]

_LEGACY_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of sentence-transformers before version 6, in the order in which vectors are concatenated."""
_TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
)
_ACTIVATIONS: dict[str, DenseActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_SCORE_ACTIVATIONS: dict[str, PoolingActivation] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
}
_CAUSAL_SUFFIX = "ForCausalLM"
_CLASSIFIER_SUFFIX = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Dense layer after the pooling, y = activation(x @ weight.T + bias), in a folder of its own."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingLayout:
    """Everything about a pooling model beside the architecture of its transformer."""

    head: PoolingHead
    modes: tuple[PoolingMode, ...] = ("mean",)
    includes_prompt: bool = True
    dense: tuple[DenseLayout, ...] = ()
    is_normalized: bool = False
    score_token_ids: tuple[int, ...] = ()
    """Token of a relevant document, and if it is known that of an irrelevant one."""
    max_input_tokens: int | None = None
    is_lowercased: bool = False
    prompts: Mapping[str, str]
    default_prompt_name: str | None = None
    similarity: Similarity = "cosine"
    activation: PoolingActivation = "identity"
    labels: tuple[str, ...] = ()
    matryoshka_dimensions: tuple[int, ...] | None = None

    @property
    def reads_all_tokens(self) -> bool:
        """Whether the result needs the hidden states of other tokens than the last one."""
        return self.head != "logit_score" and self.modes != ("lasttoken",)


@dataclass(frozen=True, slots=True)
class _Module:
    """Entry of `modules.json`."""

    kind: str
    """Last component of the module's type, which is the same in all versions."""
    folder: Path


def read_pooling_layout(path: Path, task: ModelTask = "auto") -> PoolingLayout | None:
    """Return the layout of a model that computes vectors, or None for a model that generates text.

    Args:
        path: Directory of the checkpoint, or a GGUF file.
        task: What the model is used for. `auto` follows the layout of the checkpoint.

    Raises:
        ValueError: The checkpoint has a module that Argosy does not compute, or a file is damaged.
    """
    if task == "generate" or path.is_file():
        if task in ("embed", "score"):
            raise ValueError(f"{path}: GGUF files generate text; use the safetensors checkpoint")
        return None
    file, values = read_config_values(path)
    config = CheckpointConfig(file, values, {})
    architecture = next(iter(config.strings("architectures")), "")
    modules = _read_modules(path)
    kinds = [module.kind for module in modules]
    transformer = _read_transformer_settings(path, modules)
    head = _find_head(architecture, config, kinds, transformer, task)
    if head is None:
        return None
    settings = CheckpointConfig(
        path / "config_sentence_transformers.json",
        _read_optional(path / "config_sentence_transformers.json"),
        {},
    )
    common: dict[str, Any] = {
        "head": head,
        "max_input_tokens": _read_max_tokens(path, transformer),
        "is_lowercased": transformer.flag("do_lower_case"),
        "prompts": _read_prompts(settings),
        "default_prompt_name": settings.string("default_prompt_name"),
        "matryoshka_dimensions": _read_dimensions(settings, config),
    }
    if head == "embedding":
        return PoolingLayout(**common, **_read_embedding(path, modules, settings))
    labels = _read_labels(config) if head == "classification" else ("LABEL_0",)
    common["activation"] = _read_score_activation(settings, config, len(labels))
    if head == "logit_score":
        ids = _read_score_tokens(path, modules)
        return PoolingLayout(**common, labels=labels, score_token_ids=ids)
    mode = _classifier_mode(architecture, config)
    return PoolingLayout(**common, labels=labels, modes=(mode,))


def read_pooling_architecture(
    path: Path, layout: PoolingLayout, max_model_len: int | None = None
) -> ModelArchitecture | EncoderArchitecture:
    """Read the architecture of a pooling model's transformer.

    Args:
        path: Directory of the checkpoint.
        layout: Layout of the checkpoint.
        max_model_len: Limit of the input, which replaces that of the layout.

    Raises:
        ValueError: Argosy cannot compute the model exactly as intended. The message says what to do.
    """
    file, values = read_config_values(path)
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    architecture: ModelArchitecture | EncoderArchitecture
    if split_architecture(name)[0] in ENCODER_FAMILIES:
        is_classifier = layout.head == "classification"
        architecture = read_encoder_architecture(
            path, len(layout.labels) if is_classifier else None
        )
    elif find_decoder_family(name) in FAMILIES:
        architecture = read_architecture(path, has_head=False)
    else:
        families = ", ".join(
            (*ENCODER_FAMILIES, *(each.removesuffix(_CAUSAL_SUFFIX) for each in FAMILIES))
        )
        raise ValueError(
            f"{file}: architectures is {names}; Argosy computes embeddings and scores with {families}"
        )
    limit = max_model_len or layout.max_input_tokens
    if limit is not None and limit < architecture.max_model_len:
        architecture = replace(architecture, max_model_len=limit)
    return architecture


def _find_head(
    architecture: str,
    config: CheckpointConfig,
    kinds: list[str],
    transformer: CheckpointConfig,
    task: ModelTask,
) -> PoolingHead | None:
    """Return what a checkpoint computes beside its transformer, or None if it generates text."""
    is_encoder = split_architecture(architecture)[0] in ENCODER_FAMILIES
    if "Pooling" in kinds:
        return "embedding"
    if "LogitScore" in kinds:
        return "logit_score"
    if (
        architecture.endswith(_CLASSIFIER_SUFFIX)
        or transformer.string("transformer_task") == "sequence-classification"
    ):
        return "classification"
    if task == "score" and architecture.endswith(_CAUSAL_SUFFIX):
        return "logit_score"
    has_no_head = architecture.endswith("Model") or config.flag("use_bidirectional_attention")
    if is_encoder or has_no_head or task == "embed":
        return "embedding"
    if task == "score":
        raise ValueError(
            f"{config.path}: {architecture} computes no scores; leave the task at auto, or use a reranker"
        )
    return None


def _read_modules(path: Path) -> list[_Module]:
    file = path / "modules.json"
    if not file.is_file():
        return []
    try:
        entries = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {error}; fetch the model again") from error
    if not isinstance(entries, list):
        raise ValueError(f"{file} does not hold a list; fetch the model again")  # noqa: TRY004
    modules = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ValueError(f"{file}: {entry!r} is no module; fetch the model again")  # noqa: TRY004
        folder = path / str(entry.get("path", ""))
        if not folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{file}: {entry['path']} is outside of the model's directory")
        modules.append(_Module(entry["type"].rpartition(".")[2], folder))
    return modules


def _read_transformer_settings(path: Path, modules: list[_Module]) -> CheckpointConfig:
    folders = [module.folder for module in modules if module.kind == "Transformer"] or [path]
    for name in _TRANSFORMER_FILES:
        file = folders[0] / name
        if file.is_file():
            return CheckpointConfig(file, read_json(file), {})
    return CheckpointConfig(folders[0] / _TRANSFORMER_FILES[0], {}, {})


def _read_max_tokens(path: Path, transformer: CheckpointConfig) -> int | None:
    """Return the stated length of an input, or else the tokenizer's, which may be a huge number for none."""
    stated = transformer.optional_integer("max_seq_length")
    if stated is not None:
        return stated
    length = _read_optional(path / "tokenizer_config.json").get("model_max_length")
    return length if isinstance(length, int) and 0 < length <= MAX_INTEGER else None


def _read_embedding(
    path: Path, modules: list[_Module], settings: CheckpointConfig
) -> dict[str, Any]:
    """Return the fields of an embedding model. Without modules.json, the mean of the tokens is the embedding."""
    fields: dict[str, Any] = {"similarity": _read_similarity(settings)}
    dense: list[DenseLayout] = []
    order = [module.kind for module in modules]
    expected = ["Transformer", "Pooling", *["Dense"] * order.count("Dense")]
    if "Normalize" in order:
        expected.append("Normalize")
    if modules and order != expected:
        raise ValueError(
            f"{path / 'modules.json'}: Argosy does not compute the modules {', '.join(order)}; "
            "it serves a Transformer with Pooling, Dense layers and Normalize, in this order"
        )
    for module in modules:
        if module.kind == "Pooling":
            fields |= _read_pooling(module.folder)
        elif module.kind == "Dense":
            dense.append(_read_dense(module.folder))
        elif module.kind == "Normalize":
            fields["is_normalized"] = True
    return fields | {"dense": tuple(dense)}


def _read_pooling(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    config = CheckpointConfig(file, read_json(file), {"include_prompt": True})
    stated = config.get("pooling_mode")
    if stated is None:
        modes = tuple(mode for key, mode in _LEGACY_MODES.items() if config.flag(key)) or ("mean",)
    else:
        names = (stated,) if isinstance(stated, str) else config.strings("pooling_mode")
        if not names or not set(names) <= set(get_args(PoolingMode)):
            raise config.error(
                "pooling_mode", f"one of {', '.join(get_args(PoolingMode))}, or a list"
            )
        modes = cast("tuple[PoolingMode, ...]", names)
    return {"modes": modes, "includes_prompt": config.flag("include_prompt")}


def _read_dense(folder: Path) -> DenseLayout:
    file = folder / "config.json"
    config = CheckpointConfig(
        file,
        read_json(file),
        {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh"},
    )
    activation = config.string("activation_function") or ""
    if activation not in _ACTIVATIONS:
        raise config.error("activation_function", f"one of {', '.join(_ACTIVATIONS)}")
    if config.flag("use_residual"):
        raise config.error("use_residual", "false")
    for key in ("module_input_name", "module_output_name"):
        if config.string(key) not in (None, "sentence_embedding"):
            raise config.error(key, "sentence_embedding")
    return DenseLayout(
        folder,
        config.integer("in_features", maximum=MAX_WIDTH),
        config.integer("out_features", maximum=MAX_WIDTH),
        config.flag("bias"),
        _ACTIVATIONS[activation],
    )


def _read_score_tokens(path: Path, modules: list[_Module]) -> tuple[int, ...]:
    """Return the tokens whose logits are the score, which are "yes" and "no" if no module states them."""
    folders = [module.folder for module in modules if module.kind == "LogitScore"]
    if folders:
        file = folders[0] / "config.json"
        config = CheckpointConfig(file, read_json(file), {})
        true_id = config.integer("true_token_id", minimum=0)
        false_id = config.optional_integer("false_token_id", minimum=0)
        return (true_id,) if false_id is None else (true_id, false_id)
    file = path / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises its base class
        raise ValueError(f"cannot read {file}: {error}; fetch the model again") from error
    yes_id = tokenizer.token_to_id("yes")
    no_id = tokenizer.token_to_id("no")
    if yes_id is None or no_id is None:
        raise ValueError(
            f"{file} has no tokens yes and no, whose logits are the score; use a reranker"
        )
    return yes_id, no_id


def _classifier_mode(architecture: str, config: CheckpointConfig) -> PoolingMode:
    family = ENCODER_FAMILIES.get(split_architecture(architecture)[0])
    if family is None:
        return "lasttoken"  # decoders
    if not family.states_classifier_pooling:
        return "cls"
    mode = config.string("classifier_pooling") or "cls"
    if mode not in ("cls", "mean"):
        raise config.error("classifier_pooling", "cls or mean")
    return cast("PoolingMode", mode)


def _read_labels(config: CheckpointConfig) -> tuple[str, ...]:
    labels = config.section("id2label")
    stated = config.optional_integer("num_labels") or len(labels) or 2  # transformers' default
    return tuple(str(labels.get(str(index), f"LABEL_{index}")) for index in range(stated))


def _read_score_activation(
    settings: CheckpointConfig, config: CheckpointConfig, num_labels: int
) -> PoolingActivation:
    """Return the activation of scores and probabilities.

    For one label it is the one that the checkpoint states, in any version, or else the sigmoid.
    """
    if num_labels > 1:
        is_multi_label = config.string("problem_type") == "multi_label_classification"
        return "sigmoid" if is_multi_label else "softmax"
    older = config.section("sentence_transformers").get("activation_fn")
    stated = (
        older
        or config.string("sbert_ce_default_activation_function")
        or settings.string("activation_fn")
    )
    if isinstance(stated, str) and stated.startswith("torch."):
        name = stated.rpartition(".")[2]
        if name not in _SCORE_ACTIVATIONS:
            raise ValueError(
                f"{config.path}: the activation {stated} is unknown; "
                f"Argosy computes {', '.join(_SCORE_ACTIVATIONS)}"
            )
        return _SCORE_ACTIVATIONS[name]
    return "sigmoid"


def _read_similarity(settings: CheckpointConfig) -> Similarity:
    name = settings.string("similarity_fn_name") or "cosine"
    if name not in get_args(Similarity):
        raise settings.error("similarity_fn_name", f"one of {', '.join(get_args(Similarity))}")
    return cast("Similarity", name)


def _read_prompts(settings: CheckpointConfig) -> dict[str, str]:
    prompts = settings.section("prompts")
    for name, prompt in prompts.items():
        if not isinstance(prompt, str):
            raise settings.error("prompts", f"an object of texts, but {name} is none")
    return {name: str(prompt) for name, prompt in prompts.items()}


def _read_dimensions(
    settings: CheckpointConfig, config: CheckpointConfig
) -> tuple[int, ...] | None:
    """Return the sizes to which an embedding may be truncated, under vLLM's key, or None if they are not stated."""
    for source in (config, settings):
        stated = source.get("matryoshka_dimensions")
        if stated is None:
            continue
        if not isinstance(stated, list) or not all(type(size) is int for size in stated):
            raise source.error("matryoshka_dimensions", "a list of whole numbers")
        return tuple(sorted(stated))
    return None


def _read_optional(file: Path) -> dict[str, object]:
    return read_json(file) if file.is_file() else {}
