"""Requests with `timeout_s`, at which they end with the tokens so far, and with `priority`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.replica_servers import MODEL, events, serve
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig, Timeouts
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.protocol import ApiError

TOKENS = list(range(100, 160))
CHAT = "/v1/chat/completions"
DEADLINE_S = 1.0
"""Long enough for the tokens that arrive immediately, and short enough to wait for."""


def make_body(timeout_s: object, **changes: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    request_body = {"model": "big", "messages": messages, "max_tokens": 60, "timeout_s": timeout_s}
    return request_body | changes


def parse_chunks(content: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ended with [DONE]."""
    *chunks, done = events(content)
    assert done == b"[DONE]"
    return [json.loads(chunk) for chunk in chunks]


DEADLINE_END = ("length", "deadline")


def read_end(choice: dict[str, Any]) -> tuple[str, str]:
    """Return finish reason and stop reason."""
    return choice["finish_reason"], choice["stop_reason"]


def make_stuck_engine(tokenizer: Tokenizer, after: int) -> FakeEngine:
    """Return an engine that stops after `after` tokens."""
    return FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length", pause_after=after))


async def test_response_ends_at_deadline_with_tokens_so_far(tokenizer: Tokenizer) -> None:
    engine, recorder = make_stuck_engine(tokenizer, 40), RecordingFilter()
    stream_options = {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        serve(engine) as served,
        run_gateway([recorder], ReplicaConfig(url=served.url, model=MODEL)) as gateway,
    ):
        responses = await asyncio.gather(
            *(
                gateway.client.post(
                    CHAT, json=make_body(DEADLINE_S, return_token_ids=True, **options)
                )
                for options in (stream_options, {})
            )
        )
        await engine.wait_idle()  # the replica is notified of the cancellation
    for response, chunks in zip(
        responses, [parse_chunks(responses[0].content), [responses[1].json()]], strict=True
    ):
        assert response.status_code == 200, response.text
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [i for choice in choices for i in choice.get("token_ids") or ()] == TOKENS[:40]
        assert read_end(choices[-1]) == DEADLINE_END
        assert chunks[-1]["usage"]["completion_tokens"] == 40
    for context in recorder.completed:
        assert (context.status, context.delivered.output_tokens) == ("stopped", 40)


async def test_choice_without_tokens_at_deadline_is_empty(tokenizer: Tokenizer) -> None:
    def generate_first_choice(request: EngineRequest) -> Script:
        return Script(list(TOKENS), pause_after=0 if request.parent_id else 5)

    async with (
        serve(FakeEngine(tokenizer, generate_first_choice)) as served,
        run_gateway([], ReplicaConfig(url=served.url, model=MODEL)) as gateway,
    ):
        chat = make_body(DEADLINE_S, n=2, return_token_ids=True)
        completion = {"prompt": "Hi"} | {k: v for k, v in chat.items() if k != "messages"}
        responses = await asyncio.gather(
            gateway.client.post(CHAT, json=chat),
            gateway.client.post("/v1/completions", json=completion),
        )
    for response in responses:
        choices = response.json()["choices"]
        assert list(map(read_end, choices)) == [DEADLINE_END, DEADLINE_END]
        assert [choice.get("token_ids") for choice in choices] == [TOKENS[:5], []]


async def test_stream_on_fast_path_ends_at_deadline(tokenizer: Tokenizer) -> None:
    engine = make_stuck_engine(tokenizer, 40)
    async with (
        serve(engine) as served,
        run_gateway([], ReplicaConfig(url=served.url, model=MODEL)) as gateway,
    ):
        task = asyncio.create_task(
            gateway.client.post(CHAT, json=make_body(DEADLINE_S, stream=True))
        )
        await until(lambda: gateway.handlers.fast_path_streams == 1)
        chunks = parse_chunks((await task).content)
    assert read_end(chunks[-1]["choices"][0]) == DEADLINE_END


async def test_stream_of_other_server_ends_at_deadline() -> None:
    async def stall_after_two_tokens(request: UpstreamRequest) -> None:
        assert "timeout_s" not in request.body  # the server does not support it
        request.start_stream()
        request.send_text("one")
        request.send_text(" two")
        await asyncio.Event().wait()

    async with (
        fake_upstream(stall_after_two_tokens) as upstream,
        run_gateway([], ReplicaConfig(url=upstream.url, kind="openai")) as gateway,
    ):
        request_body = {"model": "big", "prompt": "Hi", "stream": True, "timeout_s": DEADLINE_S}
        response = await gateway.client.post("/v1/completions", json=request_body)
    choices = [chunk["choices"][0] for chunk in parse_chunks(response.content)]
    assert "".join(choice["text"] for choice in choices) == "one two"
    assert read_end(choices[-1]) == DEADLINE_END


