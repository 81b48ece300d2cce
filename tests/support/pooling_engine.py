"""Scripted engines with models that pool: an embedding model, a reranker and a classifier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argosy.engine import EngineRequest
from argosy.engine.pooling import PoolingInfo
from tests.support.fake_engine import FakeEngine, Script
from tests.support.replica_servers import load_text_processing

EMBEDDER = PoolingInfo(
    tasks=("embed", "token_embed", "score"),
    output_size=4,
    max_input_tokens=64,
    prompts={"query": "query: "},
    is_normalized=True,
)
RERANKER = PoolingInfo(tasks=("score",), output_size=1, max_input_tokens=64, activation="sigmoid")
CLASSIFIER = PoolingInfo(
    tasks=("classify",),
    output_size=2,
    max_input_tokens=64,
    labels=("bad", "good"),
    activation="softmax",
)


def token_vectors(token_ids: list[int], size: int) -> NDArray[np.float32]:
    """Return a vector for each token, by its id and its position."""
    angles = np.outer(np.array(token_ids) + np.arange(len(token_ids)), np.arange(1, size + 1))
    return np.sin(angles).astype(np.float32)


def pooling_engine(info: PoolingInfo, *, pauses: bool = False) -> FakeEngine:
    """Return an engine whose vectors are the sums of the tokens' vectors. `pauses` lets its requests wait."""

    def script(request: EngineRequest) -> Script:
        vectors = token_vectors(request.prompt, info.output_size)
        is_token_level = request.pooling is not None and request.pooling.is_token_level
        pooled = vectors if is_token_level else vectors.sum(0)
        return Script([], pooled=pooled.tobytes(), pause_after=0 if pauses else None)

    return FakeEngine(load_text_processing().tokenizer, script, pooling=info)
