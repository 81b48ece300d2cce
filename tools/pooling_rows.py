"""Rows of embedding models and rerankers, each compared with sentence-transformers on a tiny random model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.engine.pooling_cases import (
    CLASSIFIERS,
    EMBEDDERS,
    PAIRS,
    TEXTS,
    PoolingCase,
    save_classifier,
    save_embedder,
    save_reranker,
)
from tools.model_comparison import yes_or_no

from argosy.engine import LLM, read_pooling_layout

POOLING_TABLE_HEAD = """\
| Model | Computes | Largest difference | Same bits in any batch |
|---|---|---|---|
"""
MAX_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class PoolingRow:
    """Result of one comparison."""

    name: str
    computes: str
    max_difference: float
    is_exact: bool

    @property
    def passes(self) -> bool:
        """Whether the row is what the documentation promises."""
        return self.is_exact and self.max_difference <= MAX_DIFFERENCE

    def format(self) -> str:
        """Return the row of a Markdown table."""
        difference, exact = f"{self.max_difference:.0e}", yes_or_no(self.is_exact)
        return f"| {self.name} | {self.computes} | {difference} | {exact} |"


def pooling_rows(text: str) -> Iterator[PoolingRow]:
    """Yield the rows whose name contains `text`."""
    for name, case in EMBEDDERS.items():
        if text in name:
            yield _compare(name, partial(_embed_reference, case), _embed)
    for name, case in CLASSIFIERS.items():
        if text in name:
            yield _compare(
                name, partial(_score_reference, partial(save_classifier, case=case)), _score
            )
    name = "qwen 3, logits of yes and no"
    if text in name:
        yield _compare(name, partial(_score_reference, save_reranker), _score)


def _embed_reference(case: PoolingCase, path: Path) -> Any:  # noqa: ANN401 - an array
    return save_embedder(path, case).encode(TEXTS)


def _score_reference(save: Callable[[Path], Any], path: Path) -> Any:  # noqa: ANN401 - an array
    return save(path).predict(PAIRS)


def _compare(
    name: str, compute_reference: Callable[[Path], Any], compute: Callable[[LLM], tuple[Any, Any]]
) -> PoolingRow:
    with tempfile.TemporaryDirectory() as folder:
        expected = compute_reference(Path(folder))
        path = Path(folder) / "saved"
        layout = read_pooling_layout(path)
        with LLM(path, dtype="float32", max_step_tokens=40, kv_memory_bytes=1 << 24) as llm:
            together, alone = compute(llm)
    return PoolingRow(
        name,
        "" if layout is None else layout.describe(),
        float(np.abs(together - expected).max()),
        bool(np.array_equal(together, alone)),
    )


def _embed(llm: LLM) -> tuple[Any, Any]:
    """Return the embeddings of all texts, computed together and alone."""
    together = llm.embed(TEXTS, truncate_prompt_tokens=-1)
    alone = [llm.embed(text, truncate_prompt_tokens=-1)[0] for text in TEXTS]
    first, second = (
        np.stack([output.outputs.embedding for output in outputs]) for outputs in (together, alone)
    )
    return first, second


def _score(llm: LLM) -> tuple[Any, Any]:
    """Return the scores of all pairs, computed together and alone."""
    queries, documents = zip(*PAIRS, strict=True)
    together = llm.score(queries, documents, truncate_prompt_tokens=-1)
    alone = [llm.score(*pair, truncate_prompt_tokens=-1)[0] for pair in PAIRS]
    first, second = (
        np.array([output.outputs.score for output in outputs]) for outputs in (together, alone)
    )
    return first, second
