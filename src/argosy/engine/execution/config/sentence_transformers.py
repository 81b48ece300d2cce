"""Reader of the files that sentence-transformers writes beside a transformer, in the spellings of all versions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import tokenizers

from argosy.engine.execution.config.checkpoint_config import (
    MAX_INTEGER,
    MAX_WIDTH,
    CheckpointConfig,
    read_json,
)
from argosy.engine.pooling import Similarity

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""Reduction of a text's hidden states to a vector. Several are concatenated."""
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


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Dense layer after the pooling, y = activation(x @ weight.T + bias), in a folder of its own."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class LayoutModule:
    """Entry of `modules.json`."""

    kind: str
    """Last component of the module's type, which is the same in all versions."""
    folder: Path


def read_modules(path: Path) -> list[LayoutModule]:
    """Return the modules of `modules.json` in their order, or none if the file is missing."""
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
        modules.append(LayoutModule(entry["type"].rpartition(".")[2], folder))
    return modules


def read_transformer_settings(path: Path, modules: list[LayoutModule]) -> CheckpointConfig:
    """Return the settings of the transformer module, whose file is named after its family in old versions."""
    folders = [module.folder for module in modules if module.kind == "Transformer"] or [path]
    for name in _TRANSFORMER_FILES:
        file = folders[0] / name
        if file.is_file():
            return CheckpointConfig(file, read_json(file), {})
    return CheckpointConfig(folders[0] / _TRANSFORMER_FILES[0], {}, {})


def read_max_tokens(path: Path, transformer: CheckpointConfig) -> int | None:
    """Return the stated length of an input, or else the tokenizer's, which may be a huge number for none."""
    stated = transformer.optional_integer("max_seq_length")
    if stated is not None:
        return stated
    length = read_optional_json(path / "tokenizer_config.json").get("model_max_length")
    return length if isinstance(length, int) and 0 < length <= MAX_INTEGER else None


def read_embedding_modules(
    path: Path, modules: list[LayoutModule], settings: CheckpointConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of `PoolingLayout` and of `PoolingInfo` that the modules of an embedding model state.

    Without modules.json, the mean of the tokens is the embedding.
    """
    fields: dict[str, Any] = {}
    properties: dict[str, Any] = {"similarity": _read_similarity(settings)}
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
            fields["modes"], properties["includes_prompt"] = _read_pooling(module.folder)
        elif module.kind == "Dense":
            dense.append(_read_dense(module.folder))
        elif module.kind == "Normalize":
            properties["is_normalized"] = True
    return fields | {"dense": tuple(dense)}, properties


def _read_pooling(folder: Path) -> tuple[tuple[PoolingMode, ...], bool]:
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
    return modes, config.flag("include_prompt")


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


def read_score_tokens(path: Path, modules: list[LayoutModule]) -> tuple[int, ...]:
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
        tokenizer = tokenizers.Tokenizer.from_buffer(file.read_bytes())
    except Exception as error:  # the library raises its base class
        raise ValueError(f"cannot read {file}: {error}; fetch the model again") from error
    yes_id = tokenizer.token_to_id("yes")
    no_id = tokenizer.token_to_id("no")
    if yes_id is None or no_id is None:
        raise ValueError(
            f"{file} has no tokens yes and no, whose logits are the score; use a reranker"
        )
    return yes_id, no_id


def _read_similarity(settings: CheckpointConfig) -> Similarity:
    name = settings.string("similarity_fn_name") or "cosine"
    if name not in get_args(Similarity):
        raise settings.error("similarity_fn_name", f"one of {', '.join(get_args(Similarity))}")
    return cast("Similarity", name)


def read_prompts(settings: CheckpointConfig) -> dict[str, str]:
    """Return the prompts by name."""
    prompts = settings.section("prompts")
    for name, prompt in prompts.items():
        if not isinstance(prompt, str):
            raise settings.error("prompts", f"an object of texts, but {name} is none")
    return {name: str(prompt) for name, prompt in prompts.items()}


def read_dimensions(settings: CheckpointConfig, config: CheckpointConfig) -> tuple[int, ...] | None:
    """Return the sizes to which an embedding may be truncated, under vLLM's key, or None if they are not stated."""
    for source in (config, settings):
        stated = source.get("matryoshka_dimensions")
        if stated is None:
            continue
        if not isinstance(stated, list) or not all(type(size) is int for size in stated):
            raise source.error("matryoshka_dimensions", "a list of whole numbers")
        return tuple(sorted(stated))
    return None


def read_optional_json(file: Path) -> dict[str, object]:
    """Return the object in a file, or an empty one if the file is missing."""
    return read_json(file) if file.is_file() else {}
