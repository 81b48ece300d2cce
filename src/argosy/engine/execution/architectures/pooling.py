"""Layout of a model that computes vectors: pooling, dense layers and prompts, as sentence-transformers writes them.

A checkpoint computes vectors if `modules.json` lists a `Pooling` or a `LogitScore` module. So do encoders, classifiers,
and decoders without a language-model head. A chat model whose `modules.json` lists only its `Transformer` generates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.architectures.decoder_families import FAMILIES, find_decoder_family
from argosy.engine.execution.architectures.encoder import (
    ENCODER_FAMILIES,
    EncoderArchitecture,
    read_encoder_architecture,
    split_architecture,
)
from argosy.engine.execution.checkpoint_formats.checkpoint import read_config_values
from argosy.engine.execution.config.checkpoint_config import CheckpointConfig
from argosy.engine.execution.config.sentence_transformers import (
    DenseLayout,
    PoolingMode,
    read_dimensions,
    read_embedding_modules,
    read_max_tokens,
    read_modules,
    read_optional_json,
    read_prompts,
    read_score_tokens,
    read_transformer_settings,
)
from argosy.engine.pooling import ModelTask, PoolingActivation, PoolingInfo, PoolingTask

PoolingHead = Literal["embedding", "classification", "logit_score"]
"""Computation on the hidden states: a pooled vector, the outputs of a classifier, or the logit of a token."""
_SCORE_ACTIVATIONS: dict[str, PoolingActivation] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
}
_CAUSAL_SUFFIX = "ForCausalLM"
_CLASSIFIER_SUFFIX = "ForSequenceClassification"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingLayout:
    """Everything about a pooling model beside the architecture of its transformer."""

    head: PoolingHead
    modes: tuple[PoolingMode, ...] = ("mean",)
    dense: tuple[DenseLayout, ...] = ()
    score_token_ids: tuple[int, ...] = ()
    """Token of a relevant document, and if it is known that of an irrelevant one."""
    max_input_tokens: int | None = None
    """Stated limit of an input."""
    num_labels: int = 0
    """Outputs of a classifier."""
    info: PoolingInfo
    """Properties that requests need. The limit of an input and the size of a result follow when the model is loaded."""

    def describe(self) -> str:
        """Return what the model computes, for people."""
        if self.head == "logit_score":
            return "scores of pairs, from the logits of a token"
        if self.head == "classification":
            return "scores of pairs" if self.num_labels == 1 else f"{self.num_labels} labels"
        parts = [" + ".join(self.modes)]
        parts += [f"dense to {dense.out_features}" for dense in self.dense]
        return f"embeddings ({', '.join(parts + ['normalized'] * self.info.is_normalized)})"


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
    modules = read_modules(path)
    kinds = [module.kind for module in modules]
    transformer = read_transformer_settings(path, modules)
    head = _find_head(architecture, config, kinds, transformer, task)
    if head is None:
        return None
    settings = CheckpointConfig(
        path / "config_sentence_transformers.json",
        read_optional_json(path / "config_sentence_transformers.json"),
        {},
    )
    is_classifier = head == "classification"
    labels = _read_labels(config) if is_classifier else ("LABEL_0",)
    fields: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    if head == "embedding":
        fields, properties = read_embedding_modules(path, modules, settings)
    else:
        properties["activation"] = _read_score_activation(settings, config, len(labels))
    if is_classifier:
        fields = {"modes": (_classifier_mode(architecture, config),), "num_labels": len(labels)}
    elif head == "logit_score":
        fields = {"modes": ("lasttoken",), "score_token_ids": read_score_tokens(path, modules)}
    return PoolingLayout(
        head=head,
        max_input_tokens=read_max_tokens(path, transformer),
        info=PoolingInfo(
            tasks=_tasks(head, len(labels)),
            output_size=0,
            max_input_tokens=0,
            labels=labels if is_classifier else None,
            is_lowercased=transformer.flag("do_lower_case"),
            prompts=read_prompts(settings),
            default_prompt_name=settings.string("default_prompt_name"),
            matryoshka_dimensions=read_dimensions(settings, config),
            reads_all_tokens=fields.get("modes") != ("lasttoken",),
            renders_pairs=head == "logit_score",
            **properties,
        ),
        **fields,
    )


def read_pooling_architecture(
    path: Path, layout: PoolingLayout, max_model_len: int | None = None
) -> ModelArchitecture | EncoderArchitecture:
    """Read the architecture of a pooling model's transformer. `max_model_len` replaces the layout's limit of the input.

    Raises:
        ValueError: Argosy cannot compute the model exactly as intended. The message says what to do.
    """
    file, values = read_config_values(path)
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    architecture: ModelArchitecture | EncoderArchitecture
    if split_architecture(name)[0] in ENCODER_FAMILIES:
        is_classifier = layout.head == "classification"
        architecture = read_encoder_architecture(path, layout.num_labels if is_classifier else None)
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


def describe_pooling(layout: PoolingLayout, hidden_size: int, max_input_tokens: int) -> PoolingInfo:
    """Describe a loaded pooling model, whose vectors have `hidden_size` elements, to the request's side."""
    output_size = len(layout.modes) * hidden_size
    if layout.head != "embedding":
        output_size = max(1, layout.num_labels)
    elif layout.dense:
        output_size = layout.dense[-1].out_features
    return msgspec.structs.replace(
        layout.info, output_size=output_size, max_input_tokens=max_input_tokens
    )


def _tasks(head: PoolingHead, num_labels: int) -> tuple[PoolingTask, ...]:
    if head == "logit_score":
        return ("score",)
    if head == "classification":
        return ("classify", "score") if num_labels == 1 else ("classify",)
    return ("embed", "token_embed", "score")
