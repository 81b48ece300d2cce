"""Usage log, metrics and trace of a request agree with each other and with the client's response."""

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

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import Sglang, Vllm
from tests.support.fake_backend import Fault, serve_backends
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.metered_gateway import (
    CHATS,
    COMPLETIONS,
    PRICE,
    PROMPT,
    STREAM,
    MeteredGateway,
    run_gateway_before,
    run_metered_gateway,
)
from tests.support.replica_servers import MODEL, events, serve
from tests.support.waiting import until

from argosy.deployment import QueueConfig, ReplicaConfig, Timeouts
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.filters import LimitFilter
from argosy.gateway.request_context import RequestContext
from argosy.protocol import ApiError, format_event
from argosy.store import AccountSnapshot, Limit, UsageRecord, create_quota_backend

# --- attempts ------------------------------------------------------------------------------------


async def test_resumed_stream_lists_attempts_with_resume_offsets(tmp_path: Path) -> None:
    one, two = Vllm(), Vllm()
    async with serve_backends(one, two), run_metered_gateway(tmp_path, one.url, two.url) as metered:
        one.faults += [Fault("disconnect", 4), Fault("reject", status=500)]
        await metered.post(prompt="Tell me", **STREAM)
        trace = metered.trace_dict(await metered.assert_consistent())
        assert [attempts["carried_on_at"] for attempts in trace["attempts"]] == [0, 4, 4]
        assert await metered.metric_sum("failovers_total") == 1
        assert await metered.metric_sum("retries_total") == 1


async def test_restarted_whole_response_counts_as_retry(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    engine = FakeEngine(
        tokenizer, constant_script(Script([100, 101, 102], crash=RuntimeError("broken")))
    )
    backend = Vllm()
    async with serve(engine) as server, serve_backends(backend):
        replica_configs = ReplicaConfig(url=server.url, model=MODEL), ReplicaConfig(url=backend.url)
        async with run_gateway_before(tmp_path, *replica_configs) as metered:
            attempts: list[Any] = []
            while len(attempts) < 2:  # round-robin, so the second request at the latest
                await metered.post()
                attempts = metered.trace_dict(metered.usage_record())["attempts"]
            assert [attempt["carried_on_at"] for attempt in attempts] == [0, 0]
            assert await metered.metric_sum("failovers_total") == 0
            assert await metered.metric_sum("retries_total") == 1


# --- times ---------------------------------------------------------------------------------------


async def test_request_starts_at_first_byte_of_slow_body(tmp_path: Path) -> None:
    body_delay_s = 0.3

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "big", "max_tokens": 3, '
        await asyncio.sleep(body_delay_s)
        yield b'"prompt": "Tell me"}'

    backend = Vllm()
    async with serve_backends(backend), run_metered_gateway(tmp_path, backend.url) as metered:
        sent_at = time.time()
        await metered.running.client.post(COMPLETIONS, content=body())
        record = await metered.assert_consistent()
        trace = metered.trace_dict(record)
        assert sent_at <= record.started_at == trace["started_at"] < sent_at + body_delay_s
        assert trace["started_at"] + trace["ms"]["ended"] / 1000 == pytest.approx(
            record.ended_at, abs=0.1
        )
        assert record.ended_at - record.started_at >= body_delay_s


async def test_queue_timeout_counts_as_queue_time(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("a")
        await release.wait()
        request.end_stream()

    queue = QueueConfig(timeout_s=0.2)
    async with (
        fake_upstream(script) as upstream,
        run_metered_gateway(tmp_path, upstream.url, queue=queue) as metered,
    ):
        first = asyncio.create_task(metered.post(**STREAM))
        await until(lambda: bool(upstream.requests))
        assert "no free slot within" in await metered.post(**STREAM)
        assert await metered.metric_sum("queue_seconds_count") == 1
        assert await metered.metric_sum("queue_seconds_sum") > 0.1
        release.set()
        await first
        assert await metered.metric_sum("queue_seconds_count") == 2


# --- how it ended --------------------------------------------------------------------------------


COMPLETION_ANSWER = {"choices": [{"index": 0, "text": "a story", "finish_reason": "length"}]}
CHAT_CHOICE = {"index": 0, "message": {"content": "a story"}, "finish_reason": "length"}
CHAT_ANSWER = {"choices": [CHAT_CHOICE]}
CHAT_BODY = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30}


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (COMPLETIONS, {"prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 30}, COMPLETION_ANSWER),
        (CHATS, CHAT_BODY | STREAM, None),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 30}, CHAT_ANSWER),
        ("/v1/messages", CHAT_BODY, CHAT_ANSWER),
        ("/api/chat", {"messages": CHAT_BODY["messages"], "stream": False}, CHAT_ANSWER),
        ("/v1/embeddings", {"input": PROMPT}, {"data": [{"index": 0, "embedding": [1.0]}]}),
    ],
    ids=["batch", "stream", "responses", "messages", "no-limit", "embeddings"],
)
async def test_requests_at_once_exceed_a_budget_by_less_than_one(
    path: str, body: dict[str, Any], answer: dict[str, Any] | None
) -> None:
    """The server reports the cost with the end of its answer, when all requests have been admitted or refused."""
    num_choices = 4 if "n" in body else 1
    usage = {"prompt_tokens": 800, "completion_tokens": 94 * num_choices}
    cost = 800 * PRICE.input + (
        0 if answer and "data" in answer else 94 * num_choices * PRICE.output
    )
    amount = 7 * cost // 2
    may_answer, started = asyncio.Event(), RecordingFilter()

    async def answer_late(request: UpstreamRequest) -> None:
        await may_answer.wait()
        if answer is not None:
            request.send_json(200, answer | {"usage": usage})
            return
        request.start_stream()
        choice = {"index": 0, "delta": {"content": "a story"}, "finish_reason": "length"}
        request.send_chunk(format_event(json.dumps({"choices": [choice]}).encode()))
        last = json.dumps({"choices": [], "usage": usage}).encode()
        request.send_chunk(format_event(last))
        request.end_stream()

    limits = LimitFilter(create_quota_backend(None))
    limit = Limit(
        id="l", owner_kind="project", owner="", unit="nano_dollars", amount=amount, window="day"
    )
    limits.apply_snapshot(AccountSnapshot(limits=(limit,), prices=(PRICE,)))
    async with (
        fake_upstream(answer_late) as upstream,
        run_gateway([limits, started], ReplicaConfig(url=upstream.url, kind="openai")) as gateway,
    ):

        async def post() -> httpx2.Response:
            return await gateway.client.post(path, json={"model": "big", **body}, timeout=60)

        requests = [asyncio.create_task(post()) for _ in range(20)]
        await until(lambda: len(started.started) + sum(each.done() for each in requests) == 20)
        may_answer.set()
        responses = await asyncio.gather(*requests)
        statuses = Counter(response.status_code for response in responses)
        assert statuses.keys() == {200, 429}
        refusal = next(each for each in responses if each.status_code == 429)
        assert "held by running requests" in refusal.text
        assert float(refusal.headers["retry-after"]) <= 1
        while (await post()).status_code == 200:  # what was held and not used is free again
            pass
        spent = sum(context.bill.nano_dollars for context in started.completed)
        assert amount - 2 * cost < spent < amount + cost


