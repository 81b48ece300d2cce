"""Requests while the only replica of their model is unreachable: they wait if it may return soon, and no longer."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, State, constant_script, reply_script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream, respond_with_tokens
from tests.support.gateway_harness import GatewayHarness, open_breaker, run_gateway
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import QueueConfig, ReplicaConfig, Timeouts
from argosy.engine import EngineFailedError
from argosy.engine.serving.text import Tokenizer

PATIENT = Timeouts(
    first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=1000.0
)
BRIEF = Timeouts(first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=1.0)
SHORT_QUEUE = QueueConfig(max_requests=10)
TOKENIZE = {"prompt": "Once"}


def send(gateway: GatewayHarness, prompt: str = "Once") -> asyncio.Task[httpx2.Response]:
    body = {"model": "big", "prompt": prompt, "max_tokens": 3, "stream": True}
    return asyncio.create_task(gateway.client.post("/v1/completions", json=body))


def is_no_replica(response: httpx2.Response) -> bool:
    """Whether the response reports an outage that lasts."""
    code, retry_after = response.json()["error"]["code"], response.headers["retry-after"]
    return (response.status_code, code, retry_after) == (503, "no_replica", "10")


async def ready_status(gateway: GatewayHarness) -> int:
    return (await gateway.client.get("/ready")).status_code


def was_queued(gateway: GatewayHarness, response: httpx2.Response) -> bool:
    trace = gateway.traces.find(response.headers["x-argosy-request"])
    assert trace is not None
    return trace.queued_at is not None


def config_at(port: int) -> ReplicaConfig:
    url = f"http://127.0.0.1:{port}"
    return ReplicaConfig(url=url, name="a", kind="openai", model="rough", max_requests=1)


@asynccontextmanager
async def gateway_after_crash(
    timeouts: Timeouts, queue: QueueConfig = SHORT_QUEUE
) -> AsyncIterator[tuple[GatewayHarness, int]]:
    """Run a gateway whose only replica, with one slot, has just crashed; yield the replica's port too."""
    async with AsyncExitStack() as stack:
        async with fake_upstream() as server:
            gateway = await stack.enter_async_context(
                run_gateway(
                    [],
                    config_at(server.port),
                    timeouts=timeouts,
                    queue=queue,
                    early_stream_start_s=60.0,  # a started stream has no status code for its failure
                )
            )
        open_breaker(gateway.replicas[0])
        yield gateway, server.port


async def detect_outage(gateway: GatewayHarness) -> asyncio.Task[httpx2.Response]:
    """Send the request that detects the outage."""
    request = send(gateway, "detects outage")
    await until(lambda: gateway.replicas[0].health.is_down)
    return request


async def test_requests_wait_in_order_for_restarted_replica() -> None:
    order: list[str] = []

    async def record_prompt(request: UpstreamRequest) -> None:
        order.append(str(request.body["prompt"]))
        await respond_with_tokens(request)

    async with gateway_after_crash(PATIENT) as (gateway, port):
        waiting = [await detect_outage(gateway)]
        assert await ready_status(gateway) == 503
        for number in range(4):
            waiting.append(send(gateway, str(number)))
            await gateway.wait_for_queued(number + 1)
        async with fake_upstream(record_prompt, port=port) as server:
            responses = await asyncio.gather(*waiting)
            assert {response.status_code for response in responses} == {200}
            assert server.max_concurrent == 1
            assert await ready_status(gateway) == 200
    assert [prompt for prompt in order if prompt != "detects outage"] == ["0", "1", "2", "3"]


async def test_queue_limit_applies_during_outage() -> None:
    async with gateway_after_crash(PATIENT, QueueConfig(max_requests=2)) as (gateway, port):
        waiting = [await detect_outage(gateway)]
        for number in range(2):
            waiting.append(send(gateway))
            await gateway.wait_for_queued(number + 1)
        assert (await send(gateway)).json()["error"]["code"] == "overloaded"
        async with fake_upstream(port=port):
            responses = await asyncio.gather(*waiting)
    assert {response.status_code for response in responses} == {200}


async def test_tokenize_waits_for_restarted_replica() -> None:
    async with gateway_after_crash(PATIENT) as (gateway, port):
        first = await detect_outage(gateway)
        tokenize = asyncio.create_task(gateway.client.post("/tokenize", json=TOKENIZE))
        async with fake_upstream(port=port) as server:
            server.token_ids = [7]
            assert (await first).status_code == 200
            assert (await tokenize).json() == {"tokens": [7]}


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_tokenize_fails_over_to_another_replica(status: int) -> None:
    async with fake_upstream() as bad, fake_upstream() as good:
        configs = [ReplicaConfig(url=server.url, kind="openai") for server in (bad, good)]
        bad.token_ids, bad.tokenize_status, good.token_ids = [], status, [7]
        async with run_gateway([], *configs) as gateway:
            for _ in range(5):
                response = await gateway.client.post("/tokenize", json=TOKENIZE)
                assert (response.status_code, response.json()) == (200, {"tokens": [7]})
            good.tokenize_status = status
            response = await gateway.client.post("/tokenize", json=TOKENIZE)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")


