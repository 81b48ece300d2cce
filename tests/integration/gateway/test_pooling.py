"""Embeddings, scores and rerankings through the gateway: shapes, billing, failover, idempotency and tasks."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    listening,
    reset_connection,
    respond_500,
)
from tests.support.gateway_harness import open_breaker
from tests.support.metered_gateway import PRICE, run_metered_gateway

VECTOR = [0.5, -1.0]
BASE64 = b64encode(struct.pack("<2f", *VECTOR)).decode()
USAGE = {"prompt_tokens": 11, "total_tokens": 11}


async def respond_pooled(request: UpstreamRequest) -> None:
    """Respond as a server with a model that embeds and scores."""
    body: dict[str, Any] = {"id": "x-1", "object": "list", "model": "m", "usage": USAGE}
    if request.path == "/v1/rerank":
        count = len(request.body["documents"])
        results = [{"index": n, "relevance_score": 1 / (n + 1)} for n in range(count)]
        body["results"] = results[: request.body.get("top_n") or None]
    else:
        vector = BASE64 if request.body.get("encoding_format") == "base64" else VECTOR
        body["data"] = [{"object": "embedding", "index": 0, "embedding": vector}]
    request.send_json(200, body)


class PoolingUpstream(FakeUpstream):
    """Server that reports the tasks of its model, as Argosy's gateways do."""

    def get_pages(self) -> dict[str, object]:
        return {"/v1/models": {"data": [{"id": "big", "tasks": ["embed", "score"]}]}}


EMBEDDINGS = {"input": "The cat sat on the mat."}
RERANKING = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}


CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("/v1/embeddings", EMBEDDINGS, "/v1/embeddings", {"object": "list"}),
    ("/openai/deployments/big/embeddings", EMBEDDINGS, "/v1/embeddings", {"object": "list"}),
    ("/pooling", EMBEDDINGS, "/pooling", {"object": "list"}),
    (
        "/classify",
        {"messages": [{"role": "user", "content": "x"}]},
        "/classify",
        {"object": "list"},
    ),
    ("/score", {"text_1": "q", "text_2": ["a"]}, "/score", {"object": "list"}),
    ("/v1/score", {"queries": "q", "documents": ["a"]}, "/score", {"object": "list"}),
    ("/rerank", RERANKING, "/v1/rerank", {"id": "x-1", "object": "list"}),
    ("/v1/rerank", RERANKING, "/v1/rerank", {"id": "x-1", "object": "list"}),
    ("/v2/rerank", RERANKING, "/v1/rerank", {"id": "x-1"}),
    ("/v2/embed", {"texts": ["a"]}, "/v1/embeddings", {"embeddings": {"float": [VECTOR]}}),
    ("/api/embed", {"input": "a"}, "/v1/embeddings", {"embeddings": [VECTOR]}),
    ("/api/embeddings", {"prompt": "a"}, "/v1/embeddings", {"embedding": VECTOR}),
]
"""Path and body of a request, the path at the replica, and a part of the response."""


async def test_prompts_are_billed_on_all_paths_and_nothing_else(tmp_path: Path) -> None:
    upstream = FakeUpstream(respond_pooled)
    async with listening(upstream), run_metered_gateway(tmp_path, upstream.url) as gateway:
        for path, body, upstream_path, answer in CASES:
            response = await gateway.running.client.post(path, json={"model": "big", **body})
            assert response.status_code == 200, response.text
            assert answer.items() <= response.json().items()
            record = gateway.usage_record()
            assert response.headers["x-argosy-request"] == record.request
            assert (record.status, record.input_tokens, record.output_tokens) == (
                "completed",
                11,
                0,
            )
            assert record.nano_dollars == 11 * PRICE.input
            assert gateway.trace_dict(record)["tokens"]["prompt"] == 11
            assert upstream.requests.pop().path == upstream_path
        assert await gateway.metric_sum("tokens_total", kind="input") == 11 * len(CASES)


async def test_tei_reranks_without_a_model(tmp_path: Path) -> None:
    upstream = FakeUpstream(respond_pooled)
    async with listening(upstream), run_metered_gateway(tmp_path, upstream.url) as gateway:
        body = {"query": "q", "texts": ["a", "b"], "return_text": True}
        response = await gateway.running.client.post("/rerank", json=body)
        assert gateway.usage_record().asked == "big"
    assert response.json() == [
        {"index": 0, "text": "a", "score": 1.0},
        {"index": 1, "text": "b", "score": 0.5},
    ]


