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

from argosy.deployment import ReplicaConfig, Timeouts
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import RequestContext
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


@pytest.mark.parametrize(
    ("path", "stream", "is_second_silent"),
    [
        (PATHS[0], True, False),
        (PATHS[1], False, False),
        (PATHS[1], True, True),
        (PATHS[1], False, True),
    ],
)
async def test_first_content_wins_and_the_other_attempt_is_cancelled(
    tokenizer: Tokenizer, path: str, stream: bool, is_second_silent: bool
) -> None:
    second_script = Script(
        list(TOKENS), finish="length", pause_after=0 if is_second_silent else None
    )
    async with hedged_pair(tokenizer, second_script) as pair:
        request_body = body(path, stream=stream, return_token_ids=True)
        task = asyncio.create_task(pair.gateway.client.post(path, json=request_body))
        await pair.hedge_sent.wait()
        winner, loser = pair.second, pair.first
        if is_second_silent:
            winner, loser = loser, winner
            pair.engines[winner].may_continue.set()
        response = await task
        assert response.status_code == 200, response.text
        assert token_ids(response.content, stream) == TOKENS
        await pair.engines[loser].wait_idle()
        assert pair.engines[loser].aborted
        assert not pair.engines[winner].aborted
    (context,) = pair.recorder.completed
    assert context.status == "completed"
    assert pair.recorder.token_counts == sorted(set(pair.recorder.token_counts))
    assert context.delivered.output_tokens == 12
    assert context.replica_name == winner
    outcomes = ["success", "ended"] if is_second_silent else ["ended", "success"]
    assert attempt_outcomes(pair.gateway, context) == [(False, outcomes[0]), (True, outcomes[1])]
    assert count_hedges(pair.gateway) == {"false" if is_second_silent else "true": 1}
    assert all(replica.health.breaker.is_closed for replica in context.pool.replicas.values())


async def test_disconnect_cancels_both_attempts(tokenizer: Tokenizer) -> None:
    async with hedged_pair(tokenizer, Script(list(TOKENS), pause_after=0)) as pair:
        request_body = body(PATHS[0], stream=True)
        task = asyncio.create_task(pair.gateway.client.post(PATHS[0], json=request_body))
        await pair.hedge_sent.wait()
        task.cancel()
        for engine in pair.engines.values():
            await engine.wait_idle()
        await pair.recorder.completions.acquire()
    (context,) = pair.recorder.completed
    assert context.status == "cancelled"
    assert attempt_outcomes(pair.gateway, context) == [
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
            ReplicaConfig(url=server.url, kind="openai", model="rough") for server in servers
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


class Race:
    """Scripts of the replica that gets the request first, and of the one that gets its hedge."""

    def __init__(self) -> None:
        self.recorder = RecordingFilter()
        self.hedge_sent = asyncio.Event()
        self.release = asyncio.Event()

    async def run(self, first: str, second: str) -> tuple[GatewayHarness, list[bytes]]:
        """Send a streaming request, and return the events of its response."""

        async def run_second(request: UpstreamRequest) -> None:
            self.hedge_sent.set()
            await getattr(self, second)(request)

        async with scripted_pair(self.recorder, getattr(self, first), run_second) as (gateway, _):
            response = await gateway.client.post(PATHS[1], json=body(PATHS[1], stream=True))
            self.release.set()
        return gateway, events(response.content)

    async def respond(self, request: UpstreamRequest) -> None:
        await self.hedge_sent.wait()
        await respond_with_tokens(request)

    async def respond_last(self, request: UpstreamRequest) -> None:
        await self._wait_until_alone()
        await respond_with_tokens(request)

    async def fail(self, request: UpstreamRequest) -> None:
        request.start_stream()
        await self.hedge_sent.wait()
        request.writer.close()

    async def fail_last(self, request: UpstreamRequest) -> None:
        await self._wait_until_alone()
        await self.fail(request)

    async def fail_after_text(self, request: UpstreamRequest) -> None:
        await self.hedge_sent.wait()
        request.start_stream()
        request.send_text(" once", None)
        request.writer.close()

    async def reject(self, request: UpstreamRequest) -> None:
        request.send_json(503, {"error": {"message": "full"}})

    async def hang(self, _: UpstreamRequest) -> None:
        await self.release.wait()

    async def _wait_until_alone(self) -> None:
        await self.hedge_sent.wait()
        await until(lambda: in_flight(self.recorder) == 1)


@pytest.mark.parametrize(
    ("first", "second", "outcomes", "won", "losses"),
    [
        ("respond", "hang", [(False, "success"), (True, "ended")], "false", (0, 0)),
        ("fail", "respond_last", [(False, "failure"), (True, "success")], "true", (0, 1)),
        ("respond_last", "reject", [(False, "success"), (True, "backpressure")], "false", (0, 0)),
        (
            *("fail", "fail_last", [(False, "failure"), (True, "failure"), (False, "success")]),
            *("false", (1, 2)),
        ),
    ],
)
async def test_request_completes_whichever_attempt_fails(
    first: str, second: str, outcomes: list[tuple[bool, str]], won: str, losses: tuple[int, int]
) -> None:
    race = Race()
    gateway, response = await race.run(first, second)
    assert response[-1] == b"[DONE]"
    (context,) = race.recorder.completed
    assert context.delivered.output_tokens == 12
    assert attempt_outcomes(gateway, context) == outcomes
    assert count_hedges(gateway) == {won: 1}
    placement = placement_of(context)
    assert (placement.failed_attempts, placement.replica_losses) == losses


async def test_content_is_not_repeated_if_winner_fails() -> None:
    _, response = await Race().run("fail_after_text", "hang")
    once, error = map(json.loads, response)
    assert once["choices"][0]["text"] == " once"
    assert error["error"]["code"] == "upstream_failed"
