"""A gateway in front of scripted servers: forwarding, failover, rejections and the queue."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from structlog.testing import capture_logs
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, fake_upstream, respond_500
from tests.support.gateway_client import QUICK_TIMEOUTS, run_gateway_server

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.pool.prober import Prober
from argosy.policy import RoutingPolicyName

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}
STREAM = BODY | {"stream": True}
MAX_BODY_BYTES = 10_000


def make_config(
    *replicas: FakeUpstream, max_requests: int = 256, routing: RoutingPolicyName = "round-robin"
) -> GatewayConfig:
    """Return settings with the model "big" on these servers."""
    replica_configs = [
        ReplicaConfig(url=r.url, kind="openai", model="rough", max_requests=max_requests)
        for r in replicas
    ]
    model = ModelConfig(name="big", aliases=("default",), routing=routing, replicas=replica_configs)
    return GatewayConfig(
        port=0, models=[model], timeouts=QUICK_TIMEOUTS, body_limit_bytes=MAX_BODY_BYTES
    )


@contextlib.asynccontextmanager
async def run_gateway(
    *replicas: FakeUpstream,
    **settings: Any,  # noqa: ANN401 - of `make_config`
) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway in front of these servers and yield a client."""
    async with run_gateway_server(make_config(*replicas, **settings)) as (_, client):
        yield client


async def respond(request: UpstreamRequest) -> None:
    choice = {"index": 0, "text": "something", "finish_reason": "stop"}
    request.send_json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})


async def test_request_is_forwarded_with_model_name_of_replica() -> None:
    async with fake_upstream(respond) as replica, run_gateway(replica) as client:
        response = await client.post(
            "/v1/completions", json=BODY | {"model": "default", "top_k": 4}
        )
        assert response.json()["choices"][0]["text"] == "something"
        assert response.headers["x-request-id"]
        assert replica.requests[0].body | {"seed": 0} == BODY | {
            "model": "rough",
            "top_k": 4,
            "seed": 0,
        }


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled"])
async def test_aborted_whole_response_is_retried_on_other_replica(reason: str) -> None:
    async def respond_aborted(request: UpstreamRequest) -> None:
        choice = {"index": 0, "text": "some", "finish_reason": reason}
        request.send_json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    async with (
        fake_upstream(respond_aborted) as one,
        fake_upstream(respond) as two,
        run_gateway(one, two) as client,
    ):
        for _ in range(2):
            response = await client.post("/v1/completions", json=BODY)
            assert response.json()["choices"][0]["text"] == "something"
        assert one.requests


async def test_client_error_is_forwarded_without_retry() -> None:
    async def reject(request: UpstreamRequest) -> None:
        request.send_json(422, {"error": {"message": "temperature is too high", "code": "too_hot"}})

    async with (
        fake_upstream(reject) as one,
        fake_upstream(reject) as two,
        run_gateway(one, two) as client,
    ):
        for body in (BODY, STREAM):
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 422
            assert response.json()["error"]["code"] == "too_hot"
        assert len(one.requests) + len(two.requests) == 2


async def test_rejected_upstream_key_is_hidden_from_client() -> None:
    async def reject(request: UpstreamRequest) -> None:
        request.send_json(401, {"error": {"message": "Incorrect API key provided: sk-proj-abcd"}})

    async with fake_upstream(reject) as one, run_gateway(one) as client:
        for body in (BODY, STREAM):
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 502
            assert "sk-proj" not in response.text


async def test_failure_of_all_replicas_is_502_with_retry_after() -> None:
    async with fake_upstream(respond_500) as one, run_gateway(one) as client:
        response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "upstream_failed"
        assert response.headers["retry-after"] == "1"


async def test_stream_without_finish_reason_ends_with_error() -> None:
    async def end_early(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("half an")
        request.writer.write(b"0\r\n\r\n")

    async with fake_upstream(end_early) as replica, run_gateway(replica) as client:
        response = await client.post("/v1/completions", json=STREAM)
        last = response.text.strip().split("\n\n")[-1]
        assert "error" in json.loads(last.removeprefix("data: "))
        sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError):
            async for _ in await sdk.completions.create(model="big", prompt="x", stream=True):
                pass
        await sdk.close()


async def test_disconnects_do_not_count_as_replica_failures() -> None:
    async def stream_endlessly(request: UpstreamRequest) -> None:
        if request.body.get("stream"):
            request.start_stream()
            request.send_text("on and on")
            await asyncio.sleep(3600)
        await respond(request)

    async with (
        fake_upstream(stream_endlessly) as one,
        fake_upstream(stream_endlessly) as two,
        run_gateway(one, two) as client,
    ):
        for _ in range(8):
            async with client.stream("POST", "/v1/completions", json=STREAM) as response:
                await anext(response.aiter_bytes())
        for _ in range(4):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(one.requests) == len(two.requests) == 6


