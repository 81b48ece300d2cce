"""A gateway in front of scripted servers: forwarding, failover, rejections and the queue."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from structlog.testing import capture_logs
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, fake_upstream
from tests.support.gateway_client import run_gateway_server

from argosy.deployment import GatewayConfig, ModelConfig, QueueConfig, ReplicaConfig, Timeouts
from argosy.gateway import GatewayServer
from argosy.gateway.pool.prober import Prober
from argosy.policy import RoutingPolicyName

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}
STREAM = BODY | {"stream": True}
FAST_TIMEOUTS = Timeouts(
    first_token_timeout_s=5.0, stream_idle_timeout_s=5.0, failover_timeout_s=0.5
)


def make_config(
    replicas: Sequence[FakeUpstream],
    max_requests: int = 256,
    routing: RoutingPolicyName = "round-robin",
) -> GatewayConfig:
    """Return settings with the model "big" on these servers."""
    replica_configs = [
        ReplicaConfig(url=r.url, kind="openai", model="rough", max_requests=max_requests)
        for r in replicas
    ]
    model = ModelConfig(name="big", aliases=("default",), routing=routing, replicas=replica_configs)
    return GatewayConfig(port=0, models=[model], timeouts=FAST_TIMEOUTS)


@contextlib.asynccontextmanager
async def run_gateway(
    *replicas: FakeUpstream,
    timeouts: Timeouts = FAST_TIMEOUTS,
    keep_alive_s: float = 15.0,
    body_limit_bytes: int = 1 << 20,
    queue: QueueConfig = QueueConfig(),  # noqa: B008 - immutable
    max_requests: int = 256,
    routing: RoutingPolicyName = "round-robin",
) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway in front of these servers and yield a client."""
    config = msgspec.structs.replace(
        make_config(replicas, max_requests, routing),
        timeouts=timeouts,
        sse_keepalive_interval_s=keep_alive_s,
        body_limit_bytes=body_limit_bytes,
        queue=queue,
    )
    async with run_gateway_server(config) as (_, client):
        yield client


async def respond(request: UpstreamRequest) -> None:
    choice = {"index": 0, "text": "something", "finish_reason": "stop"}
    request.send_json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})


async def respond_500(request: UpstreamRequest) -> None:
    request.send_json(500, {"error": {"message": "out of order"}})


