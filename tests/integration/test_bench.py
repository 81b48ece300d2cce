"""`argosy bench` against servers that work and servers that fail. Assertions compare counts, not durations."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import msgspec
import pytest
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.fake_upstream import (
    CHUNKED_HEAD,
    FakeUpstream,
    UpstreamRequest,
    UpstreamScript,
    encode_chunk,
    fake_upstream,
    listening,
    respond_with_tokens,
)
from tests.support.replica_servers import MODEL, RunningReplica
from tests.support.small_benchmarks import AT_ONCE, WORKLOAD, RecordingProgress, measure, settings

from argosy.bench import (
    ArrivalProcess,
    BenchTarget,
    LengthDistribution,
    LoadSpec,
    Objectives,
    RequestRow,
    render_text_report,
    run_benchmark,
)
from argosy.protocol import SSE_DONE, format_event

# --- the real replica --------------------------------------------------------------------------


@pytest.fixture
def long_engine(engine: FakeEngine) -> FakeEngine:
    """Engine with a long script, so that each request ends at its own `max_tokens`."""
    words = engine.tokenizer.encode(" one two three four five" * 40, add_special_tokens=False)
    engine.script = constant_script(Script(words))
    return engine


async def test_replica_receives_planned_requests(
    replica_server: RunningReplica, long_engine: FakeEngine
) -> None:
    load = LoadSpec(arrivals=ArrivalProcess(rate=500), requests=20, warmup=3)
    result = await measure(replica_server.url, load)
    summary = result.runs[0].summary
    assert (summary.completed, summary.failed, summary.unmeasured) == (20, 0, 3)
    assert (summary.input_mismatches, summary.output_mismatches, summary.missing_usage) == (0, 0, 0)
    rows = [row for row in result.runs[0].rows if row.phase == "measured"]
    requests = long_engine.requests[-20:]
    assert Counter(len(r.prompt) for r in requests) == Counter(row.planned_input for row in rows)
    assert sum(row.output_tokens for row in rows) == sum(row.planned_output for row in rows)
    assert result.target.model == MODEL
    assert result.target.vocabulary
    assert result.target.chunk_usage
    for row in rows:
        assert row.scheduled_s <= row.sent_s <= row.chunks_s[0]
        assert row.chunks_s == sorted(row.chunks_s)
        assert row.end_s >= row.chunks_s[-1]
        assert row.chunk_tokens is not None
        assert sum(row.chunk_tokens) <= row.output_tokens


async def test_chat_prompt_lengths_are_near_plan(
    replica_server: RunningReplica, long_engine: FakeEngine
) -> None:
    target = BenchTarget(url=replica_server.url, api="chat")
    workload = msgspec.structs.replace(WORKLOAD, input=LengthDistribution("fixed", 100))
    result = await measure(replica_server.url, target=target, workload=workload)
    assert result.runs[0].summary.completed == 12
    # Two probe requests calibrate how the server counts words, so prompt lengths are near the plan.
    lengths = [row.input_tokens for row in result.runs[0].rows]
    assert all(length is not None and 70 <= length <= 130 for length in lengths)


async def test_prefix_groups_share_prompt_prefix(
    replica_server: RunningReplica, long_engine: FakeEngine
) -> None:
    workload = msgspec.structs.replace(WORKLOAD, prefix_tokens=32, prefix_groups=2)
    await measure(replica_server.url, workload=workload)
    requests = long_engine.requests[-12:]
    assert len({tuple(request.prompt[:32]) for request in requests}) == 2
    assert len({tuple(request.prompt[32:]) for request in requests}) == 12


async def test_conversation_turns_include_previous_turns(
    replica_server: RunningReplica, long_engine: FakeEngine
) -> None:
    target = BenchTarget(url=replica_server.url, api="chat")
    workload = msgspec.structs.replace(WORKLOAD, turns=3)
    result = await measure(
        replica_server.url,
        LoadSpec(concurrency=2, requests=6),
        target=target,
        workload=workload,
    )
    assert result.runs[0].summary.completed == 6
    rows_by_session: dict[int, list[RequestRow]] = {}
    for row in result.runs[0].rows:
        rows_by_session.setdefault(row.session, []).append(row)
    for rows in rows_by_session.values():
        assert [row.turn for row in rows] == [0, 1, 2]
        lengths = [row.input_tokens or 0 for row in rows]
        assert lengths == sorted(set(lengths))  # each prompt includes the previous turns
        assert all(a.end_s <= b.scheduled_s for a, b in itertools.pairwise(rows))


COUNTERS = """argosy_generation_tokens_total{{model="m"}} {generated}.0
argosy_draft_tokens_total{{drafter="prompt_lookup",model="m"}} {drafted}.0
argosy_draft_tokens_total{{drafter="prediction",model="m"}} 0.0
argosy_accepted_draft_tokens_total{{drafter="prompt_lookup",model="m"}} {accepted}.0
argosy_draft_gain_seconds_total{{model="m"}} {drafted}.5
argosy_draft_cost_seconds_total{{model="m"}} {accepted}.25e+00
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}.0
"""
VLLM_COUNTERS = """vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
"""
GATEWAY = 'argosy_gateway_replica_requests_in_flight{{model="m",replica="r {}/0"}} 0.0\n'


class DraftingServer(FakeUpstream):
    """Gateway with two replicas. Each one drafts twice the tokens that it generates, and accepts a quarter of them."""

    def get_pages(self) -> dict[str, object]:
        generated = 1_000_000 + 10 * len(self.requests)
        counts = {"generated": generated, "drafted": 2 * generated, "accepted": generated // 2}
        return super().get_pages() | {
            "/metrics": "".join(GATEWAY.format(number) for number in (1, 2)),
            "/replicas/r%201%2F0/metrics": COUNTERS.format(**counts),
            "/replicas/r%202%2F0/metrics": VLLM_COUNTERS.format(**counts),
        }


async def test_drafts_are_read_from_the_metrics_of_the_replicas() -> None:
    server = DraftingServer()
    async with listening(server):
        (run,) = (await measure(server.url)).runs
        assert (run.tokens_per_step, run.draft_acceptance) == (2.0, 0.25)
        assert run.draft_saved_s == 15 * run.summary.completed
        text = render_text_report(await measure(server.url))
        assert "Accepted drafts (%): 25.00" in " ".join(text.split())


# --- arrivals and limits -----------------------------------------------------------------------


class ResponseBarrier:
    """Script that responds once `count` requests have arrived."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._open = asyncio.Event()

    async def __call__(self, request: UpstreamRequest) -> None:
        self._left -= 1
        if self._left == 0:
            self._open.set()
        await self._open.wait()
        await respond_with_tokens(request)