INVALID_REQUESTS = (
    (b"{", 400, None),
    (b"[]", 400, None),
    (b'{"model": "big"}', 400, "prompt"),
    (b'{"model": 3, "prompt": "x"}', 400, "model"),
    (b'{"model": "big", "prompt": "x", "max_tokens": "many"}', 400, "max_tokens"),
    (b'{"model": "small", "prompt": "x"}', 404, "model"),
    (b'{"model": "big", "prompt": "' + b"x" * 2 * MAX_BODY_BYTES + b'"}', 413, None),
)
REMEDIES = {
    "/v1/v1/models/big": "Use '/v1/models/big'",
    "/v1/models/": "Use '/v1/models', without a slash at its end",
    "/v1/v1/messages/count_tokens": "Use '/v1/messages/count_tokens'",
    "/v1/": "See /openapi.json",
    "/v1/admin/keys": "See /openapi.json",
    "/nowhere": "See /openapi.json",
}


async def test_invalid_requests_and_unknown_paths_are_rejected_with_a_remedy() -> None:
    async with fake_upstream() as replica, run_gateway(replica) as client:
        for body, status, param in INVALID_REQUESTS:
            response = await client.post("/v1/completions", content=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (status, param), body
            assert error["message"]
        for path, remedy in REMEDIES.items():
            response = await client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
            assert remedy in response.json()["error"]["message"]
        assert not replica.requests


async def test_model_list_and_unknown_model() -> None:
    async with fake_upstream() as replica, run_gateway(replica) as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == ["big", "default"]
        assert (await client.get("/v1/models/big")).json()["id"] == "big"
        assert (await client.get("/v1/models/small")).status_code == 404
        assert (await client.get("/v1/completions")).status_code == 405


async def test_sessions_stay_on_replica_with_hash_routing() -> None:
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(fake_upstream(respond)) for _ in range(3)]
        client = await stack.enter_async_context(run_gateway(*replicas, routing="hash"))

        async def send(fields: dict[str, str], headers: dict[str, str]) -> int:
            before = [len(replica.requests) for replica in replicas]
            prompt = {"prompt": f"{next(prompts)}"}
            body = BODY | prompt | fields
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
            after = [len(replica.requests) for replica in replicas]
            return [a - b for a, b in zip(after, before, strict=True)].index(1)

        prompts = itertools.count()
        replica_of_session = {}
        for session in map(str, range(16)):
            requests: list[tuple[dict[str, str], dict[str, str]]] = [
                ({"session_id": session}, {"x-session-affinity": "another"}),
                ({"prompt_cache_key": "another"}, {"x-session-affinity": session}),
                ({"prompt_cache_key": session}, {}),
            ]
            (replica_of_session[session],) = {await send(*request) for request in requests}
    assert set(replica_of_session.values()) == {0, 1, 2}


async def test_stopping_gateway_completes_running_requests_and_accepts_no_others() -> None:
    """Applies even if the connections that it has stay busy."""
    gated_script = GatedScript()
    async with (
        fake_upstream(gated_script) as replica,
        run_gateway_server(make_config(replica)) as (server, client),
    ):
        assert (await client.get("/health")).status_code == 200  # the connection is kept open
        task = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await gated_script.received.acquire()
        server.stop()
        with contextlib.suppress(httpx2.TransportError):
            while (await client.get("/health")).is_success:
                pass  # open connections are served until the requests end
        gated_script.release.release()
        response = await task
        assert (response.status_code, response.headers["connection"]) == (200, "close")


async def test_forced_stop_ends_running_requests_with_draining_error() -> None:
    started = asyncio.Semaphore(0)

    async def respond_never(request: UpstreamRequest) -> None:
        if request.body.get("stream"):
            request.start_stream()
            request.send_text("first")
        started.release()
        await asyncio.Event().wait()

    async with (
        fake_upstream(respond_never) as replica,
        run_gateway_server(make_config(replica)) as (server, client),
    ):
        tasks = []
        for body in (BODY, STREAM):
            tasks.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            await started.acquire()
        server.stop()
        server.stop()
        responses = await asyncio.gather(*tasks)
    assert [response.status_code for response in responses] == [503, 200]
    assert all('"code":"draining"' in response.text for response in responses)


class GatedScript:
    """A script that responds only when `release` is released."""

    def __init__(self) -> None:
        self.received = asyncio.Semaphore(0)
        self.release = asyncio.Semaphore(0)

    async def __call__(self, request: UpstreamRequest) -> None:
        self.received.release()
        await self.release.acquire()
        await respond(request)


async def test_failed_background_task_is_logged_and_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(self: Prober) -> None:
        raise RuntimeError(f"a bug: {self}")

    monkeypatch.setattr(Prober, "run", fail)
    with capture_logs() as logs:
        async with fake_upstream(respond) as replica, run_gateway(replica) as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    (entry,) = (line for line in logs if line["event"] == "background_task_failed")
    assert entry["log_level"] == "error"


EMPTY_QUEUE = 'argosy_gateway_queue_depth{model="big"} 0.0'


async def test_disconnect_in_queue_frees_slot() -> None:
    gated_script = GatedScript()
    async with (
        fake_upstream(gated_script) as replica,
        run_gateway(replica, max_requests=1) as client,
    ):
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await gated_script.received.acquire()
        for stream in (False, True):
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(
                    "/v1/completions",
                    json=BODY | {"stream": stream},
                    timeout=httpx2.Timeout(30, read=0.2),
                )
        while EMPTY_QUEUE not in (await client.get("/metrics")).text:
            pass  # disconnects are noticed while requests wait
        gated_script.release.release()
        gated_script.release.release()
        assert (await running).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(replica.requests) == 2