async def stream_events(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[str]:
    """Return the data of a stream's events."""
    response = await client.post("/v1/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    return [
        block.removeprefix("data: ")
        for block in response.text.strip().split("\n\n")
        if block.startswith("data: ")
    ]


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


async def test_stream_is_forwarded_event_by_event() -> None:
    async with fake_upstream() as replica, run_gateway(replica) as client:
        *chunks, done = await stream_events(client, BODY)
        assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == [" 0", " 1", " 2"]
        assert done == "[DONE]"


async def test_event_is_forwarded_before_next_arrives() -> None:
    send_more = asyncio.Event()

    async def send_slowly(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("first")
        await send_more.wait()
        request.send_text("last", "stop")
        request.end_stream()

    async with (
        fake_upstream(send_slowly) as replica,
        run_gateway(replica) as client,
        client.stream("POST", "/v1/completions", json=STREAM) as response,
    ):
        chunks = response.aiter_text()
        assert "first" in await anext(chunks)
        send_more.set()
        assert "last" in "".join([chunk async for chunk in chunks])


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


@pytest.mark.parametrize("stream", [False, True])
async def test_broken_replica_is_invisible_if_another_works(stream: bool) -> None:
    working = respond if not stream else FakeUpstream().script
    async with (
        fake_upstream(respond_500) as one,
        fake_upstream(working) as two,
        run_gateway(one, two) as client,
    ):
        for _ in range(4):
            response = await client.post("/v1/completions", json=BODY | {"stream": stream})
            assert response.status_code == 200, response.text
        assert one.requests
        assert len(two.requests) == 4


async def test_overload_of_all_replicas_is_429() -> None:
    async def reject(request: UpstreamRequest) -> None:
        request.send_json(429, {"error": {"message": "slow down"}})

    async with fake_upstream(reject) as one, run_gateway(one) as client:
        response = await client.post("/v1/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "1"


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


async def test_cut_stream_that_cannot_resume_ends_with_error_event() -> None:
    async def send_cut_stream(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("half an")
        request.writer.close()

    async with fake_upstream(send_cut_stream) as replica, run_gateway(replica) as client:
        first, last = await stream_events(client, BODY)
        assert "half an" in first
        assert json.loads(last)["error"]["code"] == "upstream_failed"


async def test_stream_without_finish_reason_ends_with_error() -> None:
    async def end_early(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("half an")
        request.writer.write(b"0\r\n\r\n")

    async with fake_upstream(end_early) as replica, run_gateway(replica) as client:
        *_, last = await stream_events(client, BODY)
        assert "error" in json.loads(last)
        sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError):
            async for _ in await sdk.completions.create(model="big", prompt="x", stream=True):
                pass
        await sdk.close()


async def test_disconnect_is_noticed_by_replica_immediately() -> None:
    disconnected = asyncio.Event()

    async def stream_forever(request: UpstreamRequest) -> None:
        request.start_stream()
        with contextlib.suppress(ConnectionError):
            while not request.writer.is_closing():
                request.send_text("on and on")
                await request.writer.drain()
                await asyncio.sleep(0.01)
        disconnected.set()

    async with fake_upstream(stream_forever) as replica, run_gateway(replica) as client:
        async with client.stream("POST", "/v1/completions", json=STREAM) as response:
            await anext(response.aiter_bytes())
        await asyncio.wait_for(disconnected.wait(), 30)


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


async def test_stalled_replica_times_out() -> None:
    async def stall(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("and then")
        await asyncio.sleep(3600)

    timeouts = Timeouts(
        first_token_timeout_s=0.5, stream_idle_timeout_s=0.5, failover_timeout_s=0.2
    )
    async with fake_upstream(stall) as replica, run_gateway(replica, timeouts=timeouts) as client:
        *_, last = await stream_events(client, BODY)
        assert json.loads(last)["error"]["code"] == "upstream_failed"


async def test_idle_stream_gets_keepalive_comments() -> None:
    send_more = asyncio.Event()
    # The idle timeout starts with the first token, which the response headers are not.
    timeouts = Timeouts(first_token_timeout_s=30.0, stream_idle_timeout_s=0.1)

    async def respond_late(request: UpstreamRequest) -> None:
        request.start_stream()
        await send_more.wait()
        request.send_text("well", "stop")
        request.end_stream()

    async with (
        fake_upstream(respond_late) as replica,
        run_gateway(replica, timeouts=timeouts, keep_alive_s=0.2) as client,
        client.stream("POST", "/v1/completions", json=STREAM) as response,
    ):
        chunks = response.aiter_text()
        assert await anext(chunks) == ": keep-alive\n\n"
        send_more.set()
        assert "well" in "".join([chunk async for chunk in chunks])


async def test_http_1_0_client_gets_stream_without_chunks() -> None:
    async with fake_upstream() as replica, run_gateway(replica) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps(STREAM).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert rest.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
        writer.close()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"prompt": "x"}', 400, "model"),
        (b'{"model": "big"}', 400, "prompt"),
        (b'{"model": 3, "prompt": "x"}', 400, "model"),
        (b'{"model": "big", "prompt": "x", "max_tokens": "many"}', 400, "max_tokens"),
        (b'{"model": "small", "prompt": "x"}', 404, "model"),
        (b'{"model": "big", "prompt": "' + b"x" * 2000 + b'"}', 413, None),
    ],
)
async def test_invalid_request_is_rejected_by_gateway(
    body: bytes, status: int, param: str | None
) -> None:
    async with fake_upstream() as replica, run_gateway(replica, body_limit_bytes=1000) as client:
        response = await client.post("/v1/completions", content=body)
        assert response.status_code == status
        error = response.json()["error"]
        assert error["param"] == param
        assert error["message"]
        assert not replica.requests


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "Use '/v1/chat/completions'"),
        ("/v1/v1/models/big", "Use '/v1/models/big'"),
        ("/v1/models/", "Use '/v1/models', without a slash at its end"),
        ("/responses", "Use '/v1/responses'"),
        ("/v1/v1/messages/count_tokens", "Use '/v1/messages/count_tokens'"),
        ("/v1/", "See /openapi.json"),
        ("/embeddings", "Use '/v1/embeddings'"),
        ("/nowhere", "See /openapi.json"),
        ("/v1/messages/batches", "See /openapi.json"),
    ],
)
async def test_error_of_unknown_path_names_correct_path(path: str, remedy: str) -> None:
    async with fake_upstream() as replica, run_gateway(replica) as client:
        response = await client.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert remedy in response.json()["error"]["message"]