async def test_admitting_limit_is_not_reported_as_rejection() -> None:
    limits = LimitFilter(create_quota_backend(None))
    limit = Limit(
        id="l", owner_kind="project", owner="", unit="requests", amount=9, window="minute"
    )
    limits.apply_snapshot(AccountSnapshot(limits=(limit,)))
    failing_filter = RecordingFilter(rejection=ApiError(503, "ledger_full", "Try again later."))
    async with (
        fake_upstream() as upstream,
        run_gateway([limits, failing_filter], ReplicaConfig(url=upstream.url)) as gateway,
    ):
        body = {"model": "big", "prompt": PROMPT}
        response = await gateway.client.post(COMPLETIONS, json=body)
        assert response.json()["error"]["code"] == "ledger_full"
        assert "limit_rejections_total{" not in (await gateway.client.get("/metrics")).text


async def test_internal_error_is_counted_and_traced() -> None:
    class BrokenFilter(RecordingFilter):
        async def on_request(self, context: RequestContext) -> bool:
            raise RuntimeError("a bug")

    async with (
        fake_upstream() as upstream,
        run_gateway([BrokenFilter()], ReplicaConfig(url=upstream.url)) as gateway,
    ):
        body = {"model": "big", "prompt": PROMPT}
        response = await gateway.client.post(COMPLETIONS, json=body)
        assert response.json()["error"]["code"] == "internal_error"
        text = (await gateway.client.get("/metrics")).text
        trace = gateway.traces.find(response.headers["x-argosy-request"])
    metric = "argosy_gateway_request_errors_total"
    assert f'{metric}{{code="internal_error",model="big"}} 1.0' in text
    assert trace is not None
    assert (trace.status, trace.error_code) == ("failed", "internal_error")


async def test_rejection_by_replica_is_logged() -> None:
    async def script(request: UpstreamRequest) -> None:
        request.send_json(400, {"error": {"message": "no"}})

    async with (
        fake_upstream(script) as upstream,
        run_gateway([], ReplicaConfig(url=upstream.url)) as gateway,
    ):
        with capture_logs() as logs:
            await gateway.client.post(COMPLETIONS, json={"model": "big", "prompt": PROMPT})
    (entry,) = [entry for entry in logs if entry["event"] == "request"]
    assert (entry["status"], entry["error"]) == (400, "refused_by_replica")


