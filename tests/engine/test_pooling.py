"""Embeddings, scores and labels are those of sentence-transformers, alone and in any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from argosy.engine import LLM
from tests.engine.pooling_cases import (
    CLASSIFIERS,
    EMBEDDERS,
    PAIRS,
    TEXTS,
    save_classifier,
    save_embedder,
    save_reranker,
)

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 1 << 24}
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_equal_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    case = EMBEDDERS[name]
    reference = save_embedder(tmp_path, case)
    texts = TEXTS if case.post_processor != "none" else TEXTS[2:]
    expected = reference.encode(texts, normalize_embeddings=False)
    with LLM(tmp_path / "saved", max_step_tokens=40, **OPTIONS) as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1)
        actual = np.stack([output.outputs.embedding for output in outputs])
        alone = [llm.embed(text, truncate_prompt_tokens=-1)[0] for text in texts]
        tokens = [len(output.prompt_token_ids) for output in outputs]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    assert all(
        np.array_equal(single.outputs.embedding, row)
        for single, row in zip(alone, actual, strict=True)
    )
    assert max(tokens) == case.max_tokens, "no text was truncated"


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_those_of_a_cross_encoder(name: str, tmp_path: Path) -> None:
    reference = save_classifier(tmp_path, CLASSIFIERS[name])
    expected = reference.predict(PAIRS)
    queries, documents = zip(*PAIRS, strict=True)
    with LLM(tmp_path / "saved", max_step_tokens=40, **OPTIONS) as llm:
        outputs = llm.score(queries, documents, truncate_prompt_tokens=-1)
    scores = [output.outputs.score for output in outputs]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE)


def test_scores_equal_those_of_a_language_model_with_logit_score(tmp_path: Path) -> None:
    reference = save_reranker(tmp_path)
    expected = reference.predict(PAIRS)
    queries, documents = zip(*PAIRS, strict=True)
    with LLM(tmp_path / "saved", max_step_tokens=40, **OPTIONS) as llm:
        outputs = llm.score(queries, documents, truncate_prompt_tokens=-1)
    scores = [output.outputs.score for output in outputs]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE)
