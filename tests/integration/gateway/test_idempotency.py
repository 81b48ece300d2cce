"""Requests with an `Idempotency-Key`: generated once, charged once, and replayed with identical bytes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    fake_upstream,
    respond_with_text,
    respond_with_tokens,
)
from tests.support.gateway_harness import run_gateway
from tests.support.idempotent_gateway import (
    BODIES,
    CHATS,
    COMPLETIONS,
    KEY_HEADER,
    OUTPUT_PRICE,
    REPLAYED,
    TOKENS,
    GatewayFleet,
    IdempotentClient,
    run_gateway_with_engine,
    run_gateways,
    status_and_code,
)
from tests.support.services import RedisServer

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.filters import IdempotencyFilter
from argosy.gateway.filters.idempotency_filter import ResponseRecorder
from argosy.gateway.request_context import RequestContext
from argosy.store import IdempotencyConfig, create_idempotency_store

IN_USE = (409, "idempotency_key_in_use")
REUSED = (422, "idempotency_key_reused")
exhaustive = pytest.mark.exhaustive


def replica_config(server: FakeUpstream) -> ReplicaConfig:
    return ReplicaConfig(url=server.url, kind="openai", model="rough", resume_mode="none")


@contextlib.asynccontextmanager
async def gateway_without_accounts() -> AsyncIterator[IdempotentClient]:
    """Run a gateway without a store. Yields a client."""
    store = create_idempotency_store(IdempotencyConfig(), None, None)
    idempotency = IdempotencyFilter(store, 1 << 20)
    async with (
        fake_upstream() as server,
        run_gateway([idempotency], replica_config(server)) as running,
    ):
        yield IdempotentClient(running.client)


async def get_trace(client: IdempotentClient, response: httpx2.Response) -> dict[str, object]:
    """Return the gateway's trace of a request."""
    request_id = response.headers["x-argosy-request"]
    trace: dict[str, object] = (await client.http.get(f"/admin/requests/{request_id}")).json()
    return trace


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        (CHATS, True),
        (COMPLETIONS, False),
        pytest.param(CHATS, False, marks=exhaustive),
        pytest.param(COMPLETIONS, True, marks=exhaustive),
    ],
)
async def test_repeated_request_is_replayed_without_charge(
    path: str, stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_gateway_with_engine(tmp_path, tokenizer, requests=1) as (fleet, engine, client):
        first = await client.post(path=path, stream=stream)
        second = await client.post(path=path, stream=stream)
        assert (first.status_code, second.status_code) == (200, 200), second.text
        assert second.content == first.content
        assert len(first.content) > 500
        assert second.headers["content-type"] == first.headers["content-type"]
        assert REPLAYED not in first.headers
        assert second.headers[REPLAYED] == "true"
        assert len(engine.requests) == 1
        for _ in range(2):  # the first request used up the limit; a rejection leaves the key free
            rejected = await client.post("b", path=path, stream=stream)
            assert status_and_code(rejected) == (429, "rate_limit_exceeded")
        traces = [await get_trace(client, response) for response in (first, second)]
        first_id = first.headers["x-argosy-request"]
        assert [trace["status"] for trace in traces] == ["completed", "replayed"]
        assert traces[0]["idempotency"] == {"key": "a", "first": first_id, "kept": True}
        assert traces[1]["idempotency"] == traces[0]["idempotency"]
        assert traces[1]["tokens"] == {"prompt": 0, "cached": 0, "output": 0}
        assert 'status="replayed"' in await client.metrics()
        (record,) = await fleet.tenants.wait_for_rows(1)
    assert (record.request, record.output_tokens) == (first_id, len(TOKENS))
    assert record.nano_dollars == OUTPUT_PRICE * len(TOKENS)


async def test_key_identifies_one_request_whatever_the_order_of_its_fields(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_gateway_with_engine(tmp_path, tokenizer) as (_, engine, client):
        assert (await client.post(seed=5)).status_code == 200
        reordered = dict(reversed((BODIES[CHATS] | {"seed": 5}).items()))
        replayed = await client.http.post(CHATS, json=reordered, headers={KEY_HEADER: "a"})
        assert (replayed.status_code, replayed.headers[REPLAYED]) == (200, "true")
        for response in (
            await client.post(seed=6),
            await client.post(),
            await client.post(seed=5, stream=True),
            await client.post(path=COMPLETIONS, seed=5),
        ):
            assert status_and_code(response) == REUSED
            assert response.json()["error"]["param"] == KEY_HEADER
        assert len(engine.requests) == 1
        for _ in range(2):  # requests without a key are never replayed
            response = await client.http.post(CHATS, json=BODIES[CHATS] | {"seed": 5})
            assert (response.status_code, REPLAYED in response.headers) == (200, False)
        assert len(engine.requests) == 3


async def test_keys_are_scoped_to_project(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with run_gateway_with_engine(tmp_path, tokenizer) as (fleet, engine, _):
        api_keys = ("shop", "same project", "other project", "other organisation")
        responses = {name: await (await fleet.client(name)).post() for name in api_keys}
        assert {response.status_code for response in responses.values()} == {200}
        replayed = [name for name, response in responses.items() if REPLAYED in response.headers]
        assert replayed == ["same project"]
        assert responses["same project"].content == responses["shop"].content
        assert len({response.json()["id"] for response in responses.values()}) == 3
        assert len(engine.requests) == 3
        assert (await (await fleet.client("other model")).post()).status_code == 403


async def test_keys_share_one_scope_without_accounts() -> None:
    async with gateway_without_accounts() as client:
        first = await client.post(path=COMPLETIONS, stream=True)
        second = await client.post(path=COMPLETIONS, stream=True)
        assert (second.content, second.headers[REPLAYED]) == (first.content, "true")


async def test_invalid_key_is_rejected(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with run_gateway_with_engine(tmp_path, tokenizer) as (_, engine, client):
        for key in ("", "two words", "ü", "x" * 256):
            headers = [(KEY_HEADER.encode(), key.encode())]
            response = await client.http.post(CHATS, json=BODIES[CHATS], headers=headers)
            assert status_and_code(response) == (400, "invalid_idempotency_key")
            assert KEY_HEADER in response.json()["error"]["message"]
        assert not engine.requests
        assert (await client.post("x" * 255)).status_code == 200


# --- several requests at a time, at one gateway or two -------------------------------------------


@contextlib.asynccontextmanager
async def two_clients(
    folder: Path, tokenizer: Tokenizer, redis: RedisServer | None, pause_after: int | None = 20
) -> AsyncIterator[tuple[GatewayFleet, FakeEngine, IdempotentClient, IdempotentClient]]:
    """Open clients of two gateways that share Redis, or the same client twice without Redis."""
    settings = {} if redis is None else {"gateways": 2, "redis": redis.url}
    async with run_gateway_with_engine(folder, tokenizer, pause_after, **settings) as (
        fleet,
        engine,
        client,
    ):
        second = client if redis is None else await fleet.client(gateway=1)
        yield fleet, engine, client, second


STREAM_AND_GATEWAYS = pytest.mark.parametrize(
    ("stream", "num_gateways"),
    [
        (False, 1),
        (True, 2),
        pytest.param(True, 1, marks=exhaustive),
        pytest.param(False, 2, marks=exhaustive),
    ],
)


@STREAM_AND_GATEWAYS
async def test_retry_is_rejected_while_first_request_runs_and_replayed_afterwards(
    stream: bool, num_gateways: int, redis: RedisServer, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    shared = redis if num_gateways == 2 else None
    async with two_clients(tmp_path, tokenizer, shared) as (_, engine, client, second):
        running = await client.post_until_paused(engine, stream=stream)
        rejected = await second.post(stream=stream)
        assert status_and_code(rejected) == IN_USE
        assert int(rejected.headers["retry-after-ms"]) > 0
        assert status_and_code(await second.post(stream=stream, temperature=0.5)) == REUSED
        engine.may_continue.set()
        first = await running
        while (replayed := await second.post(stream=stream)).status_code == 409:
            pass
        assert (replayed.status_code, replayed.content) == (200, first.content)
        assert replayed.headers[REPLAYED] == "true"
        assert status_and_code(await second.post(stream=stream, seed=1)) == REUSED
        assert len(engine.requests) == 1
        assert f'code="{IN_USE[1]}",model="big"' in await second.metrics()


@STREAM_AND_GATEWAYS
async def test_disconnect_frees_key(
    stream: bool, num_gateways: int, redis: RedisServer, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    shared = redis if num_gateways == 2 else None
    async with two_clients(tmp_path, tokenizer, shared) as (fleet, engine, client, second):
        running = await client.post_until_paused(engine, stream=stream)
        running.cancel()
        await engine.wait_idle()
        engine.may_continue.set()
        while (response := await second.post(stream=stream)).status_code == 409:
            assert num_gateways == 2, "at the same gateway the key is free at once"
        assert (response.status_code, REPLAYED in response.headers) == (200, False)
        assert len(engine.requests) == 2
        records = await fleet.tenants.wait_for_rows(2)
        assert sorted(record.status for record in records) == ["cancelled", "completed"]


# --- responses that are not stored, or not as usual ----------------------------------------------


@pytest.mark.parametrize(
    ("fault", "stream"),
    [
        (400, False),
        (429, True),
        (500, False),
        pytest.param("cut", True, id="cut-stream"),
        *(
            pytest.param(status, stream, marks=exhaustive)
            for status, stream in ((400, True), (429, False), (500, True))
        ),
    ],
)
async def test_failure_leaves_key_free(fault: int | str, stream: bool, tmp_path: Path) -> None:
    fails = True

    async def script(request: UpstreamRequest) -> None:
        if fails and isinstance(fault, int):
            request.send_json(fault, {"error": {"message": "no"}})
        elif fails:
            request.start_stream()
            request.send_text("Once")
            await request.writer.drain()
            request.writer.close()
        elif stream:
            await respond_with_tokens(request)
        else:
            await respond_with_text(request)

    async with (
        fake_upstream(script) as server,
        run_gateways(tmp_path, replica_config(server)) as fleet,
    ):
        client = await fleet.client()
        failed = await client.post(path=COMPLETIONS, stream=stream)
        assert failed.status_code >= 400 or b"upstream_failed" in failed.content
        fails = False
        first = await client.post(path=COMPLETIONS, stream=stream)
        assert first.status_code == 200, first.text
        assert REPLAYED not in first.headers
        assert not stream or first.content.endswith(b"data: [DONE]\n\n")
        num_requests = len(server.requests)
        second = await client.post(path=COMPLETIONS, stream=stream)
        assert (second.headers[REPLAYED], second.content) == ("true", first.content)
        assert len(server.requests) == num_requests


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=exhaustive)])
async def test_response_cut_by_limit_is_replayed_after_limit_is_used_up(
    stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_gateway_with_engine(tmp_path, tokenizer, output_tokens=30) as (
        _,
        engine,
        client,
    ):
        first = await client.post(stream=stream)
        assert b'"finish_reason":"length","stop_reason":"limit"' in first.content
        second = await client.post(stream=stream)
        assert (second.content, second.headers[REPLAYED]) == (first.content, "true")
        assert (await client.post("b", stream=stream)).status_code == 429
        assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("config", "stream"),
    [
        pytest.param(IdempotencyConfig(max_response_bytes=400), True, id="one-response"),
        pytest.param(IdempotencyConfig(max_bytes=0), False, id="all-responses"),
        *(
            pytest.param(config, stream, marks=exhaustive)
            for config, stream in (
                (IdempotencyConfig(max_response_bytes=400), False),
                (IdempotencyConfig(max_bytes=0), True),
            )
        ),
    ],
)
async def test_too_large_response_is_not_stored(
    config: IdempotencyConfig, stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_gateway_with_engine(tmp_path, tokenizer, idempotency=config) as (
        _,
        engine,
        client,
    ):
        first = await client.post(stream=stream)
        second = await client.post(stream=stream)
        assert len(first.content) > 400
        assert (second.status_code, REPLAYED in second.headers) == (200, False)
        assert len(engine.requests) == 2
        trace = await get_trace(client, first)
        assert isinstance(trace["idempotency"], dict)
        assert trace["idempotency"]["kept"] is False


@exhaustive
async def test_streams_with_keys_leave_no_reference_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        async with gateway_without_accounts() as client:
            for key in ("a", "b", "a"):
                await client.post(key, path=COMPLETIONS, stream=True)
        leaked = [
            each for each in gc.get_objects() if type(each) in {ResponseRecorder, RequestContext}
        ]
    finally:
        gc.enable()
    assert not leaked