async def test_finish_reasons_of_whole_response_are_traced(tmp_path: Path) -> None:
    async def script(request: UpstreamRequest) -> None:
        reasons = ["stop", None, "length"]
        request.send_json(
            200, {"choices": [{"text": "a", "finish_reason": reason} for reason in reasons]}
        )

    async with (
        fake_upstream(script) as upstream,
        run_metered_gateway(tmp_path, upstream.url) as metered,
    ):
        await metered.post(n=3)
        assert metered.trace_dict(metered.usage_record())["finish_reasons"] == {
            "0": "stop",
            "2": "length",
        }


@pytest.mark.parametrize(
    "options",
    [{"stream": True}, {"stream": False}, {"prompt_logprobs": 1}],
    ids=["streaming", "buffered", "whole"],
)
async def test_deadline_at_replica_is_status_stopped(
    tmp_path: Path, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    engine = FakeEngine(tokenizer, constant_script(Script([100, 101], finish="timeout")))
    async with (
        serve(engine) as server,
        run_gateway_before(tmp_path, ReplicaConfig(url=server.url, model=MODEL)) as metered,
    ):
        await metered.post(**options)
        record = await metered.assert_consistent()
        trace = metered.trace_dict(record)
        assert (record.status, trace["status"]) == ("stopped", "stopped")
        assert (trace["finish_reasons"], trace["stop_reasons"]) == (
            {"0": "length"},
            {"0": "deadline"},
        )


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (False, 2)])
async def test_resumed_tokens_are_billed_as_prompt(
    tmp_path: Path, tokenizer: Tokenizer, stream: bool, n: int
) -> None:
    """Otherwise complete prompts sent as resumed tokens would be free."""
    engine = FakeEngine(tokenizer, constant_script(Script([*range(100, 108)], finish="length")))
    async with (
        serve(engine) as server,
        run_gateway_before(tmp_path, ReplicaConfig(url=server.url, model=MODEL)) as metered,
    ):
        await metered.post(stream=stream, n=n, max_tokens=8)
        prompt = metered.usage_record().input_tokens
        token_ids = [[*range(100, 105)]] * n
        await metered.post(stream=stream, n=n, resume={"token_ids": token_ids}, max_tokens=8)
        record = metered.usage_record()
        assert (record.input_tokens, record.output_tokens) == (prompt + 5 * n, 3 * n)


def reported_cached_tokens(text: str) -> list[int]:
    """Return the cached tokens of each usage in a stream."""
    chunks = [json.loads(data) for data in events(text.encode())[:-1]]
    usages = [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]
    return [usage_object["prompt_tokens_details"]["cached_tokens"] for usage_object in usages]


@pytest.mark.parametrize("continuous_usage", [True, False])
async def test_failover_does_not_change_cached_tokens(
    tmp_path: Path, tokenizer: Tokenizer, continuous_usage: bool
) -> None:
    failing_engine = FakeEngine(
        tokenizer, constant_script(Script([100, 101], crash=RuntimeError("broken")))
    )
    other_engine = FakeEngine(tokenizer, constant_script(Script([*range(100, 106)])), cached=1)
    options = {"include_usage": True, "continuous_usage_stats": continuous_usage}
    async with serve(failing_engine) as first, serve(other_engine) as second:
        replica_configs = [ReplicaConfig(url=server.url, model=MODEL) for server in (first, second)]
        async with run_gateway_before(tmp_path, *replica_configs) as metered:
            while not failing_engine.requests:  # round-robin, so the second request at the latest
                text = await metered.post(stream=True, stream_options=options)
                record = metered.usage_record()
            assert [
                attempt["carried_on_at"] for attempt in metered.trace_dict(record)["attempts"]
            ] == [0, 2]
            assert (record.cached_tokens, set(reported_cached_tokens(text))) == (3, {3})


async def test_cached_tokens_of_each_prompt_are_counted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def script(request: EngineRequest) -> Script:
        is_last = len(engine.requests) == 2
        return Script([100, 101], pause_after=0 if is_last else None)

    engine = FakeEngine(tokenizer, script)
    async with (
        serve(engine) as server,
        run_gateway_before(tmp_path, ReplicaConfig(url=server.url, model=MODEL)) as metered,
    ):
        body = {"model": "big", "prompt": ["Tell me a story", "Sing me a song"]} | STREAM
        text = ""
        async with metered.running.client.stream("POST", COMPLETIONS, json=body) as response:
            async for chunk in response.aiter_text():
                text += chunk
                engine.may_continue.set()
        record = await metered.assert_consistent()
        assert (record.cached_tokens, reported_cached_tokens(text)) == (6, [6])


