"""Pooling requests on a core in a process of its own: results, cancellation, and a core that is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
from tests.engine.pooling_cases import EMBEDDERS, TEXTS, save_transformer

from argosy.engine import EngineConfig
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.pooling import PoolingProcessor
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.engine.serving.preprocessing.text_processing import TextProcessing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")
HEADERS = GatewayHeaders(request_id="r", tenant="t", cache_domain="d", tier=0, weight=2.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[EngineClient, PoolingProcessor]]:
    model = tmp_path_factory.mktemp("bert")
    save_transformer(model, EMBEDDERS["bert, mean"])
    config = EngineConfig(
        model=str(model), threads=1, dtype="float32", warmup=False, max_step_tokens=64
    )
    client = EngineClient(config, log_level="warning")
    ready = await client.start()
    processor = TextProcessing.load(model).create_pooling_processor(ready, config)
    assert processor is not None
    yield client, processor
    await client.close()


async def test_jobs_compute_vectors_scores_and_vectors_of_tokens(
    engine: tuple[EngineClient, PoolingProcessor],
) -> None:
    client, processor = engine
    texts = [text for text in TEXTS if text]
    embedded = await processor.prepare_embed(texts, HEADERS, truncate_tokens=-1).run(client)
    tokens = await processor.prepare_embed(
        texts, HEADERS, truncate_tokens=-1, is_token_level=True, normalizes=False
    ).run(client)
    scores = await processor.prepare_score(
        [(texts[0], texts[0]), (texts[0], texts[1])], HEADERS
    ).run(client)
    assert processor.info.tasks == ("embed", "token_embed", "score")
    assert embedded.prompt_tokens == tokens.prompt_tokens == [len(rows) for rows in tokens.values]
    for vector, rows in zip(embedded.values, tokens.values, strict=True):
        assert vector.shape == (processor.info.output_size,)
        np.testing.assert_allclose(vector, rows.mean(0), rtol=0, atol=1e-5)
    first, second = (vector / np.linalg.norm(vector) for vector in embedded.values[:2])
    assert [float(score) for score in scores.values] == pytest.approx(
        [1, float(first @ second)], abs=1e-5
    )


async def test_largest_request_is_embedded_in_the_order_of_its_inputs(
    engine: tuple[EngineClient, PoolingProcessor],
) -> None:
    client, processor = engine
    embedded = await processor.prepare_embed((["a", "b c", "d e f"] * 683)[:2048], HEADERS).run(
        client
    )
    first = embedded.values[:3]
    assert len({vector.tobytes() for vector in first}) == 3
    assert all(
        np.array_equal(vector, first[index % 3]) for index, vector in enumerate(embedded.values)
    )