async def test_stream_waiting_for_failover_ends_at_deadline(tokenizer: Tokenizer) -> None:
    crashing = Script(TOKENS[:20], crash=RuntimeError("gone"))
    engine = FakeEngine(tokenizer, lambda _: crashing)
    timeouts = Timeouts(failover_timeout_s=30.0)
    async with serve(engine) as served:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        async with run_gateway([], replica, timeouts=timeouts) as gateway:
            engine.script = lambda _: crashing
            task = asyncio.create_task(
                gateway.client.post(CHAT, json=make_body(DEADLINE_S, stream=True))
            )
            await engine.request_received.wait()
            engine.rejection = ApiError(503, "engine_unavailable", "restarting")
            chunks = parse_chunks((await task).content)
    assert read_end(chunks[-1]["choices"][0]) == DEADLINE_END


def assert_deadline_exceeded(response: httpx2.Response) -> None:
    assert response.status_code == 504, response.text
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [True, False])
async def test_request_without_tokens_at_deadline_is_504(
    tokenizer: Tokenizer, stream: bool
) -> None:
    recorder = RecordingFilter()
    async with serve(make_stuck_engine(tokenizer, 0)) as served:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        async with run_gateway([recorder], replica) as gateway:
            assert_deadline_exceeded(
                await gateway.client.post(CHAT, json=make_body(0.1, stream=stream))
            )
            trace = gateway.traces.find(recorder.completed[0].response_id)
    assert trace is not None
    assert (trace.status, trace.error_code, trace.tokens.output_tokens) == (
        "stopped",
        "deadline_exceeded",
        0,
    )


async def test_queue_is_ordered_by_deadline_and_drops_expired_requests() -> None:
    release, order = asyncio.Event(), []

    async def respond(request: UpstreamRequest) -> None:
        order.append(request.body["user"])
        await release.wait()
        request.send_json(200, {"choices": []})

    async with fake_upstream(respond) as upstream:
        replica = ReplicaConfig(url=upstream.url, kind="openai", max_requests=1)
        async with run_gateway([], replica) as gateway:

            def send(
                user: str, timeout_s: float | None, priority: int = 0
            ) -> asyncio.Task[httpx2.Response]:
                request_body = make_body(timeout_s, user=user, priority=priority)
                return asyncio.create_task(gateway.client.post(CHAT, json=request_body))

            tasks = [send("first", None)]
            await until(lambda: order == ["first"])
            submissions = (
                ("modest", 10.0, 1),
                ("patient", None, 0),
                ("later", 25.0, 0),
                ("sooner", 20.0, 0),
            )
            for index, submission in enumerate(submissions, 1):
                tasks.append(send(*submission))
                await gateway.wait_for_queued(index)
            assert_deadline_exceeded(await send("too late", 0.05))
            await gateway.wait_for_queued(4)
            release.set()
            assert [(await task).status_code for task in tasks] == [200] * 5
    assert order == ["first", "sooner", "later", "patient", "modest"]


async def test_operator_deadline_applies_to_all_requests(tokenizer: Tokenizer) -> None:
    async with serve(make_stuck_engine(tokenizer, 0)) as served:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        async with run_gateway([], replica, timeouts=Timeouts(request_timeout_s=0.1)) as gateway:
            assert_deadline_exceeded(await gateway.client.post(CHAT, json=make_body(None)))
            assert_deadline_exceeded(await gateway.client.post(CHAT, json=make_body(30.0)))


@pytest.mark.parametrize(
    "invalid_field",
    [
        {"timeout_s": 0},
        {"timeout_s": "soon"},
        {"timeout_s": 1e9},
        {"priority": -1},
        {"priority": 9},
    ],
    ids=str,
)
async def test_invalid_deadline_or_priority_is_rejected_by_name(
    invalid_field: dict[str, object],
) -> None:
    async with (
        fake_upstream() as upstream,
        run_gateway([], ReplicaConfig(url=upstream.url, kind="openai")) as gateway,
    ):
        response = await gateway.client.post(CHAT, json=make_body(1.0) | invalid_field)
    assert response.status_code == 400
    assert [response.json()["error"]["param"]] == list(invalid_field)
