"""Gateway endpoints besides generation (models, tokenizing, readiness), and rejection by tier."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs
from tests.support.backend_formats import LlamaCpp
from tests.support.fake_backend import serve_backends
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.replica_servers import MODEL, serve

from argosy.deployment import QueueConfig, ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.request_context import RequestContext

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}


def make_engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, lambda _: Script(list(range(100, 110)), finish="length"))


async def test_gateway_serves_models_and_tokenize_endpoints(tokenizer: Tokenizer) -> None:
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        client, replica_client = running.client, replica_server.client
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("big", 512)
        for body in ({"prompt": "Once upon"}, {"prompt": "Once", "model": "big"}):
            tokenized = await client.post("/tokenize", json=body)
            assert (
                tokenized.json()
                == (await replica_client.post("/tokenize", json={"prompt": body["prompt"]})).json()
            )
        text = await client.post("/detokenize", json={"tokens": tokenized.json()["tokens"]})
        assert text.json()["prompt"].endswith("Once")
        assert (await client.post("/tokenize", json={"model": "other"})).status_code == 404
        info = (await replica_client.get("/tokenizer_info")).json()
        assert info["eos_token"] == tokenizer.decode(tokenizer.eos_token_ids, False)
        assert {"tokenizer_class", "chat_template"} <= info.keys()
        for query in ("", "?model=big"):
            assert (await client.get(f"/tokenizer_info{query}")).json() == info
        assert (await client.get("/tokenizer_info?model=other")).status_code == 404
        rejected = await client.post("/tokenize", json={"prompt": 3})
        assert rejected.json()["error"]["param"] == "prompt"
        for path in ("/tokenize", "/detokenize"):
            for invalid_body in (
                b'{"model": "\xff"}',
                b'{"model": [3]}',
                b'{"model": %s}' % (b"9" * 5000),
            ):
                rejected = await client.post(path, content=invalid_body)
                assert rejected.status_code == 400
                assert rejected.json()["error"]["code"] in {"invalid_json", "invalid_type"}
        assert (await client.get("/version")).json()["version"]
        assert (await client.delete("/v1/models")).headers["allow"] == "GET"
        assert (await client.get("/ready")).status_code == 200


async def test_unknown_context_length_does_not_limit_outer_gateway() -> None:
    backend = LlamaCpp()
    async with (
        serve_backends(backend),
        run_gateway([], ReplicaConfig(url=backend.url, model=backend.model)) as inner,
        run_gateway([], ReplicaConfig(url=str(inner.client.base_url), model="big")) as outer,
    ):
        await outer.probe()
        (card,) = (await outer.client.get("/v1/models")).json()["data"]
        assert card["max_model_len"] is None
        assert (await outer.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_request_id_header_takes_precedence_over_body(tokenizer: Tokenizer) -> None:
    """The replica and the gateway use the same precedence."""
    named = BODY | {"request_id": "mine-7"}
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        for client, model in ((replica_server.client, MODEL), (running.client, "big")):
            body = named | {"model": model}
            response = await client.post("/v1/completions", json=body)
            assert response.headers["x-request-id"] == "mine-7"
            headers = {"x-request-id": "other"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.headers["x-request-id"] == "other"


async def test_prompt_above_context_is_rejected_before_queueing(tokenizer: Tokenizer) -> None:
    recorder = RecordingFilter()
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([recorder], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        for prompt in ([1] * 513, "x" * 512 * 200):
            response = await running.client.post("/v1/completions", json=BODY | {"prompt": prompt})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "This model's maximum context length is 512 tokens" in error["message"]
    assert not recorder.completed


async def test_not_ready_error_names_model_without_replica(tokenizer: Tokenizer) -> None:
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        await replica_server.client.post("/drain")
        while (ready := await running.client.get("/ready")).status_code == 200:
            await running.probe()
        assert ready.status_code == 503
        assert "big" in ready.json()["error"]["message"]
        assert ready.headers["retry-after"]


async def test_replica_with_other_model_gets_no_requests(tokenizer: Tokenizer) -> None:
    async with serve(make_engine(tokenizer)) as one, serve(make_engine(tokenizer)) as two:
        right = ReplicaConfig(url=one.url, model=MODEL)
        wrong = ReplicaConfig(url=two.url)
        with capture_logs() as logs:
            async with run_gateway([], right, wrong) as running:
                for _ in range(3):
                    await running.probe()
                for _ in range(4):
                    response = await running.client.post("/v1/completions", json=BODY)
                    assert response.status_code == 200
        (event,) = (entry for entry in logs if entry["event"] == "replica_model_missing")
        assert (event["replica"], event["model"]) == (wrong.url, "big")
        for only in (wrong, ReplicaConfig(url=two.url, kind="argosy")):
            async with run_gateway([], only) as running:
                response = await running.client.post("/v1/completions", json=BODY)
                assert (response.status_code, response.json()["error"]["code"]) == (
                    503,
                    "no_replica",
                )


async def test_full_queue_rejects_lower_tiers_first() -> None:
    may_respond, received = asyncio.Event(), asyncio.Semaphore(0)

    async def respond_later(request: UpstreamRequest) -> None:
        received.release()
        await may_respond.wait()
        request.send_json(200, {"choices": []})

    class TierFilter(RecordingFilter):
        """Sets the tier from a header, since these requests have no key."""

        async def on_request(self, context: RequestContext) -> bool:
            context.tier = int(context.exchange.get_header(b"x-tier"))
            return await super().on_request(context)

    async with (
        fake_upstream(respond_later) as upstream,
        run_gateway(
            [TierFilter()],
            ReplicaConfig(url=upstream.url, kind="openai", max_requests=1),
            queue=QueueConfig(max_requests=4),
        ) as running,
    ):

        async def post(tier: int) -> int:
            headers = {"x-tier": str(tier)}
            response = await running.client.post("/v1/completions", json=BODY, headers=headers)
            return response.status_code

        waiting = [asyncio.create_task(post(0))]
        await received.acquire()
        for tier in (2, 2):
            waiting.append(asyncio.create_task(post(tier)))
            await running.wait_for_queued(len(waiting) - 1)
        assert await post(2) == 429
        waiting.append(asyncio.create_task(post(1)))
        await running.wait_for_queued(3)
        assert await post(1) == 429
        waiting.append(asyncio.create_task(post(0)))
        await running.wait_for_queued(4)
        assert await post(0) == 429
        may_respond.set()
        assert await asyncio.gather(*waiting) == [200] * 5