async def test_open_loop_has_no_concurrency_limit() -> None:
    """The server responds only when 300 requests are open, so a limit on connections would deadlock."""
    async with fake_upstream(ResponseBarrier(300)) as server:
        result = await measure(
            server.url, LoadSpec(arrivals=ArrivalProcess(rate=2000), requests=300)
        )
    assert result.runs[0].summary.completed == 300
    assert result.runs[0].summary.peak_concurrency == 300


async def test_closed_loop_limits_concurrency_in_each_run_of_a_sweep() -> None:
    async with fake_upstream(ResponseBarrier(5)) as server:
        result = await measure(server.url, *(LoadSpec(concurrency=n, requests=23) for n in (5, 3)))
        assert server.max_concurrent == 5
    assert [point.label for point in result.runs] == ["concurrency 5", "concurrency 3"]
    for point in result.runs:
        assert point.summary.completed == point.summary.latency["lag"].count == 23


async def test_waiting_for_concurrency_slot_counts_as_latency() -> None:
    async with fake_upstream() as server:
        plan = LoadSpec(arrivals=AT_ONCE, concurrency=1, requests=8)
        result = await measure(server.url, plan)
        assert server.max_concurrent == 1
    rows = result.runs[0].rows
    assert all(row.scheduled_s == 0 for row in rows)
    ends = sorted(row.end_s for row in rows)
    sent = sorted(row.sent_s for row in rows)
    assert all(end <= start for end, start in zip(ends, sent[1:], strict=False))


async def test_closed_loop_ends_after_duration() -> None:
    async with fake_upstream() as server:
        result = await measure(server.url, LoadSpec(concurrency=2, duration_s=0.3))
    point = result.runs[0]
    assert point.summary.completed == len(point.rows) > 2
    assert all(row.scheduled_s < 0.3 for row in point.rows)


async def test_same_seed_sends_same_requests() -> None:
    bodies = []
    for _ in range(2):
        async with fake_upstream() as server:
            server.token_ids = list(range(100, 400))
            await measure(server.url, LoadSpec(concurrency=1, requests=5), seed=9)
            bodies.append([request.body for request in server.requests])
    assert bodies[0] == bodies[1]


async def test_rate_search_stops_failed_trials_early() -> None:
    """No rate can meet an objective if the server rejects every request."""

    async def refuse(request: UpstreamRequest) -> None:
        request.send_json(503, {"error": {"message": "busy"}})

    async with fake_upstream(refuse) as server:
        result = await measure(
            server.url,
            LoadSpec(arrivals=ArrivalProcess(rate=2000), requests=30),
            objectives=Objectives({"ttft": 1e6}),
            find_rate=True,
            precision=0.5,
        )
    assert result.best_rate is None
    assert all(point.met_objectives is False for point in result.runs)
    # One percent of 30 requests is less than one request, so the first failure decides.
    assert len(server.requests) < 30 * len(result.runs)


