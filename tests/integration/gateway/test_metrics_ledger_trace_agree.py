"""What is shown of a request is true: its attempts, its times and how it ended; and all of it agrees."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import Sglang, Vllm
from tests.support.fake_backend import Fault
from tests.support.fake_backend import running as listening
from tests.support.fake_engine import FakeEngine, Script, always
from tests.support.gateway_harness import Watching, front
from tests.support.limit_harness import request
from tests.support.metered_gateway import (
    CHATS,
    COMPLETIONS,
    PROMPT,
    STREAM,
    Books,
    books,
    kept,
)
from tests.support.replica_servers import MODEL, events, serve
from tests.support.scripted_server import Asked, rough_server
from tests.support.waiting import until

from argosy.engine.serving.core_messages import EngineRequest
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import QueueConfig, ReplicaConfig
from argosy.gateway.config import Timeouts
from argosy.gateway.filters.limit_filter import LimitFilter
from argosy.gateway.filters.telemetry_filter import TelemetryFilter
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import FilterState, RequestContext
from argosy.gateway.request_trace import ExplainConfig, TraceStore
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Limit, UsageRecord, create_quota_backend
from argosy.telemetry import GatewayGauges, GatewayMetrics

# --- attempts ------------------------------------------------------------------------------------


async def test_a_stream_is_carried_on_by_who_gave_more_of_it(tmp_path: Path) -> None:
    one, two = Vllm("one"), Vllm("two")
    async with listening(one, two), books(tmp_path, one.url, two.url) as here:
        one.faults += [Fault("die", 4), Fault("refuse", status=500)]
        await here.ask(prompt="Tell me", **STREAM)
        told = here.told(await here.agree())
        assert [tried["carried_on_at"] for tried in told["attempts"]] == [0, 4, 4]
        assert await here.count("failovers_total") == 1
        assert await here.count("retries_total") == 1


async def test_a_whole_answer_that_begins_anew_is_a_retry(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    engine = FakeEngine(tokenizer, always(Script([100, 101, 102], crash=RuntimeError("broken"))))
    double = Vllm()
    async with serve(engine) as served, listening(double):
        behind = ReplicaConfig(url=served.url, model=MODEL), ReplicaConfig(url=double.url)
        async with kept(tmp_path, *behind) as here:
            tried: list[Any] = []
            while len(tried) < 2:  # in turn, so the second at the latest
                await here.ask()
                tried = here.told(here.row())["attempts"]
            assert [one["carried_on_at"] for one in tried] == [0, 0]
            assert await here.count("failovers_total") == 0
            assert await here.count("retries_total") == 1


# --- times ---------------------------------------------------------------------------------------


async def test_an_answer_that_comes_whole_came_before_its_attempt_ended(tmp_path: Path) -> None:
    double = Vllm()
    async with listening(double), books(tmp_path, double.url) as here:
        await here.ask()
        told = here.told(await here.agree())
        ms, (tried,) = told["ms"], told["attempts"]
        times = [ms["read"], ms["admitted"], tried["chosen_ms"], tried["sent_ms"]]
        times += [ms["first_token"], ms["last_token"], tried["ended_ms"], ms["ended"]]
        assert times == sorted(times)
        assert tried["first_token_ms"] == ms["first_token"]


async def test_a_request_began_when_it_came_however_slowly_its_body_did(tmp_path: Path) -> None:
    slow_s = 0.3

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "big", "max_tokens": 3, '
        await asyncio.sleep(slow_s)
        yield b'"prompt": "Tell me"}'

    double = Vllm()
    async with listening(double), books(tmp_path, double.url) as here:
        before = time.time()
        await here.running.client.post(COMPLETIONS, content=body())
        row = await here.agree()
        told = here.told(row)
        assert before <= row.started_at == told["started_at"] < before + slow_s
        assert told["started_at"] + told["ms"]["ended"] / 1000 == pytest.approx(
            row.ended_at, abs=0.1
        )
        assert row.ended_at - row.started_at >= slow_s


async def test_who_waits_in_vain_has_waited(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(asked: Asked) -> None:
        asked.stream()
        asked.say("a")
        await go_on.wait()
        asked.end()

    queue = QueueConfig(timeout_s=0.2)
    async with rough_server(script) as rough, books(tmp_path, rough.url, queue=queue) as here:
        first = asyncio.create_task(here.ask(**STREAM))
        await until(lambda: bool(rough.asked))
        assert "no free slot within" in await here.ask(**STREAM)
        assert await here.count("queue_seconds_count") == 1
        assert await here.count("queue_seconds_sum") > 0.1
        go_on.set()
        await first
        assert await here.count("queue_seconds_count") == 2


# --- how it ended --------------------------------------------------------------------------------


async def test_a_limit_that_let_a_request_in_did_not_refuse_it() -> None:
    limits = LimitFilter(create_quota_backend(None))
    limit = Limit(
        id="l", owner_kind="project", owner="", unit="requests", amount=9, window="minute"
    )
    limits.apply_snapshot(AccountSnapshot(limits=(limit,)))
    full = Watching(refuses=ApiError(503, "ledger_full", "Try again later."))
    async with (
        rough_server() as rough,
        front([limits, full], ReplicaConfig(url=rough.url)) as running,
    ):
        body = {"model": "big", "prompt": PROMPT}
        answer = await running.client.post(COMPLETIONS, json=body)
        assert answer.json()["error"]["code"] == "ledger_full"
        assert "limit_rejections_total{" not in (await running.client.get("/metrics")).text


async def test_an_error_of_ours_is_a_request_without_an_answer_too() -> None:
    class Broken(Watching):
        async def on_request(self, context: RequestContext) -> FilterState:
            raise RuntimeError("a bug")

    async with rough_server() as rough, front([Broken()], ReplicaConfig(url=rough.url)) as running:
        body = {"model": "big", "prompt": PROMPT}
        answer = await running.client.post(COMPLETIONS, json=body)
        assert answer.json()["error"]["code"] == "internal_error"
        text = (await running.client.get("/metrics")).text
        trace = running.traces.find(answer.headers["x-argosy-request"])
    unanswered = "argosy_gateway_request_errors_total"
    assert f'{unanswered}{{code="internal_error",model="big"}} 1.0' in text
    assert trace is not None
    assert (trace.status, trace.error_code) == ("failed", "internal_error")


async def test_a_request_that_its_replica_refuses_says_so_in_the_log() -> None:
    async def script(asked: Asked) -> None:
        asked.json(400, {"error": {"message": "no"}})

    async with rough_server(script) as rough, front([], ReplicaConfig(url=rough.url)) as running:
        with capture_logs() as logs:
            await running.client.post(COMPLETIONS, json={"model": "big", "prompt": PROMPT})
    (line,) = [line for line in logs if line["event"] == "request"]
    assert (line["status"], line["error"]) == (400, "refused_by_replica")


async def test_why_each_choice_ended_is_told_of_an_answer_that_came_whole(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        reasons = ["stop", None, "length"]
        asked.json(200, {"choices": [{"text": "a", "finish_reason": why} for why in reasons]})

    async with rough_server(script) as rough, books(tmp_path, rough.url) as here:
        await here.ask(n=3)
        assert here.told(here.row())["finish_reasons"] == {"0": "stop", "2": "length"}


@pytest.mark.parametrize(
    "more",
    [{"stream": True}, {"stream": False}, {"prompt_logprobs": 1}],
    ids=["streamed", "gathered", "whole"],
)
async def test_an_answer_that_its_replica_ends_for_its_deadline_was_stopped(
    tmp_path: Path, tokenizer: Tokenizer, more: dict[str, Any]
) -> None:
    engine = FakeEngine(tokenizer, always(Script([100, 101], finish="timeout")))
    async with (
        serve(engine) as served,
        kept(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as here,
    ):
        await here.ask(**more)
        row = await here.agree()
        told = here.told(row)
        assert (row.status, told["status"]) == ("stopped", "stopped")
        assert told["finish_reasons"] == {"0": "timeout"}


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_that_the_client_gave_itself_are_not_delivered(
    tmp_path: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    engine = FakeEngine(tokenizer, always(Script([*range(100, 108)], finish="length")))
    async with (
        serve(engine) as served,
        kept(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as here,
    ):
        resume = {"token_ids": [*range(100, 105)]}
        await here.ask(stream=stream, resume=resume, max_tokens=8)
        assert (await here.agree()).output_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_tokens_that_the_client_gave_itself_are_read_as_its_prompt_is(
    tmp_path: Path, tokenizer: Tokenizer, stream: bool, n: int
) -> None:
    """Whole prompts that came as these cost nothing."""
    engine = FakeEngine(tokenizer, always(Script([*range(100, 108)], finish="length")))
    async with (
        serve(engine) as served,
        kept(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as here,
    ):
        await here.ask(stream=stream, n=n, max_tokens=8)
        prompt = here.row().input_tokens
        given = [[*range(100, 105)]] * n
        await here.ask(stream=stream, n=n, resume={"token_ids": given}, max_tokens=8)
        row = here.row()
        assert (row.input_tokens, row.output_tokens) == (prompt + 5 * n, 3 * n)


def told_cached(text: str) -> list[int]:
    """The cached tokens of each usage in a stream."""
    chunks = [json.loads(data) for data in events(text.encode())[:-1]]
    usage = [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]
    return [one["prompt_tokens_details"]["cached_tokens"] for one in usage]


@pytest.mark.parametrize("each", [True, False])
async def test_a_seam_changes_nothing_of_what_was_cached(
    tmp_path: Path, tokenizer: Tokenizer, each: bool
) -> None:
    dying = FakeEngine(tokenizer, always(Script([100, 101], crash=RuntimeError("broken"))))
    other = FakeEngine(tokenizer, always(Script([*range(100, 106)])), cached=1)
    options = {"include_usage": True, "continuous_usage_stats": each}
    async with serve(dying) as one, serve(other) as two:
        behind = [ReplicaConfig(url=served.url, model=MODEL) for served in (one, two)]
        async with kept(tmp_path, *behind) as here:
            while not dying.requests:  # in turn, so the second at the latest
                text = await here.ask(stream=True, stream_options=options)
                row = here.row()
            assert [tried["carried_on_at"] for tried in here.told(row)["attempts"]] == [0, 2]
            assert (row.cached_tokens, set(told_cached(text))) == (3, {3})


async def test_what_was_cached_of_each_prompt_counts_whenever_it_begins(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def script(request: EngineRequest) -> Script:
        last = len(engine.requests) == 2
        return Script([100, 101], pause_after=0 if last else None)

    engine = FakeEngine(tokenizer, script)
    async with (
        serve(engine) as served,
        kept(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as here,
    ):
        body = {"model": "big", "prompt": ["Tell me a story", "Sing me a song"]} | STREAM
        text = ""
        async with here.running.client.stream("POST", COMPLETIONS, json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                engine.go_on.set()
        row = await here.agree()
        assert (row.cached_tokens, told_cached(text)) == (6, [6])


async def test_who_has_no_project_counts_for_their_organisation() -> None:
    metrics = GatewayMetrics()
    recorder = TelemetryFilter(TraceStore(ExplainConfig()), metrics, lambda: 1.0)
    for organisation in ("acme", "zeta"):
        context = request(Principal(organisation=organisation))
        context.exchange = Mock(spec=HttpExchange, request_id="r", path=COMPLETIONS)
        recording = await recorder.on_request(context)
        recording.on_complete()
    shown = metrics.exposition(GatewayGauges()).decode()
    for organisation in ("acme", "zeta"):
        assert f'requests_total{{model="big",status="failed",tenant="{organisation}"}} 1.0' in shown


# --- all of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """What a client got of one request."""

    id: str
    body: dict[str, Any]
    status: int | None
    """None: it left."""
    text: str = ""

    @property
    def usage(self) -> tuple[int, int] | None:
        """Tokens of the prompt and of the answer, where the client was told."""
        if self.status != 200 or (self.body["stream"] and "[DONE]" not in self.text):
            return None
        told = [self.text]
        if self.body["stream"]:
            told = [line.removeprefix("data: ") for line in self.text.split("\n\n")][:-2]
        usage = [json.loads(one)["usage"] for one in told if '"usage"' in one][-1]
        return usage["prompt_tokens"], usage["completion_tokens"]


async def some_request(here: Books, chance: random.Random, number: int) -> Answered:
    """One like those that people send, of whom some leave."""
    prompt: dict[str, Any] = {"prompt": "Tell me"}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}]}
    path, asked = chance.choice([(COMPLETIONS, prompt), (CHATS, chat)])
    most = chance.choice([1, 30, 200])
    body = {"model": "big", "max_tokens": most, "stream": False} | asked
    body |= STREAM if chance.random() < 0.6 else {}
    body |= {"n": 2} if chance.random() < 0.2 else {}
    body |= {"timeout_s": chance.choice([0.01, 0.2])} if chance.random() < 0.15 else {}
    name, leaves_s = f"r{number}", chance.choice([None, None, None, 0.01, 0.1])
    try:
        async with asyncio.timeout(leaves_s):
            answer = await here.running.client.post(path, json=body, headers={"x-request-id": name})
    except TimeoutError:
        return Answered(name, body, None)
    return Answered(name, body, answer.status_code, answer.text)


@pytest.mark.parametrize("seed", range(3))
async def test_all_numbers_agree_whatever_happens(
    tmp_path: Path, tokenizer: Tokenizer, seed: int
) -> None:
    chance = random.Random(seed)

    def script(_: object) -> Script:
        tokens = [*range(100, 130)] * chance.choice([1, 10])
        if chance.random() < 0.1:
            return Script(tokens[: chance.randrange(6)], crash=RuntimeError("broken"))
        return Script(tokens, finish="length")

    engine, doubles = FakeEngine(tokenizer, script), (Vllm("one"), Sglang("two"))
    timeouts = Timeouts(
        first_token_timeout_s=1.0, stream_idle_timeout_s=1.0, failover_timeout_s=0.5
    )
    async with serve(engine) as served, listening(*doubles):
        behind = [ReplicaConfig(url=double.url) for double in doubles]
        ours = ReplicaConfig(url=served.url, model=MODEL)
        async with kept(tmp_path, ours, *behind, timeouts=timeouts, hedge_after_s=0.1) as here:
            got: list[Answered] = []
            for lap in range(4):
                kinds: list[Any] = ["die", "stall", "error", "abort", "refuse"]
                doubles[0].faults += [Fault(kind, chance.randrange(5)) for kind in kinds[: lap + 2]]
                asks = [some_request(here, chance, lap * 15 + number) for number in range(15)]
                got += await asyncio.gather(*asks)
            await here.running.idle()
            rows: dict[str, UsageRecord] = {}
            here.spool.drain(lambda some: rows.update({row.request: row for row in some}))
            sums = Counter[str]()
            for answered in got:
                trace = here.running.traces.find(answered.id)
                if trace is None:  # left before it had come
                    continue
                row, told = rows.pop(trace.response_id), trace.to_dict()
                sums.update(
                    input=row.input_tokens - row.cached_tokens,
                    cached=row.cached_tokens,
                    output=row.output_tokens,
                    cost=row.nano_dollars,
                    **{told["status"]: 1},
                )
                tokens = row.input_tokens, row.cached_tokens, row.output_tokens
                assert tuple(told["tokens"].values()) == tokens
                assert answered.usage in {None, (row.input_tokens, row.output_tokens)}
                assert row.status == told["status"]
                assert row.output_tokens or row.status == "completed" or not row.nano_dollars
            assert not rows
            for kind in ("input", "cached", "output"):
                assert await here.count("tokens_total", kind=kind) == sums[kind]
            assert round(await here.count("cost_dollars_total") * 1e9) == sums["cost"]
            for status in ("completed", "stopped", "cancelled", "refused", "failed"):
                assert await here.count("requests_total", status=status) == sums[status]
