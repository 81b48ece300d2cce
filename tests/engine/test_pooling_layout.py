"""The files of a checkpoint decide whether it computes vectors, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.engine.execution.architectures.pooling import PoolingLayout, read_pooling_layout
from argosy.engine.pooling import ModelTask

OLD, NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules"
POOLING = {"1_Pooling": {"pooling_mode": "mean"}}


def read(
    path: Path,
    architecture: str,
    modules: dict[str, str] | None = None,
    folders: dict[str, dict[str, Any]] | None = None,
    task: ModelTask = "auto",
    **config: object,
) -> PoolingLayout | None:
    """Write a checkpoint without weights, given the type of each module's folder, and read its layout."""
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    if modules is not None:
        entries = [
            {"idx": index, "name": str(index), "path": folder, "type": kind}
            for index, (folder, kind) in enumerate(modules.items())
        ]
        (path / "modules.json").write_text(json.dumps(entries))
    for folder, values in (folders or {}).items():
        (path / folder).mkdir(exist_ok=True)
        (path / folder / "config.json").write_text(json.dumps(values))
    return read_pooling_layout(path, task)


def embedder(prefix: str = OLD) -> dict[str, str]:
    """Return the modules of a usual embedding model."""
    return {
        "": f"{prefix}.Transformer",
        "1_Pooling": f"{prefix}.Pooling",
        "2_Normalize": f"{prefix}.Normalize",
    }


@pytest.mark.parametrize(
    ("architecture", "modules", "task", "head"),
    [
        ("LlamaForCausalLM", None, "auto", None),
        ("LlamaForCausalLM", {"": f"{OLD}.Transformer"}, "auto", None),
        ("LlamaForCausalLM", None, "embed", "embedding"),
        ("Qwen3ForCausalLM", embedder(), "auto", "embedding"),
        ("Qwen3ForCausalLM", embedder(), "generate", None),
        ("Qwen3Model", None, "auto", "embedding"),
        ("BertForMaskedLM", None, "auto", "embedding"),
        ("BertForSequenceClassification", None, "auto", "classification"),
        ("Qwen3ForSequenceClassification", None, "auto", "classification"),
    ],
)
def test_layout_decides_what_a_model_computes(
    tmp_path: Path,
    architecture: str,
    modules: dict[str, str] | None,
    task: ModelTask,
    head: str | None,
) -> None:
    layout = read(tmp_path, architecture, modules, POOLING, task)
    assert (None if layout is None else layout.head) == head


@pytest.mark.parametrize(
    ("config", "modes", "includes_prompt"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",), True),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True},
            ("max", "lasttoken"),
            True,
        ),
        ({"word_embedding_dimension": 8}, ("mean",), True),
        ({"pooling_mode": "weightedmean", "include_prompt": False}, ("weightedmean",), False),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls"), True),
    ],
)
@pytest.mark.parametrize("prefix", [OLD, NEW])
def test_both_spellings_of_pooling_are_read(
    tmp_path: Path,
    prefix: str,
    config: dict[str, Any],
    modes: tuple[str, ...],
    includes_prompt: bool,
) -> None:
    layout = read(tmp_path, "BertModel", embedder(prefix), {"1_Pooling": config})
    assert layout is not None
    assert (layout.modes, layout.info.includes_prompt, layout.info.is_normalized) == (
        modes,
        includes_prompt,
        True,
    )


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"id2label": {"0": "x"}}, "sigmoid"),
        (
            {
                "id2label": {"0": "x"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            "identity",
        ),
        (
            {
                "id2label": {"0": "x"},
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            "identity",
        ),
        ({"id2label": {"0": "x", "1": "y"}}, "softmax"),
        (
            {"id2label": {"0": "x", "1": "y"}, "problem_type": "multi_label_classification"},
            "sigmoid",
        ),
    ],
)
def test_activation_of_a_classifier_is_that_of_a_cross_encoder(
    tmp_path: Path, config: dict[str, Any], activation: str
) -> None:
    layout = read(tmp_path, "BertForSequenceClassification", **config)
    assert layout is not None
    assert layout.info.activation == activation


@pytest.mark.parametrize(
    ("modules", "folders", "message"),
    [
        (
            {"": f"{OLD}.Transformer", "1_Pooling": f"{OLD}.Pooling", "2_CNN": f"{OLD}.CNN"},
            POOLING,
            "does not compute the modules Transformer, Pooling, CNN",
        ),
        (
            {"": f"{OLD}.Transformer", "../1_Pooling": f"{OLD}.Pooling"},
            {},
            "outside of the model's directory",
        ),
        (embedder(), {"1_Pooling": {"pooling_mode": "median"}}, "pooling_mode is 'median'"),
        (
            {
                "": f"{OLD}.Transformer",
                "1_Pooling": f"{OLD}.Pooling",
                "2_Dense": f"{OLD}.Dense",
            },
            POOLING
            | {
                "2_Dense": {"in_features": 8, "out_features": 4, "activation_function": "os.system"}
            },
            "activation_function is 'os.system'",
        ),
    ],
)
def test_layout_that_cannot_be_computed_is_refused(
    tmp_path: Path, modules: dict[str, str], folders: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "BertModel", modules, folders)