async def test_rate_search_finds_best_rate() -> None:
    count = 0

    async def respond_to_30(request: UpstreamRequest) -> None:
        """Respond to three trials of ten requests, then reject the rest."""
        nonlocal count
        count += 1
        if count > 30:
            request.send_json(429, {"error": {"message": "slow down"}})
        else:
            await respond_with_tokens(request)

    async with fake_upstream(respond_to_30) as server:
        result = await measure(
            server.url,
            LoadSpec(arrivals=ArrivalProcess(rate=500), requests=10),
            objectives=Objectives({"ttft": 1e6}),
            find_rate=True,
            precision=0.9,
        )
    assert [point.met_objectives for point in result.runs][:4] == [True, True, True, False]
    assert result.best_rate == 2000


# --- target addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}", "http+unix://{quoted}/v1"])
async def test_unix_socket_target_is_measured(form: str) -> None:
    with TemporaryDirectory() as folder:  # the path of pytest's folder may be too long for a socket
        socket, upstream = str(Path(folder) / "a socket"), FakeUpstream()
        async with await asyncio.start_unix_server(upstream.serve, socket):
            result = await measure(form.format(socket, quoted=quote(socket, safe="")))
            for request in upstream.requests:
                request.writer.close()
    assert len(upstream.requests) == 12
    assert result.runs[0].summary.completed == 12


# --- faults --------------------------------------------------------------------------------------


def event(**chunk: object) -> bytes:
    return format_event(json.dumps(chunk).encode())


