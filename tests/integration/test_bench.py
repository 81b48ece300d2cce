"""`argosy bench` against servers that behave; counts decide, never times."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import msgspec
import pytest
from tests.support.fake_engine import FakeEngine, Script, always
from tests.support.replica_servers import MODEL, Served
from tests.support.scripted_server import Asked, Rough, plain, rough_server
from tests.support.small_benchmarks import AT_ONCE, WORKLOAD, measure

from argosy.bench import (
    ArrivalProcess,
    BenchError,
    LengthDistribution,
    LoadSpec,
    Objectives,
    RequestRow,
    TargetOptions,
)
from argosy.bench.stub_server import StubDelays, StubServer

# --- the real replica --------------------------------------------------------------------------


@pytest.fixture
def endless(engine: FakeEngine) -> FakeEngine:
    """The engine, saying a long thing: requests end at the length that they ask for."""
    words = engine.tokenizer.encode(" one two three four five" * 40, add_special_tokens=False)
    engine.script = always(Script(words))
    return engine


async def test_the_replica_is_asked_what_was_planned(served: Served, endless: FakeEngine) -> None:
    result = await measure(served.url, LoadSpec(arrivals=AT_ONCE, requests=20, warmup=3))
    summary = result.runs[0].summary
    assert (summary.completed, summary.failed, summary.unmeasured) == (20, 0, 3)
    assert (summary.input_mismatches, summary.output_mismatches, summary.missing_usage) == (0, 0, 0)
    rows = [row for row in result.runs[0].rows if row.phase == "measured"]
    asked = endless.requests[-20:]
    assert Counter(len(r.prompt) for r in asked) == Counter(row.planned_input for row in rows)
    assert sum(row.output_tokens for row in rows) == sum(row.planned_output for row in rows)
    assert result.target.model == MODEL
    assert result.target.vocabulary
    assert result.target.chunk_usage


async def test_chunks_of_the_replica_are_in_order_after_the_send(
    served: Served, endless: FakeEngine
) -> None:
    result = await measure(served.url, LoadSpec(arrivals=ArrivalProcess(rate=500), requests=20))
    for row in result.runs[0].rows:
        assert row.scheduled_s <= row.sent_s <= row.chunks_s[0]
        assert row.chunks_s == sorted(row.chunks_s)
        assert row.end_s >= row.chunks_s[-1]
        assert row.chunk_tokens is not None
        assert sum(row.chunk_tokens) <= row.output_tokens


async def test_chat_with_the_replica(served: Served, endless: FakeEngine) -> None:
    wishes = TargetOptions(url=served.url, api="chat")
    workload = msgspec.structs.replace(WORKLOAD, input=LengthDistribution("fixed", 100))
    result = await measure(served.url, target_options=wishes, workload=workload)
    assert result.runs[0].summary.completed == 12
    # Two probes tell how the server counts words, so prompts come out near the plan.
    lengths = [row.input_tokens for row in result.runs[0].rows]
    assert all(length is not None and 70 <= length <= 130 for length in lengths)


async def test_shared_prefixes_reach_the_replica(served: Served, endless: FakeEngine) -> None:
    workload = msgspec.structs.replace(WORKLOAD, prefix_tokens=32, prefix_groups=2)
    await measure(served.url, workload=workload)
    asked = endless.requests[-12:]
    assert len({tuple(request.prompt[:32]) for request in asked}) == 2
    assert len({tuple(request.prompt[32:]) for request in asked}) == 12


async def test_conversations_carry_what_was_said(served: Served, endless: FakeEngine) -> None:
    wishes = TargetOptions(url=served.url, api="chat")
    workload = msgspec.structs.replace(WORKLOAD, turns=3)
    result = await measure(
        served.url, LoadSpec(concurrency=2, requests=6), target_options=wishes, workload=workload
    )
    assert result.runs[0].summary.completed == 6
    by_session: dict[int, list[RequestRow]] = {}
    for row in result.runs[0].rows:
        by_session.setdefault(row.session, []).append(row)
    for rows in by_session.values():
        assert [row.turn for row in rows] == [0, 1, 2]
        lengths = [row.input_tokens or 0 for row in rows]
        assert lengths == sorted(set(lengths))  # each prompt holds the turns before it
        assert all(a.end_s <= b.scheduled_s for a, b in itertools.pairwise(rows))


# --- arrivals and limits -----------------------------------------------------------------------


class Gate:
    """A script that answers nobody until all have come."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._open = asyncio.Event()

    async def __call__(self, asked: Asked) -> None:
        self._left -= 1
        if self._left == 0:
            self._open.set()
        await self._open.wait()
        await plain(asked)