@pytest.mark.parametrize("script", [reset_connection, respond_500])
async def test_another_replica_answers_after_a_failure(script: Any, tmp_path: Path) -> None:  # noqa: ANN401 - a script
    broken, working = FakeUpstream(script), FakeUpstream(respond_pooled)
    urls = (broken, working)
    async with (
        listening(broken, working),
        run_metered_gateway(tmp_path, *(each.url for each in urls)) as gateway,
    ):
        for _ in range(2):
            body = {"model": "big", **EMBEDDINGS}
            response = await gateway.running.client.post("/v1/embeddings", json=body)
            assert response.json()["data"][0]["embedding"] == VECTOR
        assert len(gateway.usage_records()) == 2
        assert await gateway.metric_sum("retries_total") >= 1
    assert broken.requests


async def test_unreported_tokens_are_estimated_for_each_pair(tmp_path: Path) -> None:
    async def respond_without_usage(request: UpstreamRequest) -> None:
        request.send_json(200, {"results": [{"index": 0, "relevance_score": 1.0}]})

    upstream = FakeUpstream(respond_without_usage)
    body = {"model": "big", "query": "q" * 400, "documents": ["a" * 40, "b" * 40]}
    async with listening(upstream), run_metered_gateway(tmp_path, upstream.url) as gateway:
        await gateway.running.client.post("/rerank", json=body)
        record = gateway.usage_record()
    assert 200 <= record.input_tokens <= 240
    assert record.output_tokens == 0


async def test_malformed_requests_reach_no_replica(tmp_path: Path) -> None:
    bad_type = {"model": "big", "texts": ["a"], "embedding_types": ["int4"]}
    upstream = FakeUpstream(respond_pooled)
    async with listening(upstream), run_metered_gateway(tmp_path, upstream.url) as gateway:
        for path, body, param in (
            ("/v1/embeddings", {"model": "big"}, "input"),
            ("/rerank", {"model": "big", "documents": ["a"]}, "query"),
            ("/score", {"model": "big", "queries": "q"}, "text_2"),
            ("/v2/embed", bad_type, "embedding_types[0]"),
            ("/v1/embeddings", {"model": 1, "input": "a"}, "model"),
        ):
            response = await gateway.running.client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
    assert not upstream.requests


async def test_models_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    upstream = PoolingUpstream(respond_pooled)
    async with listening(upstream), run_metered_gateway(tmp_path, upstream.url) as gateway:
        client = gateway.running.client
        (card,) = (await client.get("/v1/models")).json()["data"]
        shown = (await client.post("/api/show", json={"model": "big"})).json()
        refused = json.loads(await gateway.post())
        classified = await client.post("/classify", json={"model": "big", **EMBEDDINGS})
        embedded = await client.post("/v1/embeddings", json=EMBEDDINGS)
    assert card["tasks"] == ["embed", "score"]
    assert shown["capabilities"] == ["embedding"]
    assert refused["error"]["code"] == "unsupported_task"
    assert "its tasks are embed, score" in refused["error"]["message"]
    assert classified.status_code == 400
    assert embedded.status_code == 200  # the only model that embeds needs no name


@pytest.mark.parametrize("upstream_type", [FakeUpstream, PoolingUpstream])
async def test_ejected_replica_is_tested_with_what_it_can_do(
    upstream_type: type[FakeUpstream], tmp_path: Path
) -> None:
    async def refuse_chat(request: UpstreamRequest) -> None:
        request.send_json(501, {"error": {"message": "start it without --embeddings"}})

    upstream = upstream_type(respond_pooled, probe_script=refuse_chat)
    async with listening(upstream), run_metered_gateway(tmp_path, upstream.url) as gateway:
        (replica,) = gateway.running.replicas
        open_breaker(replica)
        await gateway.running.probe()
        assert not replica.health.is_ejected
    assert [request.path for request in upstream.requests] == ["/v1/embeddings"]


async def test_ollama_receives_errors_in_its_shape(tmp_path: Path) -> None:
    async def refuse(request: UpstreamRequest) -> None:
        request.send_json(400, {"error": {"message": "too long"}})

    upstream = FakeUpstream(refuse)
    async with listening(upstream), run_metered_gateway(tmp_path, upstream.url) as gateway:
        client = gateway.running.client
        response = await client.post("/api/embed", json={"model": "big", "input": "a"})
        nothing = await client.post("/api/embed", json={"model": "big"})
    assert (response.status_code, response.json()["error"]) == (400, "too long")
    assert nothing.json()["embeddings"] == []
