"""Replicas with models that embed, score or classify: shapes, encodings, errors, and requests that end early."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.javascript_sdk import run_javascript
from tests.support.pooling_engine import (
    CLASSIFIER,
    EMBEDDER,
    RERANKER,
    pooling_engine,
    token_vectors,
)
from tests.support.replica_servers import MODEL, chat, load_text_processing, serve

from argosy.engine.serving.api_server.pooling_endpoints import find_prompt_name

CHAT = [{"role": "user", "content": "Where is the cat?"}]
TEXTS = ["The cat sat.", "Once upon a time"]


def expected_vectors(texts: list[str]) -> NDArray[np.float32]:
    """Return the normalised vectors of texts."""
    tokenizer = load_text_processing().tokenizer
    rows = [token_vectors(tokenizer.encode_input(text).token_ids, 4).sum(0) for text in texts]
    return np.stack([row / np.linalg.norm(row) for row in rows])


async def post(client: httpx2.AsyncClient, path: str, **body: Any) -> Any:  # noqa: ANN401 - JSON
    response = await client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_vectors_have_the_requested_encoding() -> None:
    expected = expected_vectors(TEXTS)
    async with serve(pooling_engine(EMBEDDER)) as replica:
        response = await post(replica.client, "/v1/embeddings", input=TEXTS)
        assert [each["index"] for each in response["data"]] == [0, 1]
        vectors = np.array([each["embedding"] for each in response["data"]])
        assert np.allclose(vectors, expected, atol=1e-6)
        assert response["usage"]["prompt_tokens"] == response["usage"]["total_tokens"] > 0
        for dtype, endianness, read, tolerance in (
            ("float32", "little", "<f4", 0),
            ("float32", "big", ">f4", 0),
            ("float16", "native", "<f2", 1e-3),
            ("bfloat16", "native", "<u2", 1e-2),
        ):
            encoded = await post(
                replica.client,
                "/v1/embeddings",
                input=TEXTS,
                encoding_format="base64",
                embed_dtype=dtype,
                endianness=endianness,
            )
            for item, vector in zip(encoded["data"], vectors, strict=True):
                numbers = np.frombuffer(base64.b64decode(item["embedding"]), read)
                if dtype == "bfloat16":
                    numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
                assert np.allclose(numbers, vector, atol=tolerance, rtol=0)


async def test_javascript_sdk_decodes_vectors() -> None:
    async with serve(pooling_engine(EMBEDDER)) as replica:
        vectors = await run_javascript("embeddings.mjs", f"{replica.url}/v1", MODEL, *TEXTS)
    assert np.allclose(vectors, expected_vectors(TEXTS), atol=1e-6)


async def test_large_responses_equal_small_ones() -> None:
    """They are encoded in a thread."""
    async with serve(pooling_engine(EMBEDDER)) as replica:
        many = await post(replica.client, "/v1/embeddings", input=TEXTS * 1024)
        few = await post(replica.client, "/v1/embeddings", input=TEXTS)
    assert [each["embedding"] for each in many["data"]] == 1024 * [
        each["embedding"] for each in few["data"]
    ]
    assert many["usage"]["prompt_tokens"] == 1024 * few["usage"]["prompt_tokens"]


async def test_fields_reach_the_engine() -> None:
    engine = pooling_engine(EMBEDDER)
    tokenizer = load_text_processing().tokenizer
    async with serve(engine) as replica:
        headers = {"x-argosy-tenant": "a", "x-argosy-tier": "1", "x-argosy-cache-domain": "d"}
        body = {"input": "cat", "input_type": "search_query", "priority": 1, "cache_salt": "s"}
        response = await replica.client.post("/v1/embeddings", json=body, headers=headers)
        assert response.status_code == 200
        await post(replica.client, "/v1/embeddings", input=[[5, 6]], dimensions=2)
        await post(replica.client, "/v1/embeddings", input="cat " * 100, truncate_prompt_tokens=3)
        text = "cat " * 30 + "sat"
        left = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
        await post(replica.client, "/v1/embeddings", input=[text, [5, 6, 7, 8]], **left)
        await post(replica.client, "/v1/embeddings", messages=CHAT, truncate_prompt_tokens=60)
        tokens = await post(replica.client, "/pooling", input="cat sat")
    prompted, ids, truncated, end, end_ids, conversation, pooled = engine.requests
    whole = tokenizer.encode_input(text).token_ids
    assert (end.prompt[-2:], end_ids.prompt) == (whole[-2:], [6, 7, 8])
    rendered = load_text_processing().template.render(CHAT, add_generation_prompt=False)
    assert conversation.prompt == tokenizer.encode(rendered, add_special_tokens=False)
    assert prompted.prompt == tokenizer.encode_input("query: cat").token_ids
    assert (prompted.tenant, prompted.tier) == ("a", 2)
    assert prompted.cache_domain.startswith("salted:")
    assert (ids.prompt, len(truncated.prompt)) == ([5, 6], 3)
    assert len(tokens["data"][0]["data"]) == len(pooled.prompt) > 1


async def test_rerankers_score_pairs() -> None:
    documents = ["one", "two", {"text": "three"}]
    async with serve(pooling_engine(RERANKER)) as replica:
        scored = await post(replica.client, "/v1/score", queries="q", documents=documents)
        ranked = await post(replica.client, "/rerank", query="q", documents=documents, top_n=2)
        bare = await post(replica.client, "/v2/rerank", query="q", documents=documents)
        logits = await post(
            replica.client, "/score", text_1="q", text_2=documents, use_activation=False
        )
    scores = [each["score"] for each in scored["data"]]
    assert [each["object"] for each in scored["data"]] == ["score"] * 3
    best = sorted(range(3), key=lambda index: -scores[index])
    assert [each["index"] for each in ranked["results"]] == best[:2]
    assert [each["index"] for each in bare["results"]] == best
    texts = [each["document"]["text"] for each in ranked["results"]]
    assert texts == [["one", "two", "three"][index] for index in best[:2]]
    assert not any("document" in each for each in bare["results"])
    sigmoid = 1 / (1 + np.exp(-np.array([each["score"] for each in logits["data"]])))
    assert np.allclose(scores, sigmoid, atol=1e-6)


async def test_classifiers_name_the_most_probable_label() -> None:
    async with serve(pooling_engine(CLASSIFIER)) as replica:
        response = await post(replica.client, "/classify", input=TEXTS)
        pooled = await post(replica.client, "/pooling", input=TEXTS)
    for item, row in zip(response["data"], pooled["data"], strict=True):
        assert item["num_classes"] == 2
        assert item["label"] == ("bad", "good")[int(np.argmax(item["probs"]))]
        assert sum(item["probs"]) == pytest.approx(1)
        assert row["data"] == item["probs"]


async def test_refusals_name_the_field_and_the_remedy() -> None:
    async with serve(pooling_engine(EMBEDDER)) as replica:
        for path, body, param, remedy in (
            ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "send a text"),
            ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions", "from 1 to 4"),
            ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "query"),
            ("/v1/embeddings", {"input": "a " * 200}, "input", "truncate_prompt_tokens"),
            ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "base64"),
            ("/v1/embeddings", {}, "input", "Add it"),
            ("/v1/embeddings", {"input": "a", "messages": CHAT}, "messages", "either"),
            ("/classify", {"input": "a"}, "model", "tasks are embed, score, token_embed"),
            ("/v1/chat/completions", {"messages": []}, "model", "tasks are embed"),
            ("/v1/completions", {"prompt": "a"}, "model", "tasks are embed"),
        ):
            response = await replica.client.post(path, json={"model": MODEL, **body})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert remedy in error["message"]
        missing = await replica.client.post(
            "/rerank", json={"model": "x", "query": "q", "documents": ["a"]}
        )
        assert missing.status_code == 404
        card = (await replica.client.get(f"/v1/models/{MODEL}")).json()
        assert card["tasks"] == ["embed", "score", "token_embed"]
    generator = FakeEngine(load_text_processing().tokenizer, constant_script(Script([])))
    async with serve(generator) as replica:
        response = await replica.client.post("/v1/embeddings", json={"input": "a"})
        assert response.json()["error"]["code"] == "unsupported_task"
        assert (await replica.client.get(f"/v1/models/{MODEL}")).json()["tasks"] == ["generate"]


async def test_disconnect_aborts_all_inputs() -> None:
    engine = pooling_engine(EMBEDDER, pauses=True)
    async with serve(engine) as replica:
        request = asyncio.create_task(post(replica.client, "/v1/embeddings", input=TEXTS))
        await engine.paused.wait()
        assert (await replica.client.get("/load")).json()["server_load"] == 1
        request.cancel()
        await engine.wait_idle()
        assert len(engine.aborted) == 2
        metrics = (await replica.client.get("/metrics")).text
    assert (
        'argosy_requests_aborted_total{model="test-model",reason="client_closed_request"} 1'
        in metrics
    )


async def test_drain_deadline_ends_requests() -> None:
    engine = pooling_engine(EMBEDDER, pauses=True)
    async with serve(engine) as replica:
        request = asyncio.create_task(replica.client.post("/v1/embeddings", json={"input": TEXTS}))
        await engine.paused.wait()
        await replica.client.post("/drain", json={"deadline_s": 0})
        response = await request
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        refused = await replica.client.post("/score", json=chat())
        assert refused.json()["error"]["code"] == "draining"
    assert not engine.live


@pytest.mark.parametrize(
    ("input_type", "name"),
    [("query", "query"), ("search_query", "query"), ("document", None), ("Clustering", None)],
)
def test_purposes_select_prompts(input_type: str, name: str | None) -> None:
    assert find_prompt_name(EMBEDDER, input_type) == name