async def test_an_open_loop_waits_for_nobody() -> None:
    """It would never end with a limit on connections: no answer comes until 300 requests have."""
    async with rough_server(Gate(300)) as server:
        result = await measure(
            server.url, LoadSpec(arrivals=ArrivalProcess(rate=2000), requests=300)
        )
    assert result.runs[0].summary.completed == 300
    assert result.runs[0].summary.peak_concurrency == 300


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    async with rough_server(Gate(5)) as server:
        result = await measure(server.url, LoadSpec(concurrency=5, requests=23))
        assert server.most_at_once == 5
    assert result.runs[0].summary.completed == 23
    assert result.runs[0].summary.latency["lag"].count == 23


async def test_waiting_for_room_counts_as_latency() -> None:
    async with rough_server() as server:
        plan = LoadSpec(arrivals=AT_ONCE, concurrency=1, requests=8)
        result = await measure(server.url, plan)
        assert server.most_at_once == 1
    rows = result.runs[0].rows
    assert all(row.scheduled_s == 0 for row in rows)
    ends = sorted(row.end_s for row in rows)
    sent = sorted(row.sent_s for row in rows)
    assert all(end <= start for end, start in zip(ends, sent[1:], strict=False))


async def test_a_duration_ends_a_closed_loop() -> None:
    async with rough_server() as server:
        result = await measure(server.url, LoadSpec(concurrency=2, duration_s=0.3))
    point = result.runs[0]
    assert point.summary.completed == len(point.rows) > 2
    assert all(row.scheduled_s < 0.3 for row in point.rows)


async def test_a_sweep_has_a_point_for_each_load() -> None:
    async with rough_server() as server:
        loads = [LoadSpec(concurrency=n, requests=6) for n in (1, 2, 3)]
        result = await measure(server.url, *loads)
    assert [point.label for point in result.runs] == [f"concurrency {n}" for n in (1, 2, 3)]


async def test_the_same_seed_asks_the_same() -> None:
    bodies = []
    for _ in range(2):
        async with rough_server() as server:
            server.tokenize = list(range(100, 400))
            await measure(server.url, LoadSpec(concurrency=1, requests=5), seed=9)
            bodies.append([asked.body for asked in server.asked])
    assert bodies[0] == bodies[1]


async def test_the_search_stops_trials_that_are_lost() -> None:
    """No rate holds an objective that a server without answers cannot keep."""

    async def refuse(asked: Asked) -> None:
        asked.json(503, {"error": {"message": "busy"}})

    async with rough_server(refuse) as server:
        result = await measure(
            server.url,
            LoadSpec(arrivals=ArrivalProcess(rate=2000), requests=30),
            objectives=Objectives({"ttft": 1e6}),
            find_rate=True,
            precision=0.5,
        )
    assert result.best_rate is None
    assert all(point.met_objectives is False for point in result.runs)
    # A hundredth of 30 is no request: the first failure decides.
    assert len(server.asked) < 30 * len(result.runs)


async def test_the_search_finds_what_holds() -> None:
    count = 0

    async def tire(asked: Asked) -> None:
        """Answers three trials of ten, then no more."""
        nonlocal count
        count += 1
        if count > 30:
            asked.json(429, {"error": {"message": "slow down"}})
        else:
            await plain(asked)

    async with rough_server(tire) as server:
        result = await measure(
            server.url,
            LoadSpec(arrivals=ArrivalProcess(rate=500), requests=10),
            objectives=Objectives({"ttft": 1e6}),
            find_rate=True,
            precision=0.9,
        )
    assert [point.met_objectives for point in result.runs][:4] == [True, True, True, False]
    assert result.best_rate == 2000


# --- the stub ----------------------------------------------------------------------------------


async def test_the_stub_and_the_client_agree() -> None:
    stub = StubServer(StubDelays(first_token_s=0.002, token_gap_s=0.001))
    server, url = await stub.start()
    result = await measure(url, LoadSpec(arrivals=AT_ONCE, requests=10))
    server.close()
    assert result.runs[0].summary.completed == 10
    served = [each for each in stub.request_times.values() if len(each.token_sent_at) > 1]
    assert sum(len(each.token_sent_at) for each in served) == result.runs[0].summary.output_tokens
    for row in result.runs[0].rows:
        # What the client sees cannot be shorter than what the stub did.
        assert row.chunks_s[0] - row.sent_s >= 0.002
        assert row.end_s - row.chunks_s[0] >= 0.0
        assert len(row.chunks_s) == row.planned_output


# --- where the server is -----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}", "http+unix://{quoted}/v1"])
async def test_a_server_behind_a_unix_socket(form: str) -> None:
    with TemporaryDirectory() as folder:  # pytest's own may be too long for a socket
        socket, rough = str(Path(folder) / "a socket"), Rough()
        async with await asyncio.start_unix_server(rough.serve, socket):
            result = await measure(form.format(socket, quoted=quote(socket, safe="")))
            for asked in rough.asked:
                asked.writer.close()
    assert len(rough.asked) == 12
    assert result.runs[0].summary.completed == 12


async def test_what_is_no_openai_server_is_refused(served: Served) -> None:
    with pytest.raises(BenchError, match="list its models"):
        await measure(f"{served.url}/somewhere")
