"""`argosy bench` against servers that work. Assertions compare counts, not durations."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import msgspec
import pytest
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    fake_upstream,
    respond_with_tokens,
)
from tests.support.replica_servers import MODEL, RunningReplica
from tests.support.small_benchmarks import AT_ONCE, WORKLOAD, measure

from argosy.bench import (
    ArrivalProcess,
    BenchError,
    BenchTarget,
    LengthDistribution,
    LoadSpec,
    Objectives,
    RequestRow,
)

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
    result = await measure(replica_server.url, LoadSpec(arrivals=AT_ONCE, requests=20, warmup=3))
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


async def test_chunk_times_ascend_after_send_time(
    replica_server: RunningReplica, long_engine: FakeEngine
) -> None:
    result = await measure(
        replica_server.url, LoadSpec(arrivals=ArrivalProcess(rate=500), requests=20)
    )
    for row in result.runs[0].rows:
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


async def test_closed_loop_limits_concurrency() -> None:
    async with fake_upstream(ResponseBarrier(5)) as server:
        result = await measure(server.url, LoadSpec(concurrency=5, requests=23))
        assert server.max_concurrent == 5
    assert result.runs[0].summary.completed == 23
    assert result.runs[0].summary.latency["lag"].count == 23


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


async def test_sweep_has_one_run_per_load() -> None:
    async with fake_upstream() as server:
        loads = [LoadSpec(concurrency=n, requests=6) for n in (1, 2, 3)]
        result = await measure(server.url, *loads)
    assert [point.label for point in result.runs] == [f"concurrency {n}" for n in (1, 2, 3)]


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


async def test_target_without_model_list_is_rejected(replica_server: RunningReplica) -> None:
    with pytest.raises(BenchError, match="list its models"):
        await measure(f"{replica_server.url}/somewhere")