# --- all together --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientResult:
    """Response of one request as its client received it."""

    id: str
    body: dict[str, Any]
    status: int | None
    """None if the client disconnected."""
    text: str = ""

    @property
    def usage(self) -> tuple[int, int] | None:
        """Prompt and output tokens that the client received, or None without usage."""
        if self.status != 200 or (self.body["stream"] and "[DONE]" not in self.text):
            return None
        chunks = [self.text]
        if self.body["stream"]:
            chunks = [line.removeprefix("data: ") for line in self.text.split("\n\n")][:-2]
        usage = [json.loads(chunk)["usage"] for chunk in chunks if '"usage"' in chunk][-1]
        return usage["prompt_tokens"], usage["completion_tokens"]


async def send_random_request(
    metered: MeteredGateway, rng: random.Random, number: int
) -> ClientResult:
    """Send a random request, which may have a deadline or be cancelled by its client."""
    prompt: dict[str, Any] = {"prompt": "Tell me"}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}]}
    path, request = rng.choice([(COMPLETIONS, prompt), (CHATS, chat)])
    max_tokens = rng.choice([1, 30, 200])
    body = {"model": "big", "max_tokens": max_tokens, "stream": False} | request
    body |= STREAM if rng.random() < 0.6 else {}
    body |= {"n": 2} if rng.random() < 0.2 else {}
    body |= {"timeout_s": rng.choice([0.01, 0.2])} if rng.random() < 0.15 else {}
    request_id, disconnect_after_s = f"r{number}", rng.choice([None, None, None, 0.01, 0.1])
    try:
        async with asyncio.timeout(disconnect_after_s):
            response = await metered.running.client.post(
                path, json=body, headers={"x-request-id": request_id}
            )
    except TimeoutError:
        return ClientResult(request_id, body, None)
    return ClientResult(request_id, body, response.status_code, response.text)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(2, marks=pytest.mark.exhaustive),
    ],
)
async def test_usage_metrics_and_traces_agree_for_random_requests(
    tmp_path: Path, tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)

    def script(_: object) -> Script:
        tokens = [*range(100, 130)] * rng.choice([1, 10])
        if rng.random() < 0.1:
            return Script(tokens[: rng.randrange(6)], crash=RuntimeError("broken"))
        return Script(tokens, finish="length")

    engine, backends = FakeEngine(tokenizer, script), (Vllm(), Sglang())
    timeouts = Timeouts(
        first_token_timeout_s=1.0, stream_idle_timeout_s=1.0, failover_timeout_s=0.5
    )
    async with serve(engine) as server, serve_backends(*backends):
        replica_configs = [ReplicaConfig(url=backend.url) for backend in backends]
        native_replica = ReplicaConfig(url=server.url, model=MODEL)
        async with run_gateway_before(
            tmp_path, native_replica, *replica_configs, timeouts=timeouts, hedge_after_s=0.1
        ) as metered:
            results: list[ClientResult] = []
            for round_number in range(4):
                fault_kinds: list[Any] = ["disconnect", "stall", "error", "abort", "reject"]
                backends[0].faults += [
                    Fault(kind, rng.randrange(5)) for kind in fault_kinds[: round_number + 2]
                ]
                tasks = [
                    send_random_request(metered, rng, round_number * 15 + number)
                    for number in range(15)
                ]
                results += await asyncio.gather(*tasks)
            await metered.running.wait_until_idle()
            rows: dict[str, UsageRecord] = {}
            metered.usage_log.drain(
                lambda some: rows.update({record.request: record for record in some})
            )
            sums = Counter[str]()
            for result in results:
                trace = metered.running.traces.find(result.id)
                if trace is None:  # cancelled before it arrived
                    continue
                record, trace_dict = rows.pop(trace.response_id), trace.to_dict()
                sums.update(
                    input=record.input_tokens - record.cached_tokens,
                    cached=record.cached_tokens,
                    output=record.output_tokens,
                    cost=record.nano_dollars,
                    **{trace_dict["status"]: 1},
                )
                times_ms = [time_ms for time_ms in trace_dict["ms"].values() if time_ms is not None]
                assert times_ms == sorted(times_ms)
                tokens = record.input_tokens, record.cached_tokens, record.output_tokens
                # Reasoning tokens follow where the model may reason. They are part of the output.
                assert tuple(trace_dict["tokens"].values())[:3] == tokens
                assert result.usage in {None, (record.input_tokens, record.output_tokens)}
                assert record.status == trace_dict["status"]
                assert (
                    record.output_tokens or record.status == "completed" or not record.nano_dollars
                )
            assert not rows
            for kind in ("input", "cached", "output"):
                assert await metered.metric_sum("tokens_total", kind=kind) == sums[kind]
            assert round(await metered.metric_sum("cost_dollars_total") * 1e9) == sums["cost"]
            for status in ("completed", "stopped", "cancelled", "refused", "failed"):
                assert await metered.metric_sum("requests_total", status=status) == sums[status]