async def test_model_list_and_unknown_model() -> None:
    async with fake_upstream() as replica, run_gateway(replica) as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == ["big", "default"]
        assert (await client.get("/v1/models/big")).json()["id"] == "big"
        assert (await client.get("/v1/models/small")).status_code == 404
        assert (await client.get("/v1/completions")).status_code == 405


@pytest.mark.parametrize("stream", [True, False])
async def test_request_that_crashes_replicas_is_not_sent_to_all(stream: bool) -> None:
    async def crash(request: UpstreamRequest) -> None:
        request.writer.transport.abort()

    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(fake_upstream(crash)) for _ in range(6)]
        client = await stack.enter_async_context(run_gateway(*replicas))
        response = await client.post("/v1/completions", json=BODY | {"stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_failed")
    assert sum(bool(replica.requests) for replica in replicas) == 4


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
    async with fake_upstream(gated_script) as replica:
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = GatewayServer(make_config([replica]), url.set_result)
        server_task = asyncio.create_task(server.run())
        async with httpx2.AsyncClient(base_url=await url, timeout=30) as client:
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
            await server_task


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_stop_ends_running_requests_with_draining_error(*, stream: bool) -> None:
    started = asyncio.Event()

    async def respond_never(request: UpstreamRequest) -> None:
        if stream:
            request.start_stream()
            request.send_text("first")
        started.set()
        await asyncio.Event().wait()

    async with fake_upstream(respond_never) as replica:
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = GatewayServer(make_config([replica]), url.set_result)
        server_task = asyncio.create_task(server.run())
        async with httpx2.AsyncClient(base_url=await url, timeout=30) as client:
            body = BODY | {"stream": stream}
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            await started.wait()
            server.stop()
            server.stop()
            response = await task
        assert response.status_code == (200 if stream else 503)
        assert '"code":"draining"' in response.text
        await server_task


# --- the queue -----------------------------------------------------------------------------------


class GatedScript:
    """A script that responds only when `release` is released."""

    def __init__(self) -> None:
        self.received = asyncio.Semaphore(0)
        self.release = asyncio.Semaphore(0)

    async def __call__(self, request: UpstreamRequest) -> None:
        self.received.release()
        await self.release.acquire()
        await respond(request)


async def test_request_waits_in_gateway_until_replica_has_free_slot() -> None:
    gated_script = GatedScript()
    async with (
        fake_upstream(gated_script) as replica,
        run_gateway(replica, max_requests=1) as client,
    ):
        posts = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(4)]
        for _ in posts:
            await gated_script.received.acquire()
            gated_script.release.release()
        assert [response.status_code for response in await asyncio.gather(*posts)] == [200] * 4
        assert replica.max_concurrent == 1


async def test_full_queue_and_long_wait_are_429_with_retry_after() -> None:
    gated_script, queue = GatedScript(), QueueConfig(max_requests=1, timeout_s=0.3)
    async with (
        fake_upstream(gated_script) as replica,
        run_gateway(replica, max_requests=1, queue=queue) as client,
    ):
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await gated_script.received.acquire()
        rejected = await asyncio.gather(
            *(client.post("/v1/completions", json=BODY) for _ in range(2))
        )
        assert [response.status_code for response in rejected] == [429, 429]
        assert {response.json()["error"]["code"] for response in rejected} == {"overloaded"}
        assert all(response.headers["retry-after-ms"] for response in rejected)
        gated_script.release.release()
        assert (await running).status_code == 200


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
