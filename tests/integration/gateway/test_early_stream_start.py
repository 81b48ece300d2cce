"""Streams whose replicas are slow: headers and keep-alive comments arrive first, later errors are events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, fake_upstream
from tests.support.gateway_harness import (
    GatewayHarness,
    RecordingFilter,
    run_gateway,
)
from tests.support.replica_servers import MODEL, events, serve
from tests.support.waiting import until

from argosy.deployment import QueueConfig, ReplicaConfig
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.filters import IdempotencyFilter
from argosy.gateway.proxy.request_proxy import RequestProxy
from argosy.gateway.request_context import RequestFilter
from argosy.store import IdempotencyConfig, create_idempotency_store

TOKENS = list(range(100, 140))
PATH = "/v1/chat/completions"
KEEPALIVE = b": keep-alive\n\n"
EARLY_START_S = 0.05


def make_body(**extra: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {
        "model": "big",
        "messages": messages,
        "max_tokens": 40,
        "stream": True,
        "seed": 7,
    } | extra


@contextlib.asynccontextmanager
async def open_early_stream(
    gateway: GatewayHarness, body: dict[str, Any], **headers: str
) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """Send a request, and wait for the headers and the first comment. Yield a function that returns all bytes."""
    async with gateway.client.stream("POST", PATH, json=body, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-argosy-request"]
        assert response.headers["x-watched"] == "yes"
        chunks = response.aiter_bytes()
        received = await anext(chunks)
        assert received.startswith(KEEPALIVE)

        async def read_all() -> bytes:
            return received + b"".join([chunk async for chunk in chunks])

        yield read_all


@contextlib.asynccontextmanager
async def run_slow_gateway(
    tokenizer: Tokenizer,
    *filters: RequestFilter,
    queue: QueueConfig = QueueConfig(),  # noqa: B008 - immutable
) -> AsyncIterator[tuple[GatewayHarness, FakeEngine, RecordingFilter]]:
    """Run a gateway in front of a native replica that pauses before its first token."""
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length", pause_after=0))
    recorder = RecordingFilter()
    async with (
        serve(engine) as served,
        run_gateway(
            [recorder, *filters],
            ReplicaConfig(url=served.url, model=MODEL, max_requests=1),
            queue=queue,
            early_stream_start_s=EARLY_START_S,
        ) as gateway,
    ):
        yield gateway, engine, recorder


async def test_slow_stream_equals_a_prompt_one_and_its_replay(tokenizer: Tokenizer) -> None:
    """The first stream waits for its token, the second in the queue. A buffered request waits without headers."""
    store = create_idempotency_store(IdempotencyConfig(), None, None)
    idempotency = IdempotencyFilter(store, 1 << 20)
    async with run_slow_gateway(tokenizer, idempotency) as (gateway, engine, recorder):
        key = {"idempotency-key": "once"}
        async with (
            open_early_stream(gateway, make_body(), **key) as first,
            open_early_stream(gateway, make_body()) as queued,
        ):
            buffered = asyncio.create_task(gateway.client.post(PATH, json=make_body(stream=False)))
            await gateway.wait_for_queued(2)
            engine.may_continue.set()
            slow = [await first(), await queued()]
        assert (await buffered).headers["content-type"] == "application/json"
        assert (await buffered).json()["usage"]["completion_tokens"] == 40
        prompt = await gateway.client.post(PATH, json=make_body())
        replay = await gateway.client.post(PATH, json=make_body(), headers=key)
    assert replay.headers["idempotent-replayed"] == "true"
    assert replay.content == slow[0].replace(KEEPALIVE, b"")
    for content in (*slow, prompt.content):
        *chunks, done = events(content)
        assert done == b"[DONE]"
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        expected = [
            json.loads(chunk)["choices"][0]["delta"] for chunk in events(prompt.content)[:-1]
        ]
        assert deltas == expected
    assert [context.status for context in recorder.completed] == ["completed"] * 5
    assert [len(context.trace.attempts) for context in recorder.completed] == [1, 1, 1, 1, 0]


async def test_python_sdk_skips_keepalives_and_raises_a_late_error(tokenizer: Tokenizer) -> None:
    queue = QueueConfig(timeout_s=0.4)
    async with (
        run_slow_gateway(tokenizer, queue=queue) as (gateway, engine, _),
        openai.AsyncOpenAI(
            base_url=f"{gateway.client.base_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        body = make_body(seed=None)
        slow, late = [await client.chat.completions.create(**body) for _ in range(2)]
        with pytest.raises(openai.APIError) as caught:
            async for _ in late:
                pass
        assert caught.value.code == "overloaded"
        engine.may_continue.set()
        assert len([chunk async for chunk in slow]) > 40


LATE_FAULTS = {
    "queue": ("overloaded", "refused"),
    "refusal": ("bad_temperature", "refused"),
    "odd-refusal": ("refused_by_replica", "refused"),
    "loss": ("upstream_failed", "failed"),
    "deadline": ("deadline_exceeded", "stopped"),
    "bug": ("internal_error", "failed"),
}
"""Code of the error that the client receives, and the recorded status, by fault of the replica or the gateway."""


@contextlib.asynccontextmanager
async def run_faulty_gateway(
    fault: str, may_fail: asyncio.Event
) -> AsyncIterator[tuple[GatewayHarness, FakeUpstream, RecordingFilter]]:
    """Run a gateway in front of a server that shows a fault once the event is set."""

    async def fail(request: UpstreamRequest) -> None:
        if fault in {"deadline", "queue"}:
            await asyncio.Event().wait()
        await may_fail.wait()
        if fault == "refusal":
            error = {"message": "Too hot.", "type": "x", "code": "bad_temperature"}
            request.send_page(400, {"error": error})
        elif fault == "odd-refusal":
            request.send_page(422, "not\nthis")
        else:
            request.writer.close()

    recorder = RecordingFilter()
    async with (
        fake_upstream(fail) as upstream,
        run_gateway(
            [recorder],
            ReplicaConfig(url=upstream.url, kind="openai", max_requests=1),
            queue=QueueConfig(timeout_s=0.3 if fault == "queue" else 30.0),
            early_stream_start_s=EARLY_START_S,
        ) as gateway,
    ):
        yield gateway, upstream, recorder


@pytest.mark.parametrize("fault", LATE_FAULTS)
async def test_error_after_the_early_start_is_the_last_event(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    may_fail, (code, recorded_status) = asyncio.Event(), LATE_FAULTS[fault]
    timeout = {"timeout_s": 0.3} if fault == "deadline" else {}
    async with run_faulty_gateway(fault, may_fail) as (gateway, upstream, recorder):
        blocking = None
        if fault == "queue":
            blocking = asyncio.create_task(gateway.client.post(PATH, json=make_body(max_tokens=2)))
            await until(lambda: len(upstream.requests) == 1)
        if fault == "bug":
            monkeypatch.setattr(RequestProxy, "_report_end", None)
        async with open_early_stream(gateway, make_body(**timeout)) as read_all:
            may_fail.set()
            (event,) = events((await read_all()).replace(KEEPALIVE, b""))
        assert json.loads(event)["error"]["code"] == code
        if blocking is not None:
            blocking.cancel()
            await asyncio.gather(blocking, return_exceptions=True)
    context = next(c for c in recorder.completed if c.fields.max_output_tokens == 40)
    assert context.status == recorded_status
    assert context.delivered.prompt_tokens == context.delivered.output_tokens == 0


@pytest.mark.parametrize("waits_in_queue", [False, True])
async def test_client_that_leaves_a_waiting_stream_is_noticed(
    tokenizer: Tokenizer, waits_in_queue: bool
) -> None:
    async with run_slow_gateway(tokenizer) as (gateway, engine, recorder):
        async with contextlib.AsyncExitStack() as others:
            if waits_in_queue:
                await others.enter_async_context(open_early_stream(gateway, make_body()))
            async with open_early_stream(gateway, make_body()):
                leaving = recorder.started[-1]
            await until(lambda: bool(recorder.completed))
            assert recorder.completed == [leaving]
            assert leaving.status == "cancelled"
        await engine.wait_idle()


async def test_stream_that_started_early_is_still_hedged(tokenizer: Tokenizer) -> None:
    recorder = RecordingFilter()

    def make_engine(name: str) -> FakeEngine:
        def script(request: EngineRequest) -> Script:
            del request
            is_first = recorder.started[0].trace.attempts[0].replica == name
            return Script(list(TOKENS), finish="length", pause_after=0 if is_first else None)

        return FakeEngine(tokenizer, script)

    engines = {name: make_engine(name) for name in "ab"}
    async with serve(engines["a"]) as a, serve(engines["b"]) as b:
        replicas = [
            ReplicaConfig(url=served.url, name=name, model=MODEL)
            for name, served in (("a", a), ("b", b))
        ]
        async with (
            run_gateway(
                [recorder], *replicas, early_stream_start_s=EARLY_START_S, hedge_after_s=0.5
            ) as gateway,
            open_early_stream(gateway, make_body()) as read_all,
        ):
            assert events(await read_all())[-1] == b"[DONE]"
    (context,) = recorder.completed
    assert [attempt.is_hedge for attempt in context.trace.attempts] == [False, True]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_invalid_request_is_refused_instead_of_queued(
    tokenizer: Tokenizer, path: str
) -> None:
    """The error is that of the replica, which gets the request once a slot is free."""
    invalid_fields: list[dict[str, object]] = [
        {"temperature": 101},
        {"temperature": "hot"},
        {"n": 65},
        {"stop": ["x"] * 60 + [""]},
        {"use_beam_search": True},
        {"logit_bias": [1]},
        {"stream_options": {"include_usage": 1}},
    ]
    valid = make_body(stream=False, stop="x", top_k=3, unknown_field=1)
    if path != PATH:
        del valid["messages"]
        valid["prompt"] = "Hi"
    async with run_slow_gateway(tokenizer) as (gateway, engine, _):
        async with open_early_stream(gateway, make_body()) as read_running:
            refusals = [
                (await gateway.client.post(path, json=valid | invalid)).json()["error"]
                for invalid in invalid_fields
            ]
            queued = asyncio.create_task(gateway.client.post(path, json=valid))
            await gateway.wait_for_queued(1)
            engine.may_continue.set()
            await read_running()
        assert (await queued).status_code == 200
        for invalid, refusal in zip(invalid_fields, refusals, strict=True):
            response = await gateway.client.post(path, json=valid | invalid)
            assert (response.status_code, response.json()["error"]) == (400, refusal)
