"""Hedged requests: the replica that sends content first serves the request, and the other attempt is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    UpstreamScript,
    fake_upstream,
    respond_with_tokens,
)
from tests.support.gateway_harness import (
    FAST_TIMEOUTS,
    GatewayHarness,
    RecordingFilter,
    run_gateway,
)
from tests.support.placed_requests import placement_of
from tests.support.replica_servers import MODEL, completion, events, serve
from tests.support.waiting import until

from argosy.deployment import BackendKind, ReplicaConfig, Timeouts
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import RequestContext
from argosy.policy.retries import HEDGE_RATIO, HEDGE_RESERVE
from argosy.protocol import format_event
from argosy.telemetry import GatewayGauges

TOKENS = list(range(100, 112))
HEDGE_AFTER_S = 0.01
PATHS = ("/v1/chat/completions", "/v1/completions")


def body(path: str, **extra: object) -> dict[str, Any]:
    if path == PATHS[0]:
        messages = [{"role": "user", "content": "Hi"}]
        return {"model": "big", "messages": messages, "max_tokens": 12} | extra
    return completion("Once", max_tokens=12) | {"model": "big"} | extra


def is_first_choice(recorder: RecordingFilter, name: str) -> bool:
    """Whether the first request was first sent to this replica."""
    return recorder.started[0].trace.attempts[0].replica == name


@dataclass
class HedgedPair:
    """Two Argosy replicas behind a gateway. The first that gets the request does not respond."""

    gateway: GatewayHarness
    recorder: RecordingFilter
    engines: dict[str, FakeEngine]
    hedge_sent: asyncio.Event
    """Set when the second replica got the request."""

    @property
    def first(self) -> str:
        """Name of the replica that got the request first."""
        return next(name for name in self.engines if is_first_choice(self.recorder, name))

    @property
    def second(self) -> str:
        """Name of the other replica."""
        return next(name for name in self.engines if name != self.first)


@contextlib.asynccontextmanager
async def hedged_pair(tokenizer: Tokenizer, second: Script) -> AsyncIterator[HedgedPair]:
    """Run a gateway in front of two engines. The one that gets the hedge runs the script `second`."""
    hedge_sent, recorder = asyncio.Event(), RecordingFilter()

    def script(name: str) -> Script:
        if is_first_choice(recorder, name):
            return Script(list(TOKENS), finish="length", pause_after=0)
        hedge_sent.set()
        return second

    engines = {
        "a": FakeEngine(tokenizer, lambda _: script("a")),
        "b": FakeEngine(tokenizer, lambda _: script("b")),
    }
    async with (
        serve(engines["a"]) as a,
        serve(engines["b"]) as b,
        run_gateway(
            [recorder],
            ReplicaConfig(url=a.url, name="a", model=MODEL),
            ReplicaConfig(url=b.url, name="b", model=MODEL),
            hedge_after_s=HEDGE_AFTER_S,
        ) as gateway,
    ):
        yield HedgedPair(gateway, recorder, engines, hedge_sent)


def count_hedges(gateway: GatewayHarness) -> dict[str, float]:
    """Return the number of hedges by the label `won`."""
    exposition = gateway.metrics.exposition(GatewayGauges()).decode().splitlines()
    name = 'argosy_gateway_hedges_total{model="big",won="'
    lines = (line.removeprefix(name).split('"} ') for line in exposition if line.startswith(name))
    return {won: float(count) for won, count in lines}


def attempt_outcomes(gateway: GatewayHarness, context: RequestContext) -> list[tuple[bool, str]]:
    """Return whether each attempt of the trace was a hedge, and its outcome."""
    trace = gateway.traces.find(context.response_id)
    assert trace is not None
    return [(attempt["hedge"], attempt["outcome"]) for attempt in trace.to_dict()["attempts"]]


def token_ids(content: bytes, stream: bool) -> list[int]:
    chunks = [json.loads(c) for c in events(content)[:-1]] if stream else [json.loads(content)]
    return [
        i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids") or ()
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_hedge_replaces_silent_replica(tokenizer: Tokenizer, path: str, stream: bool) -> None:
    async with hedged_pair(tokenizer, Script(list(TOKENS), finish="length")) as pair_of_replicas:
        request_body = body(path, stream=stream, return_token_ids=True)
        response = await pair_of_replicas.gateway.client.post(path, json=request_body)
        assert response.status_code == 200, response.text
        assert token_ids(response.content, stream) == TOKENS
        silent_engine, fast_engine = (
            pair_of_replicas.engines[pair_of_replicas.first],
            pair_of_replicas.engines[pair_of_replicas.second],
        )
        await silent_engine.wait_idle()
        assert silent_engine.aborted
        assert not fast_engine.aborted
    (context,) = pair_of_replicas.recorder.completed
    assert context.status == "completed"
    assert pair_of_replicas.recorder.token_counts == sorted(
        set(pair_of_replicas.recorder.token_counts)
    )
    assert context.delivered.output_tokens == 12
    assert context.replica_name == pair_of_replicas.second
    assert attempt_outcomes(pair_of_replicas.gateway, context) == [
        (False, "ended"),
        (True, "success"),
    ]
    assert count_hedges(pair_of_replicas.gateway) == {"true": 1}
    assert all(replica.health.breaker.is_closed for replica in context.pool.replicas.values())


@pytest.mark.parametrize("stream", [True, False])
async def test_first_replica_may_still_win(tokenizer: Tokenizer, stream: bool) -> None:
    async with hedged_pair(
        tokenizer, Script(list(TOKENS), finish="length", pause_after=0)
    ) as pair_of_replicas:
        request_body = body(PATHS[1], stream=stream, return_token_ids=True)
        task = asyncio.create_task(
            pair_of_replicas.gateway.client.post(PATHS[1], json=request_body)
        )
        await pair_of_replicas.hedge_sent.wait()
        first, second = (
            pair_of_replicas.engines[pair_of_replicas.first],
            pair_of_replicas.engines[pair_of_replicas.second],
        )
        first.may_continue.set()
        response = await task
        assert token_ids(response.content, stream) == TOKENS
        await second.wait_idle()
        assert second.aborted
        assert not first.aborted
    (context,) = pair_of_replicas.recorder.completed
    assert context.replica_name == pair_of_replicas.first
    assert context.delivered.output_tokens == 12
    assert attempt_outcomes(pair_of_replicas.gateway, context) == [
        (False, "success"),
        (True, "ended"),
    ]
    assert count_hedges(pair_of_replicas.gateway) == {"false": 1}


async def test_disconnect_cancels_both_attempts(tokenizer: Tokenizer) -> None:
    async with hedged_pair(tokenizer, Script(list(TOKENS), pause_after=0)) as pair_of_replicas:
        request_body = body(PATHS[0], stream=True)
        task = asyncio.create_task(
            pair_of_replicas.gateway.client.post(PATHS[0], json=request_body)
        )
        await pair_of_replicas.hedge_sent.wait()
        task.cancel()
        for engine in pair_of_replicas.engines.values():
            await engine.wait_idle()
        await pair_of_replicas.recorder.completions.acquire()
    (context,) = pair_of_replicas.recorder.completed
    assert context.status == "cancelled"
    assert attempt_outcomes(pair_of_replicas.gateway, context) == [
        (False, "ended"),
        (True, "ended"),
    ]


@contextlib.asynccontextmanager
async def scripted_pair(
    recorder: RecordingFilter,
    first: UpstreamScript,
    second: UpstreamScript,
    *,
    later_script: UpstreamScript = respond_with_tokens,
    kind: BackendKind = "openai",
    timeouts: Timeouts = FAST_TIMEOUTS,
) -> AsyncIterator[tuple[GatewayHarness, list[FakeUpstream]]]:
    """Run a gateway in front of two OpenAI-compatible servers. The one that gets the request first runs `first`."""
    servers: list[FakeUpstream] = []

    async def script(request: UpstreamRequest) -> None:
        server = next(server for server in servers if request in server.requests)
        if len(server.requests) > 1:
            await later_script(request)
        else:
            await (first if is_first_choice(recorder, server.url) else second)(request)

    async with fake_upstream(script) as a, fake_upstream(script) as b:
        servers += (a, b)
        replica_configs = [
            ReplicaConfig(url=server.url, kind=kind, model="rough") for server in servers
        ]
        async with run_gateway(
            [recorder], *replica_configs, timeouts=timeouts, hedge_after_s=HEDGE_AFTER_S
        ) as gateway:
            yield gateway, servers


def in_flight(recorder: RecordingFilter) -> int:
    replicas: list[ReplicaEndpoint] = [*recorder.started[0].pool.replicas.values()]
    return sum(replica.load.in_flight for replica in replicas)


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
PREAMBLES = [
    b"",
    b": keep-alive\n\n",
    b"\n\n",
    b"data:\n\n",
    format_event(json.dumps(ROLE).encode()),
    format_event(b'{"choices": []}'),
]


@pytest.mark.parametrize("preamble", PREAMBLES)
async def test_stream_without_content_does_not_prevent_hedge(preamble: bytes) -> None:
    recorder, release = RecordingFilter(), asyncio.Event()

    async def start_without_content(request: UpstreamRequest) -> None:
        request.start_stream()
        if preamble:
            request.send_chunk(preamble)
        await release.wait()

    async with scripted_pair(recorder, start_without_content, respond_with_tokens) as (gateway, _):
        response = await gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True))
        release.set()
    assert events(response.content)[-1] == b"[DONE]"
    assert recorder.completed[0].delivered.output_tokens == 12
    assert count_hedges(gateway) == {"true": 1}


async def test_streams_without_content_time_out() -> None:
    recorder, release = RecordingFilter(), asyncio.Event()

    async def start_without_content(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_chunk(b": keep-alive\n\n")
        await release.wait()

    async with scripted_pair(
        recorder,
        start_without_content,
        start_without_content,
        later_script=start_without_content,
        timeouts=Timeouts(first_token_timeout_s=0.2, failover_timeout_s=0.1),
    ) as (gateway, _):
        response = await gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True))
        assert response.status_code == 502
        release.set()
    (context,) = recorder.completed
    assert attempt_outcomes(gateway, context)[:2] == [(False, "failure"), (True, "failure")]


@pytest.mark.parametrize("kind", ["openai", "vllm"])
async def test_first_replica_of_other_engine_may_still_win(kind: BackendKind) -> None:
    recorder, hedge_sent, release = RecordingFilter(), asyncio.Event(), asyncio.Event()

    async def first(request: UpstreamRequest) -> None:
        await hedge_sent.wait()
        await respond_with_tokens(request)

    async def second(_: UpstreamRequest) -> None:
        hedge_sent.set()
        await release.wait()

    async with scripted_pair(recorder, first, second, kind=kind) as (gateway, _):
        request_body = body(PATHS[1], stream=True, stream_options={"include_usage": True})
        response = await gateway.client.post(PATHS[1], json=request_body)
        release.set()
    chunks = [json.loads(chunk) for chunk in events(response.content)[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert recorder.completed[0].delivered.output_tokens == 12
    assert count_hedges(gateway) == {"false": 1}


async def test_content_is_not_repeated_if_winner_fails() -> None:
    recorder, hedge_sent, release = RecordingFilter(), asyncio.Event(), asyncio.Event()

    async def first(request: UpstreamRequest) -> None:
        await hedge_sent.wait()
        request.start_stream()
        request.send_text(" once", None)
        request.writer.close()

    async def second(_: UpstreamRequest) -> None:
        hedge_sent.set()
        await release.wait()

    async with scripted_pair(recorder, first, second) as (gateway, _):
        response = await gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True))
        release.set()
    once, error = map(json.loads, events(response.content))
    assert once["choices"][0]["text"] == " once"
    assert error["error"]["code"] == "upstream_failed"


async def test_failure_of_first_replica_leaves_request_to_hedge() -> None:
    recorder, hedge_sent = RecordingFilter(), asyncio.Event()

    async def fail(request: UpstreamRequest) -> None:
        request.start_stream()
        await hedge_sent.wait()
        request.writer.close()

    async def respond_late(request: UpstreamRequest) -> None:
        hedge_sent.set()
        await until(lambda: in_flight(recorder) == 1)
        await respond_with_tokens(request)

    async with scripted_pair(recorder, fail, respond_late) as (gateway, _):
        response = await gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True))
    assert events(response.content)[-1] == b"[DONE]"
    (context,) = recorder.completed
    assert attempt_outcomes(gateway, context) == [(False, "failure"), (True, "success")]
    assert (placement_of(context).failed_attempts, context.delivered.output_tokens) == (0, 12)
    assert count_hedges(gateway) == {"true": 1}


async def test_rejected_hedge_leaves_first_attempt_running() -> None:
    recorder, hedge_sent = RecordingFilter(), asyncio.Event()

    async def respond_late(request: UpstreamRequest) -> None:
        await hedge_sent.wait()
        await until(lambda: in_flight(recorder) == 1)
        await respond_with_tokens(request)

    async def reject(request: UpstreamRequest) -> None:
        request.send_json(503, {"error": {"message": "full"}})
        hedge_sent.set()

    async with scripted_pair(recorder, respond_late, reject) as (gateway, _):
        response = await gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True))
    assert events(response.content)[-1] == b"[DONE]"
    (context,) = recorder.completed
    assert attempt_outcomes(gateway, context) == [(False, "success"), (True, "backpressure")]
    assert count_hedges(gateway) == {"false": 1}
    assert placement_of(context).replica_losses == 0


async def test_request_is_retried_after_both_attempts_fail() -> None:
    recorder, hedge_sent = RecordingFilter(), asyncio.Event()

    async def fail(request: UpstreamRequest) -> None:
        request.start_stream()
        await hedge_sent.wait()
        request.writer.close()

    async def fail_second(request: UpstreamRequest) -> None:
        hedge_sent.set()
        await until(lambda: in_flight(recorder) == 1)
        request.start_stream()
        request.writer.close()

    async with scripted_pair(recorder, fail, fail_second) as (gateway, _):
        response = await gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True))
    assert events(response.content)[-1] == b"[DONE]"
    (context,) = recorder.completed
    outcomes = [(False, "failure"), (True, "failure"), (False, "success")]
    assert attempt_outcomes(gateway, context) == outcomes
    assert placement_of(context).replica_losses == 2


async def test_hedges_of_many_stuck_requests_are_limited_by_budget() -> None:
    recorder, release = RecordingFilter(), asyncio.Event()
    count = 30

    async def respond_late(request: UpstreamRequest) -> None:
        await release.wait()
        await respond_with_tokens(request)

    async def release_after_hedge() -> None:
        await until(lambda: sum(hedges_per_request(recorder)) > 0)
        release.set()

    async with scripted_pair(recorder, respond_late, respond_late, later_script=respond_late) as (
        gateway,
        servers,
    ):
        requests = [
            gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True)) for _ in range(count)
        ]
        release_task = asyncio.create_task(release_after_hedge())
        responses = await asyncio.gather(*requests)
        await release_task
        assert all(events(response.content)[-1] == b"[DONE]" for response in responses)
        request_count = sum(len(server.requests) for server in servers)
    hedge_count = sum(hedges_per_request(recorder))
    assert sum(count_hedges(gateway).values()) == hedge_count
    assert 0 < hedge_count <= HEDGE_RESERVE + HEDGE_RATIO * count
    assert count <= request_count <= count + hedge_count


def hedges_per_request(recorder: RecordingFilter) -> list[int]:
    return [
        sum(attempt.is_hedge for attempt in context.trace.attempts) for context in recorder.started
    ]