async def test_outage_beyond_failover_timeout_rejects_all_requests() -> None:
    async with gateway_after_crash(BRIEF) as (gateway, _):
        first = await detect_outage(gateway)
        queued = send(gateway)
        await gateway.wait_for_queued(1)
        response = await gateway.client.get("/replicas/a/metrics")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        assert response.json()["error"]["message"].startswith("The replica 'a'")
        response = await queued
        assert is_no_replica(response)
        assert was_queued(gateway, response)
        late = await send(gateway)
        assert is_no_replica(late)
        assert not was_queued(gateway, late)
        assert is_no_replica(await gateway.client.post("/tokenize", json=TOKENIZE))
        assert is_no_replica(await first)


async def test_replica_that_was_never_up_rejects_requests_at_once() -> None:
    with socket.socket() as closed:  # reserves a port without listening
        closed.bind(("127.0.0.1", 0))
        config = config_at(closed.getsockname()[1])
        async with run_gateway([], config, timeouts=PATIENT) as gateway:
            for _ in range(3):
                response = await send(gateway)
                assert is_no_replica(response)
                assert not was_queued(gateway, response)


async def test_replica_that_was_never_up_serves_request_before_next_probe() -> None:
    async with AsyncExitStack() as stack:
        async with fake_upstream() as server:
            port = server.port
        gateway = await stack.enter_async_context(
            run_gateway([], config_at(port), timeouts=PATIENT)
        )
        assert await ready_status(gateway) == 503
        async with fake_upstream(port=port):
            assert (await send(gateway)).status_code == 200
            assert await ready_status(gateway) == 200


@pytest.mark.parametrize("state", ["starting", "restarting", "failed"])
async def test_native_replica_is_awaited_while_it_starts(
    tokenizer: Tokenizer, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A failed engine is reported until its server notices the failure and exits, here after the test.
    monkeypatch.setattr(
        "argosy.engine.serving.api_server.replica_server.ENGINE_POLL_INTERVAL_S", 3600.0
    )
    engine = FakeEngine(tokenizer, constant_script(reply_script(tokenizer, "Yes.")))
    at_once = Timeouts(failover_timeout_s=1e-6)
    with suppress(EngineFailedError):  # raised when the server of the failed engine stops
        async with (
            serve(engine) as served,
            run_gateway(
                [], ReplicaConfig(url=served.url, kind="argosy", model=MODEL), timeouts=at_once
            ) as gateway,
        ):
            engine.state = state
            await gateway.probe()
            assert await ready_status(gateway) == 503
            if state == "failed":
                assert is_no_replica(await send(gateway))
                return
            waiting = send(gateway)
            await gateway.wait_for_queued(1)
            engine.state = "ready"
            await gateway.probe()
            assert (await waiting).status_code == 200


async def test_request_ends_outage_while_another_still_runs_on_replica() -> None:
    may_end = asyncio.Event()

    async def script(request: UpstreamRequest) -> None:
        if request.body["prompt"] == "long":
            await may_end.wait()
        await respond_with_tokens(request)

    async with fake_upstream(script) as server:
        config = ReplicaConfig(url=server.url, kind="openai", model="rough", max_requests=4)
        async with run_gateway([], config, timeouts=PATIENT) as gateway:
            long = send(gateway, "long")
            await until(lambda: server.requests)
            (replica,) = gateway.replicas
            open_breaker(replica)
            replica.health.on_unreachable(time.monotonic())
            assert await ready_status(gateway) == 503
            assert (await send(gateway)).status_code == 200
            assert await ready_status(gateway) == 200
            may_end.set()
            assert (await long).status_code == 200


async def test_lack_of_file_descriptors_is_no_replica_failure() -> None:
    async with (
        fake_upstream() as server,
        run_gateway([], config_at(server.port), timeouts=PATIENT) as gateway,
    ):
        (replica,), limits = gateway.replicas, resource.getrlimit(resource.RLIMIT_NOFILE)
        assert await ready_status(gateway) == 200  # the client keeps this connection
        while (idle := replica.upstream.take_idle_connection()) is not None:
            idle.abort()
        with capture_logs() as logs:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                request = send(gateway)
                await until(lambda: "attempt_failed" in [line["event"] for line in logs])
                for _ in range(5):
                    await gateway.probe()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert replica.health.breaker.is_closed
            assert (await request).status_code == 200
        assert (await send(gateway)).status_code == 200