def stream(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return CHUNKED_HEAD + b"".join(map(encode_chunk, events)) + end


def failed(status: int, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (status, headers, len(body)) + body


HALF = event(choices=[{"index": 0, "text": "half", "finish_reason": None}])
COUNTS = [event(choices=[{"text": "a"}], usage={"completion_tokens": n}) for n in (1, 10**12, -5)]
CUT_CHARACTER = stream(b'data: {"choices": [{"text": "\xe2\x82"}]}\n\n', SSE_DONE)
FAULTS: dict[str, tuple[bytes | None, str]] = {
    "no response": (b"", "cut"),
    "connection cut in a stream": (stream(HALF, end=b""), "cut"),
    "stream ended early": (stream(HALF), "cut"),
    "rejection": (failed(429, b'{"error": {"message": "slow down"}}'), "http 429"),
    "control characters": (
        failed(500, b'{"error": {"message": "\\u001b]0;mine\\u0007\\u001b[2J\\nall is well"}}'),
        "http 500",
    ),
    "rejection in Latin-1": (failed(500, b'{"error": {"message": "caf\xe9"}}'), "http 500"),
    "deep JSON": (failed(500, b'{"error": ' + b"[" * 5000 + b"]" * 5000 + b"}"), "http 500"),
    "redirect": (failed(307, b"", b"location: /elsewhere\r\n"), "http 307"),
    "error event": (stream(HALF, event(error={"message": "it broke"})), "stream"),
    "empty text": (
        stream(event(choices=[{"text": "", "finish_reason": "stop"}]), SSE_DONE),
        "empty",
    ),
    "invalid JSON": (stream(b"data: {oops\n\n", SSE_DONE), "malformed"),
    "cut character": (CUT_CHARACTER, "malformed"),
    "huge token count": (stream(*COUNTS[:2], SSE_DONE), "malformed"),
    "negative token count": (stream(COUNTS[2], SSE_DONE), "malformed"),
    "other protocol": (b"SSH-2.0-server\r\n\r\n", "malformed"),
    "silence": (None, "timeout"),
}
"""Bytes that the server sends and the error of the request. Without any it says nothing, not even by closing."""


def respond_with(response: bytes | None) -> UpstreamScript:
    """Return a script that sends bytes, and cuts the connection if they are no complete response."""

    async def script(request: UpstreamRequest) -> None:
        if response is None:
            await asyncio.Event().wait()
            return
        request.writer.write(response)
        if response in (FAULTS["no response"][0], FAULTS["connection cut in a stream"][0]):
            await request.writer.drain()
            request.writer.transport.abort()

    return script


reject, stay_silent, close_before_response = (
    respond_with(FAULTS[name][0]) for name in ("rejection", "silence", "no response")
)


@pytest.mark.parametrize("fault", FAULTS)
async def test_failure_affects_one_request(fault: str) -> None:
    response, error = FAULTS[fault]
    script, count = respond_with(response), 0

    async def fail_every_third(request: UpstreamRequest) -> None:
        nonlocal count
        count += 1
        fails = count % 3 == 0
        await (script if fails else respond_with_tokens)(request)

    async with fake_upstream(fail_every_third) as server:
        timeout_s = 1.0 if response is None else 60.0
        result = await measure(
            server.url, LoadSpec(concurrency=2, requests=12), timeout_s=timeout_s
        )
    summary = result.runs[0].summary
    assert set(summary.errors) <= {error}
    details = [row.detail for row in result.runs[0].rows if row.error]
    assert all(detail.isprintable() for detail in details)
    assert fault != "control characters" or "all is well" in details[0]
    assert fault != "cut character" or "not UTF-8" in details[0]
    # The client resends only if a kept-alive connection closes before the response begins.
    assert summary.failed + summary.resent == count // 3
    assert summary.completed + summary.failed == 12
    assert fault == "no response" or summary.resent == 0
    assert summary.latency["ttft"].count == summary.completed


@pytest.mark.parametrize("extra", [b"and another thing", b""], ids=["bytes", "close"])
async def test_what_follows_a_response_fails_no_request(
    extra: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer_and_more(request: UpstreamRequest) -> None:
        await respond_with_tokens(request)
        request.writer.write(extra)
        await request.writer.drain()
        if not extra:
            request.writer.close()

    async with fake_upstream(answer_and_more) as server:
        result = await measure(server.url, LoadSpec(concurrency=3, requests=30))
    assert result.runs[0].summary.completed == 30
    assert not caplog.records


async def test_dead_server_fails_remaining_requests() -> None:
    async with fake_upstream() as server:
        progress = RecordingProgress()
        task = asyncio.create_task(
            run_benchmark(settings(server.url, LoadSpec(concurrency=1, requests=400)), {}, progress)
        )

        def stop_responding() -> None:
            if len(progress.rows) == 5:
                server.script = close_before_response

        progress.on_row = stop_responding
        result = await task
    summary = result.runs[0].summary
    assert summary.completed == 5
    assert summary.failed == 395


async def test_failed_turn_cancels_rest_of_conversation() -> None:
    async with fake_upstream(reject) as server:
        workload = msgspec.structs.replace(WORKLOAD, turns=3)
        result = await measure(server.url, LoadSpec(concurrency=1, requests=6), workload=workload)
    summary = result.runs[0].summary
    assert (summary.failed, summary.cancelled) == (2, 4)
    assert len(server.requests) == 2


async def test_interrupted_run_keeps_completed_requests() -> None:
    async with fake_upstream() as server:
        progress = RecordingProgress()
        loads = (LoadSpec(concurrency=1, requests=100), LoadSpec(concurrency=2, requests=100))
        task = asyncio.create_task(run_benchmark(settings(server.url, *loads), {}, progress))

        def interrupt() -> None:
            if len(progress.rows) == 7:
                server.script = stay_silent
                task.get_loop().call_soon(task.cancel)

        progress.on_row = interrupt
        result = await task
    assert len(result.runs) == 1
    assert result.runs[0].interrupted
    summary = result.runs[0].summary
    assert summary.completed >= 7
    assert summary.cancelled <= 1
    assert summary.failed == 0


async def test_interrupted_run_counts_waiting_requests_as_cancelled() -> None:
    async with fake_upstream() as server:
        load = LoadSpec(arrivals=AT_ONCE, concurrency=1, requests=10)
        task = asyncio.create_task(
            run_benchmark(settings(server.url, load), {}, RecordingProgress())
        )

        async def interrupt(request: UpstreamRequest) -> None:
            task.cancel()
            await request.writer.wait_closed()

        server.script = interrupt
        result = await task
    summary = result.runs[0].summary
    assert (summary.completed, summary.cancelled) == (0, 10)


async def test_unsupported_fields_are_omitted() -> None:
    async def strict(request: UpstreamRequest) -> None:
        assert "ignore_eos" not in request.body
        assert request.body["stream_options"] == {"include_usage": True}
        await respond_with_tokens(request)

    async with fake_upstream(strict) as server:
        server.unknown_fields = {"ignore_eos", "continuous_usage_stats"}
        result = await measure(server.url)
    assert result.runs[0].summary.completed == 12
    assert not result.target.ignore_eos
    assert not result.target.chunk_usage


async def test_missing_usage_falls_back_to_chunk_count() -> None:
    async def no_usage(request: UpstreamRequest) -> None:
        request.start_stream()
        for text in "abc":
            request.send_text(text)
        request.send_text("", "stop")
        request.end_stream()

    async with fake_upstream(no_usage) as server:
        result = await measure(server.url)
    summary = result.runs[0].summary
    assert summary.missing_usage == 12
    assert summary.output_tokens == 36
