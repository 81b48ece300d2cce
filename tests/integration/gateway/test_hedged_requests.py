"""A replica that is silent is raced by a second one; whose first piece comes first answers, and the other is let go."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import QUICK, Running, Watching, front
from tests.support.replica_servers import MODEL, completion, events, serve
from tests.support.scripted_server import Answer, Asked, Rough, plain, rough_server
from tests.support.waiting import until

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig, Timeouts
from argosy.gateway.backends import BackendKind
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.request_context import RequestContext
from argosy.policy.hedging import HEDGE_RATIO, HEDGE_RESERVE
from argosy.protocol import format_event
from argosy.telemetry import GatewayGauges

TOKENS = list(range(100, 112))
SOON_S = 0.01
PATHS = ("/v1/chat/completions", "/v1/completions")


def body(path: str, **extra: object) -> dict[str, Any]:
    if path == PATHS[0]:
        messages = [{"role": "user", "content": "Hi"}]
        return {"model": "big", "messages": messages, "max_tokens": 12} | extra
    return completion("Once", max_tokens=12) | {"model": "big"} | extra


def was_first(watching: Watching, name: str) -> bool:
    """Whether it is the replica that the first request was placed on."""
    return watching.entered[0].trace.attempts[0].replica == name


@dataclass
class Pair:
    """Two replicas of ours; the one that a request is placed on is silent."""

    running: Running
    watching: Watching
    engines: dict[str, FakeEngine]
    hedged: asyncio.Event
    """Set when the other one was asked."""

    @property
    def first(self) -> str:
        """Name of the one that it was placed on."""
        return next(name for name in self.engines if was_first(self.watching, name))

    @property
    def second(self) -> str:
        """Name of the other one."""
        return next(name for name in self.engines if name != self.first)


@contextlib.asynccontextmanager
async def pair(tokenizer: Tokenizer, second: Script) -> AsyncIterator[Pair]:
    """In front of two engines; the one that is asked second answers so."""
    hedged, watching = asyncio.Event(), Watching()

    def script(name: str) -> Script:
        if was_first(watching, name):
            return Script(list(TOKENS), finish="length", pause_after=0)
        hedged.set()
        return second

    engines = {
        "a": FakeEngine(tokenizer, lambda _: script("a")),
        "b": FakeEngine(tokenizer, lambda _: script("b")),
    }
    async with (
        serve(engines["a"]) as a,
        serve(engines["b"]) as b,
        front(
            [watching],
            ReplicaConfig(url=a.url, name="a", model=MODEL),
            ReplicaConfig(url=b.url, name="b", model=MODEL),
            hedge_after_s=SOON_S,
        ) as running,
    ):
        yield Pair(running, watching, engines, hedged)


def hedges(running: Running) -> dict[str, float]:
    """How many hedges there were, by whether they won."""
    shown = running.metrics.exposition(GatewayGauges()).decode().splitlines()
    name = 'argosy_gateway_hedges_total{model="big",won="'
    told = (line.removeprefix(name).split('"} ') for line in shown if line.startswith(name))
    return {won: float(count) for won, count in told}


def attempts(running: Running, context: RequestContext) -> list[tuple[bool, str]]:
    """Was it a hedge, and how did it end: of each attempt that the explanation shows."""
    trace = running.traces.find(context.response_id)
    assert trace is not None
    return [(tried["hedge"], tried["outcome"]) for tried in trace.to_dict()["attempts"]]


def told_ids(content: bytes, stream: bool) -> list[int]:
    chunks = [json.loads(c) for c in events(content)[:-1]] if stream else [json.loads(content)]
    return [i for chunk in chunks for one in chunk["choices"] for i in one.get("token_ids") or ()]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_second_replica_answers_for_one_that_is_silent(
    tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    async with pair(tokenizer, Script(list(TOKENS), finish="length")) as two:
        asked = body(path, stream=stream, return_token_ids=True)
        answer = await two.running.client.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        assert told_ids(answer.content, stream) == TOKENS
        silent, quick = two.engines[two.first], two.engines[two.second]
        await silent.nothing_runs()
        assert silent.aborted
        assert not quick.aborted
    (context,) = two.watching.left
    assert context.status == "completed"
    assert two.watching.counts == sorted(set(two.watching.counts))
    assert context.delivered.output_tokens == 12
    assert context.replica_name == two.second
    assert attempts(two.running, context) == [(False, "ended"), (True, "success")]
    assert hedges(two.running) == {"true": 1}
    assert all(replica.breaker.is_closed for replica in context.pool.replicas.values())


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_replica_may_be_first_after_all(tokenizer: Tokenizer, stream: bool) -> None:
    async with pair(tokenizer, Script(list(TOKENS), finish="length", pause_after=0)) as two:
        asked = body(PATHS[1], stream=stream, return_token_ids=True)
        asking = asyncio.create_task(two.running.client.post(PATHS[1], json=asked))
        await two.hedged.wait()
        first, second = two.engines[two.first], two.engines[two.second]
        first.go_on.set()
        answer = await asking
        assert told_ids(answer.content, stream) == TOKENS
        await second.nothing_runs()
        assert second.aborted
        assert not first.aborted
    (context,) = two.watching.left
    assert context.replica_name == two.first
    assert context.delivered.output_tokens == 12
    assert attempts(two.running, context) == [(False, "success"), (True, "ended")]
    assert hedges(two.running) == {"false": 1}


async def test_a_client_that_leaves_ends_both(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer, Script(list(TOKENS), pause_after=0)) as two:
        asked = body(PATHS[0], stream=True)
        asking = asyncio.create_task(two.running.client.post(PATHS[0], json=asked))
        await two.hedged.wait()
        asking.cancel()
        for engine in two.engines.values():
            await engine.nothing_runs()
        await two.watching.gone.acquire()
    (context,) = two.watching.left
    assert context.status == "cancelled"
    assert attempts(two.running, context) == [(False, "ended"), (True, "ended")]


@contextlib.asynccontextmanager
async def others(
    watching: Watching,
    first: Answer,
    second: Answer,
    *,
    later: Answer = plain,
    kind: BackendKind = "openai",
    timeouts: Timeouts = QUICK,
) -> AsyncIterator[tuple[Running, list[Rough]]]:
    """In front of two servers of another kind: the one that a request is placed on answers as `first`."""
    servers: list[Rough] = []

    async def script(asked: Asked) -> None:
        server = next(one for one in servers if asked in one.asked)
        if len(server.asked) > 1:
            await later(asked)
        else:
            await (first if was_first(watching, server.url) else second)(asked)

    async with rough_server(script) as a, rough_server(script) as b:
        servers += (a, b)
        behind = [ReplicaConfig(url=one.url, kind=kind, model="rough") for one in servers]
        async with front([watching], *behind, timeouts=timeouts, hedge_after_s=SOON_S) as running:
            yield running, servers


def in_flight(watching: Watching) -> int:
    replicas: list[ReplicaEndpoint] = [*watching.entered[0].pool.replicas.values()]
    return sum(replica.load.in_flight for replica in replicas)


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
EMPTY = [
    b"",
    b": keep-alive\n\n",
    b"\n\n",
    b"data:\n\n",
    format_event(json.dumps(ROLE).encode()),
    format_event(b'{"choices": []}'),
]


@pytest.mark.parametrize("beginning", EMPTY)
async def test_the_head_of_a_stream_is_no_sign_of_an_answer(beginning: bytes) -> None:
    watching, over = Watching(), asyncio.Event()

    async def nothing_yet(asked: Asked) -> None:
        asked.stream()
        if beginning:
            asked.send(beginning)
        await over.wait()

    async with others(watching, nothing_yet, plain) as (running, _):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True))
        over.set()
    assert events(answer.content)[-1] == b"[DONE]"
    assert watching.left[0].delivered.output_tokens == 12
    assert hedges(running) == {"true": 1}


async def test_heads_that_nothing_follows_are_too_late() -> None:
    watching, over = Watching(), asyncio.Event()

    async def nothing_more(asked: Asked) -> None:
        asked.stream()
        asked.send(b": keep-alive\n\n")
        await over.wait()

    async with others(
        watching,
        nothing_more,
        nothing_more,
        later=nothing_more,
        timeouts=Timeouts(first_token_timeout_s=0.2, failover_timeout_s=0.1),
    ) as (running, _):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True))
        assert answer.status_code == 502
        over.set()
    (context,) = watching.left
    assert attempts(running, context)[:2] == [(False, "failure"), (True, "failure")]


@pytest.mark.parametrize("kind", ["openai", "vllm"])
async def test_a_server_of_another_kind_may_be_first_after_all(kind: BackendKind) -> None:
    watching, hedged, over = Watching(), asyncio.Event(), asyncio.Event()

    async def first(asked: Asked) -> None:
        await hedged.wait()
        await plain(asked)

    async def second(_: Asked) -> None:
        hedged.set()
        await over.wait()

    async with others(watching, first, second, kind=kind) as (running, _):
        asked = body(PATHS[1], stream=True, stream_options={"include_usage": True})
        answer = await running.client.post(PATHS[1], json=asked)
        over.set()
    told = [json.loads(chunk) for chunk in events(answer.content)[:-1]]
    assert told[-1]["usage"]["completion_tokens"] == 12
    assert watching.left[0].delivered.output_tokens == 12
    assert hedges(running) == {"false": 1}


async def test_what_the_first_told_after_all_is_not_told_again_when_it_dies() -> None:
    watching, hedged, over = Watching(), asyncio.Event(), asyncio.Event()

    async def first(asked: Asked) -> None:
        await hedged.wait()
        asked.stream()
        asked.say(" once", None)
        asked.writer.close()

    async def second(_: Asked) -> None:
        hedged.set()
        await over.wait()

    async with others(watching, first, second) as (running, _):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True))
        over.set()
    once, error = map(json.loads, events(answer.content))
    assert once["choices"][0]["text"] == " once"
    assert error["error"]["code"] == "upstream_failed"


async def test_a_replica_that_dies_while_another_is_asked_fails_and_the_other_answers() -> None:
    watching, hedged = Watching(), asyncio.Event()

    async def dies(asked: Asked) -> None:
        asked.stream()
        await hedged.wait()
        asked.writer.close()

    async def answers(asked: Asked) -> None:
        hedged.set()
        await until(lambda: in_flight(watching) == 1)
        await plain(asked)

    async with others(watching, dies, answers) as (running, _):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True))
    assert events(answer.content)[-1] == b"[DONE]"
    (context,) = watching.left
    assert attempts(running, context) == [(False, "failure"), (True, "success")]
    assert (context.failed_attempts, context.delivered.output_tokens) == (0, 12)
    assert hedges(running) == {"true": 1}


async def test_a_hedge_that_is_refused_leaves_the_first_as_it_was() -> None:
    watching, hedged = Watching(), asyncio.Event()

    async def waits(asked: Asked) -> None:
        await hedged.wait()
        await until(lambda: in_flight(watching) == 1)
        await plain(asked)

    async def is_full(asked: Asked) -> None:
        asked.json(503, {"error": {"message": "full"}})
        hedged.set()

    async with others(watching, waits, is_full) as (running, _):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True))
    assert events(answer.content)[-1] == b"[DONE]"
    (context,) = watching.left
    assert attempts(running, context) == [(False, "success"), (True, "backpressure")]
    assert hedges(running) == {"false": 1}
    assert context.replica_losses == 0


async def test_when_both_fail_the_request_is_tried_again() -> None:
    watching, hedged = Watching(), asyncio.Event()

    async def dies(asked: Asked) -> None:
        asked.stream()
        await hedged.wait()
        asked.writer.close()

    async def dies_too(asked: Asked) -> None:
        hedged.set()
        await until(lambda: in_flight(watching) == 1)
        asked.stream()
        asked.writer.close()

    async with others(watching, dies, dies_too) as (running, _):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True))
    assert events(answer.content)[-1] == b"[DONE]"
    (context,) = watching.left
    ends = [(False, "failure"), (True, "failure"), (False, "success")]
    assert attempts(running, context) == ends
    assert context.replica_losses == 2


async def test_many_that_are_stuck_at_once_get_no_more_hedges_than_the_budget_has() -> None:
    watching, over = Watching(), asyncio.Event()
    count = 30

    async def slow(asked: Asked) -> None:
        await over.wait()
        await plain(asked)

    async def released() -> None:
        await until(lambda: sum(hedges_begun(watching)) > 0)
        over.set()

    async with others(watching, slow, slow, later=slow) as (running, servers):
        asking = [
            running.client.post(PATHS[1], json=body(PATHS[1], stream=True)) for _ in range(count)
        ]
        releasing = asyncio.create_task(released())
        answers = await asyncio.gather(*asking)
        await releasing
        assert all(events(answer.content)[-1] == b"[DONE]" for answer in answers)
        asked = sum(len(server.asked) for server in servers)
    begun = sum(hedges_begun(watching))
    assert sum(hedges(running).values()) == begun
    assert 0 < begun <= HEDGE_RESERVE + HEDGE_RATIO * count
    assert count <= asked <= count + begun


def hedges_begun(watching: Watching) -> list[int]:
    return [sum(tried.is_hedge for tried in context.trace.attempts) for context in watching.entered]
