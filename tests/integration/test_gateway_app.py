"""What a gateway serves besides generation: models, tokenizing, readiness; and whom it turns away first."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs
from tests.support.backend_formats import LlamaCpp
from tests.support.fake_backend import running as listening
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Watching, front
from tests.support.replica_servers import MODEL, serve
from tests.support.scripted_server import Asked, rough_server

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import QueueConfig, ReplicaConfig
from argosy.gateway.request_context import FilterState, RequestContext

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}


def engine_of(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, lambda _: Script(list(range(100, 110)), finish="length"))


async def test_what_a_replica_serves_besides_generation(tokenizer: Tokenizer) -> None:
    async with (
        serve(engine_of(tokenizer)) as served,
        front([], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        client, own = running.client, served.client
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("big", 512)
        for body in ({"prompt": "Once upon"}, {"prompt": "Once", "model": "big"}):
            told = await client.post("/tokenize", json=body)
            assert (
                told.json() == (await own.post("/tokenize", json={"prompt": body["prompt"]})).json()
            )
        text = await client.post("/detokenize", json={"tokens": told.json()["tokens"]})
        assert text.json()["prompt"].endswith("Once")
        assert (await client.post("/tokenize", json={"model": "other"})).status_code == 404
        refused = await client.post("/tokenize", json={"prompt": 3})
        assert refused.json()["error"]["param"] == "prompt"
        for path in ("/tokenize", "/detokenize"):
            for wrong in (
                b'{"model": "\xff"}',
                b'{"model": [3]}',
                b'{"model": %s}' % (b"9" * 5000),
            ):
                refused = await client.post(path, content=wrong)
                assert refused.status_code == 400
                assert refused.json()["error"]["code"] in {"invalid_json", "invalid_type"}
        assert "/v1/completions" in (await client.get("/openapi.json")).json()["paths"]
        head = await client.head("/openapi.json", timeout=5)
        assert (head.status_code, head.content) == (200, b"")
        assert (await client.get("/version")).json()["version"]
        assert (await client.delete("/v1/models")).headers["allow"] == "GET"
        assert (await client.get("/ready")).status_code == 200


async def test_a_context_that_nobody_tells_is_no_bound_for_a_gateway_in_front() -> None:
    double = LlamaCpp()
    async with (
        listening(double),
        front([], ReplicaConfig(url=double.url, model=double.model)) as behind,
        front([], ReplicaConfig(url=str(behind.client.base_url), model="big")) as before,
    ):
        await before.probe()
        (card,) = (await before.client.get("/v1/models")).json()["data"]
        assert card["max_model_len"] is None
        assert (await before.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_request_is_called_what_its_body_calls_it(tokenizer: Tokenizer) -> None:
    """As by the replica; a header goes before."""
    named = BODY | {"request_id": "mine-7"}
    async with (
        serve(engine_of(tokenizer)) as served,
        front([], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        for client, model in ((served.client, MODEL), (running.client, "big")):
            body = named | {"model": model}
            answer = await client.post("/v1/completions", json=body)
            assert answer.headers["x-request-id"] == "mine-7"
            headers = {"x-request-id": "other"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.headers["x-request-id"] == "other"


async def test_what_never_fits_is_refused_before_it_waits(tokenizer: Tokenizer) -> None:
    watching = Watching()
    async with (
        serve(engine_of(tokenizer)) as served,
        front([watching], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        for prompt in ([1] * 513, "x" * 512 * 200):
            answer = await running.client.post("/v1/completions", json=BODY | {"prompt": prompt})
            assert answer.status_code == 400
            refused = answer.json()["error"]
            assert refused["code"] == "context_length_exceeded"
            assert "This model's maximum context length is 512 tokens" in refused["message"]
    assert not watching.left


async def test_a_model_without_a_replica_is_named(tokenizer: Tokenizer) -> None:
    async with (
        serve(engine_of(tokenizer)) as served,
        front([], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        await served.client.post("/drain")
        until = asyncio.get_running_loop().time() + 30
        while (ready := await running.client.get("/ready")).status_code == 200:
            assert asyncio.get_running_loop().time() < until
            await running.probe()
        assert ready.status_code == 503
        assert "big" in ready.json()["error"]["message"]
        assert ready.headers["retry-after"]


async def test_a_replica_with_another_model_gets_no_requests(tokenizer: Tokenizer) -> None:
    async with serve(engine_of(tokenizer)) as one, serve(engine_of(tokenizer)) as two:
        right = ReplicaConfig(url=one.url, model=MODEL)
        wrong = ReplicaConfig(url=two.url)
        with capture_logs() as logs:
            async with front([], right, wrong) as running:
                for _ in range(3):
                    await running.probe()
                for _ in range(4):
                    answer = await running.client.post("/v1/completions", json=BODY)
                    assert answer.status_code == 200
        (told,) = (entry for entry in logs if entry["event"] == "replica_model_missing")
        assert (told["replica"], told["model"]) == (wrong.url, "big")
        for only in (wrong, ReplicaConfig(url=two.url, kind="argosy")):
            async with front([], only) as running:
                answer = await running.client.post("/v1/completions", json=BODY)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


async def test_lower_tiers_are_turned_away_first() -> None:
    more, asked_for = asyncio.Event(), asyncio.Semaphore(0)

    async def busy(asked: Asked) -> None:
        asked_for.release()
        await more.wait()
        asked.json(200, {"choices": []})

    class Tiers(Watching):
        """The request says of which tier it is: here nobody looks at keys."""

        async def on_request(self, context: RequestContext) -> FilterState:
            context.tier = int(context.exchange.get_header(b"x-tier"))
            return await super().on_request(context)

    async with (
        rough_server(busy) as rough,
        front(
            [Tiers()],
            ReplicaConfig(url=rough.url, kind="openai", max_requests=1),
            queue=QueueConfig(max_requests=4),
        ) as running,
    ):

        async def post(tier: int) -> int:
            headers = {"x-tier": str(tier)}
            answer = await running.client.post("/v1/completions", json=BODY, headers=headers)
            return answer.status_code

        waiting = [asyncio.create_task(post(0))]
        await asked_for.acquire()
        for tier in (2, 2):
            waiting.append(asyncio.create_task(post(tier)))
            await running.queued(len(waiting) - 1)
        assert await post(2) == 429
        waiting.append(asyncio.create_task(post(1)))
        await running.queued(3)
        assert await post(1) == 429
        waiting.append(asyncio.create_task(post(0)))
        await running.queued(4)
        assert await post(0) == 429
        more.set()
        assert await asyncio.gather(*waiting) == [200] * 5
