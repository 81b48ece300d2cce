"""`argosy bench` against servers that behave, and against servers that do not; counts decide, never times."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import msgspec
import pytest
from tests.integration.fake_engine import FakeEngine, Script, always
from tests.integration.rough_server import Answer, Asked, Rough, plain, rough_server
from tests.integration.serving import MODEL, Served
from typer.testing import CliRunner
from typer.testing import Result as Ran

from argosy.bench import (
    Arrivals,
    BenchError,
    Lengths,
    Load,
    Objectives,
    Result,
    Row,
    Settings,
    Wishes,
    Workload,
    load,
    run,
)
from argosy.bench.stub import Delays, Stub
from argosy.cli.app import app

WORKLOAD = Workload(input=Lengths("uniform", 20, 40), output=Lengths("uniform", 2, 9))
AT_ONCE = Arrivals(rate=None)


@dataclass
class Watch:
    """Keeps what it saw."""

    labels: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    on_row: Callable[[], None] = lambda: None

    def begins(self, label: str, requests: int) -> None:
        self.labels.append(label)

    def ended(self, row: Row, in_flight: int) -> None:
        self.rows.append(row)
        self.on_row()


def settings(url: str, *loads: Load, **changes: object) -> Settings:
    base = Settings(
        wishes=Wishes(url=url),
        workload=WORKLOAD,
        loads=loads or (Load(concurrency=4, requests=12),),
    )
    return msgspec.structs.replace(base, **changes)


async def measure(url: str, *loads: Load, **changes: object) -> Result:
    return await run(settings(url, *loads, **changes), {}, Watch())


def cli(*arguments: str) -> Ran:
    return CliRunner().invoke(app, ["bench", *arguments])


# --- the real replica --------------------------------------------------------------------------


@pytest.fixture
def endless(engine: FakeEngine) -> FakeEngine:
    """The engine, saying a long thing: requests end at the length that they ask for."""
    words = engine.tokenizer.encode(" one two three four five" * 40, add_special_tokens=False)
    engine.script = always(Script(words))
    return engine


async def test_the_replica_is_asked_what_was_planned(served: Served, endless: FakeEngine) -> None:
    result = await measure(served.url, Load(arrivals=AT_ONCE, requests=20, warmup=3))
    summary = result.points[0].summary
    assert (summary.completed, summary.failed, summary.unmeasured) == (20, 0, 3)
    assert (summary.input_mismatches, summary.output_mismatches, summary.uncounted) == (0, 0, 0)
    rows = [row for row in result.points[0].rows if row.phase == "measured"]
    asked = endless.requests[-20:]
    assert Counter(len(r.prompt) for r in asked) == Counter(row.planned_input for row in rows)
    assert sum(row.output_tokens for row in rows) == sum(row.planned_output for row in rows)
    assert result.target.model == MODEL
    assert result.target.vocabulary
    assert result.target.chunk_usage


async def test_chunks_of_the_replica_are_in_order_after_the_send(
    served: Served, endless: FakeEngine
) -> None:
    result = await measure(served.url, Load(arrivals=Arrivals(rate=500), requests=20))
    for row in result.points[0].rows:
        assert row.scheduled_s <= row.sent_s <= row.chunks_s[0]
        assert row.chunks_s == sorted(row.chunks_s)
        assert row.end_s >= row.chunks_s[-1]
        assert row.chunk_tokens is not None
        assert sum(row.chunk_tokens) <= row.output_tokens


async def test_chat_with_the_replica(served: Served, endless: FakeEngine) -> None:
    wishes = Wishes(url=served.url, api="chat")
    workload = msgspec.structs.replace(WORKLOAD, input=Lengths("fixed", 100))
    result = await measure(served.url, wishes=wishes, workload=workload)
    assert result.points[0].summary.completed == 12
    # Two probes tell how the server counts words, so prompts come out near the plan.
    lengths = [row.input_tokens for row in result.points[0].rows]
    assert all(length is not None and 70 <= length <= 130 for length in lengths)


async def test_shared_prefixes_reach_the_replica(served: Served, endless: FakeEngine) -> None:
    workload = msgspec.structs.replace(WORKLOAD, prefix_tokens=32, prefix_groups=2)
    await measure(served.url, workload=workload)
    asked = endless.requests[-12:]
    assert len({tuple(request.prompt[:32]) for request in asked}) == 2
    assert len({tuple(request.prompt[32:]) for request in asked}) == 12


async def test_conversations_carry_what_was_said(served: Served, endless: FakeEngine) -> None:
    wishes = Wishes(url=served.url, api="chat")
    workload = msgspec.structs.replace(WORKLOAD, turns=3)
    result = await measure(
        served.url, Load(concurrency=2, requests=6), wishes=wishes, workload=workload
    )
    assert result.points[0].summary.completed == 6
    by_session: dict[int, list[Row]] = {}
    for row in result.points[0].rows:
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
        result = await measure(server.url, Load(arrivals=Arrivals(rate=2000), requests=300))
    assert result.points[0].summary.completed == 300
    assert result.points[0].summary.peak_concurrency == 300


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    async with rough_server(Gate(5)) as server:
        result = await measure(server.url, Load(concurrency=5, requests=23))
        assert server.most_at_once == 5
    assert result.points[0].summary.completed == 23
    assert result.points[0].summary.latency["lag"].count == 23


async def test_waiting_for_room_counts_as_latency() -> None:
    async with rough_server() as server:
        plan = Load(arrivals=AT_ONCE, concurrency=1, requests=8)
        result = await measure(server.url, plan)
        assert server.most_at_once == 1
    rows = result.points[0].rows
    assert all(row.scheduled_s == 0 for row in rows)
    ends = sorted(row.end_s for row in rows)
    sent = sorted(row.sent_s for row in rows)
    assert all(end <= start for end, start in zip(ends, sent[1:], strict=False))


async def test_a_duration_ends_a_closed_loop() -> None:
    async with rough_server() as server:
        result = await measure(server.url, Load(concurrency=2, duration_s=0.3))
    point = result.points[0]
    assert point.summary.completed == len(point.rows) > 2
    assert all(row.scheduled_s < 0.3 for row in point.rows)


async def test_a_sweep_has_a_point_for_each_load() -> None:
    async with rough_server() as server:
        loads = [Load(concurrency=n, requests=6) for n in (1, 2, 3)]
        result = await measure(server.url, *loads)
    assert [point.label for point in result.points] == [f"concurrency {n}" for n in (1, 2, 3)]


async def test_the_same_seed_asks_the_same() -> None:
    bodies = []
    for _ in range(2):
        async with rough_server() as server:
            server.tokenize = list(range(100, 400))
            await measure(server.url, Load(concurrency=1, requests=5), seed=9)
            bodies.append([asked.body for asked in server.asked])
    assert bodies[0] == bodies[1]


async def test_the_search_stops_trials_that_are_lost() -> None:
    """No rate holds an objective that a server without answers cannot keep."""

    async def refuse(asked: Asked) -> None:
        asked.json(503, {"error": {"message": "busy"}})

    async with rough_server(refuse) as server:
        result = await measure(
            server.url,
            Load(arrivals=Arrivals(rate=2000), requests=30),
            objectives=Objectives({"ttft": 1e6}),
            search=True,
            precision=0.5,
        )
    assert result.best_rate is None
    assert all(point.held is False for point in result.points)
    # A hundredth of 30 is no request: the first failure decides.
    assert len(server.asked) < 30 * len(result.points)


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
            Load(arrivals=Arrivals(rate=500), requests=10),
            objectives=Objectives({"ttft": 1e6}),
            search=True,
            precision=0.9,
        )
    assert [point.held for point in result.points][:4] == [True, True, True, False]
    assert result.best_rate == 2000


# --- things that go wrong ----------------------------------------------------------------------


async def cut_head(asked: Asked) -> None:
    asked.writer.transport.abort()


async def cut_stream(asked: Asked) -> None:
    asked.stream()
    asked.say("half")
    await asked.writer.drain()
    asked.writer.transport.abort()


async def unfinished(asked: Asked) -> None:
    asked.stream()
    asked.say("half")
    asked.writer.write(b"0\r\n\r\n")


async def refused(asked: Asked) -> None:
    asked.json(429, {"error": {"message": "slow down", "code": "rate_limit"}})


async def stream_error(asked: Asked) -> None:
    asked.stream()
    asked.say("half")
    asked.send(b'data: {"error": {"message": "it broke"}}\n\n')
    asked.writer.write(b"0\r\n\r\n")


async def no_text(asked: Asked) -> None:
    asked.stream()
    asked.say("", "stop")
    asked.end(tokens=0)


async def no_json(asked: Asked) -> None:
    asked.stream()
    asked.send(b"data: {oops\n\n")
    asked.end()


async def no_http(asked: Asked) -> None:
    asked.writer.write(b"SSH-2.0-server\r\n\r\n")


async def silence(asked: Asked) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (cut_head, "cut"),
        (cut_stream, "cut"),
        (unfinished, "cut"),
        (refused, "http 429"),
        (stream_error, "stream"),
        (no_text, "empty"),
        (no_json, "malformed"),
        (no_http, "malformed"),
        (silence, "timeout"),
    ],
)
async def test_a_failure_costs_one_request(script: Answer, error: str) -> None:
    count = 0

    async def each_third(asked: Asked) -> None:
        nonlocal count
        count += 1
        fails = count % 3 == 0
        await (script if fails else plain)(asked)

    async with rough_server(each_third) as server:
        result = await measure(server.url, Load(concurrency=2, requests=12), timeout_s=0.5)
    summary = result.points[0].summary
    assert set(summary.errors) <= {error}
    # Only a kept connection that is cut before the answer begins is given a second chance.
    assert summary.failed + summary.resent == count // 3
    assert summary.completed + summary.failed == 12
    assert script is cut_head or summary.resent == 0
    assert summary.latency["ttft"].count == summary.completed


async def test_a_connection_closed_while_idle_costs_nothing() -> None:
    async def answer_and_close(asked: Asked) -> None:
        await plain(asked)
        await asked.writer.drain()
        asked.writer.close()

    async with rough_server(answer_and_close) as server:
        result = await measure(server.url, Load(concurrency=3, requests=30))
    assert result.points[0].summary.completed == 30


async def test_a_server_that_dies_fails_the_rest() -> None:
    async with rough_server() as server:
        watch = Watch()
        task = asyncio.create_task(
            run(settings(server.url, Load(concurrency=1, requests=400)), {}, watch)
        )

        def die() -> None:
            if len(watch.rows) == 5:
                server.script = cut_head

        watch.on_row = die
        result = await task
    summary = result.points[0].summary
    assert summary.completed == 5
    assert summary.failed == 395


async def test_a_failed_turn_ends_its_conversation() -> None:
    async with rough_server(refused) as server:
        workload = msgspec.structs.replace(WORKLOAD, turns=3)
        result = await measure(server.url, Load(concurrency=1, requests=6), workload=workload)
    summary = result.points[0].summary
    assert (summary.failed, summary.cancelled) == (2, 4)
    assert len(server.asked) == 2


async def test_an_interrupted_run_keeps_what_it_has() -> None:
    async with rough_server() as server:
        watch = Watch()
        loads = (Load(concurrency=1, requests=100), Load(concurrency=2, requests=100))
        task = asyncio.create_task(run(settings(server.url, *loads), {}, watch))

        def interrupt() -> None:
            if len(watch.rows) == 7:
                server.script = silence
                task.get_loop().call_soon(task.cancel)

        watch.on_row = interrupt
        result = await task
    assert len(result.points) == 1
    assert result.points[0].interrupted
    summary = result.points[0].summary
    assert summary.completed >= 7
    assert summary.cancelled <= 1
    assert summary.failed == 0


async def test_what_the_server_does_not_take_is_left_out() -> None:
    async def strict(asked: Asked) -> None:
        assert "ignore_eos" not in asked.body
        assert asked.body["stream_options"] == {"include_usage": True}
        await plain(asked)

    async with rough_server(strict) as server:
        server.refuses = {"ignore_eos", "continuous_usage_stats"}
        result = await measure(server.url)
    assert result.points[0].summary.completed == 12
    assert not result.target.ignore_eos
    assert not result.target.chunk_usage


async def test_without_usage_chunks_are_counted() -> None:
    async def no_usage(asked: Asked) -> None:
        asked.stream()
        for text in "abc":
            asked.say(text)
        asked.say("", "stop")
        asked.end()

    async with rough_server(no_usage) as server:
        result = await measure(server.url)
    summary = result.points[0].summary
    assert summary.uncounted == 12
    assert summary.output_tokens == 36


# --- the stub ----------------------------------------------------------------------------------


async def test_the_stub_and_the_client_agree() -> None:
    stub = Stub(Delays(first_s=0.002, gap_s=0.001))
    server, url = await stub.start()
    result = await measure(url, Load(arrivals=AT_ONCE, requests=10))
    server.close()
    assert result.points[0].summary.completed == 10
    served = [each for each in stub.served.values() if len(each.sent_at) > 1]
    assert sum(len(each.sent_at) for each in served) == result.points[0].summary.output_tokens
    for row in result.points[0].rows:
        # What the client sees cannot be shorter than what the stub did.
        assert row.chunks_s[0] - row.sent_s >= 0.002
        assert row.end_s - row.chunks_s[0] >= 0.0
        assert len(row.chunks_s) == row.planned_output


def test_self_check() -> None:
    ran = cli("--self-check")
    assert ran.exit_code == 0, ran.output
    for line in ("added TTFT", "ITL error", "schedule lag", "most requests", "most chunks"):
        assert line in ran.output


# --- the command -------------------------------------------------------------------------------


async def test_the_command_writes_what_compare_reads(served: Served, tmp_path: Path) -> None:
    a, b, page = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "a.html"
    common = ("--url", served.url, "--rate", "200", "--requests", "8", "--output-len", "4")
    more = ("--goodput", "ttft:5000", "--warmup", "1", "--save", str(a), "--html", str(page))
    ran = await asyncio.to_thread(cli, *common, *more, "--api-key", "secret-key")
    assert ran.exit_code == 0, ran.output
    assert "Successful requests:                     8" in ran.output
    assert "Request goodput" in ran.output
    assert load(a).points[0].summary.completed == 8
    assert "secret-key" not in a.read_text()
    assert page.read_text().startswith("<!doctype html>")
    ran = await asyncio.to_thread(cli, *common, "--save", str(b))
    assert ran.exit_code == 0, ran.output
    for sides, runs in (((a, b), [1, 1]), ((f"{a},{b}", tmp_path / "?.json"), [2, 2])):
        compared = await asyncio.to_thread(cli, "compare", *map(str, sides), "--output", str(page))
        assert compared.exit_code == 0, compared.output
        assert "95 % interval" in compared.output
        ratios = json.loads(page.read_text())
        assert {each["measure"] for each in ratios} >= {"ttft p50 ms"}
        assert all(each["runs"] == runs for each in ratios)


async def test_the_command_writes_what_other_programs_read(served: Served, tmp_path: Path) -> None:
    table, metrics = tmp_path / "a.csv", tmp_path / "a.prom"
    metrics.write_text("of an earlier run")
    ran = await asyncio.to_thread(
        cli,
        *("--url", served.url, "--rate", "200", "--requests", "8", "--output-len", "4"),
        *("--csv", str(table), "--prometheus", str(metrics)),
    )
    assert ran.exit_code == 0, ran.output
    assert len(table.read_text().splitlines()) == 9
    assert 'argosy_bench_requests{load="rate 200"' in metrics.read_text()
    assert set(os.listdir(tmp_path)) == {"a.csv", "a.prom"}  # noqa: PTH208 - blocks no one


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
    assert result.points[0].summary.completed == 12


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--url", "localhost:1"), "is no URL"),
        (("--url", "http://127.0.0.1:99999"), "is no URL"),
        (("--url", "http://127.0.0.1:9"), "Start the server"),
        (("--url", "unix:"), "is no URL"),
        (("--url", "unix:/nonexistent/a.sock"), "unix:/nonexistent/a.sock"),
        (("--rate", "0"), "numbers above 0"),
        (("--rate", "x"), "numbers above 0"),
        (("--concurrency", "1.5"), "whole number"),
        (("--input-len", "zipf:1"), "is no length"),
        (("--goodput", "speed:5"), "is no objective"),
        (("--trace", "/nonexistent"), "Cannot read the trace"),
        (("--prompts", "/nonexistent"), "Cannot read the prompts"),
        (("--extra-body", "{"), "is no JSON"),
        (("--extra-body", "[]"), "takes a JSON object"),
        (("--header", "nothing"), "is no header"),
        (("--save", "/nonexistent/a.json"), "no directory"),
        (("--find-rate", "--rate", "1"), "needs objectives"),
        (("--csv", "/nonexistent/a.csv"), "no directory"),
        (("compare", "/nonexistent", "/nonexistent"), "Cannot read"),
        (("compare", "/nonexistent/*.json", "/nonexistent"), "No file is like"),
    ],
)
def test_refusals_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    ran = cli(*arguments)
    assert ran.exit_code == 2
    assert sentence in ran.output
    assert "Traceback" not in ran.output
    assert len(ran.output.strip().splitlines()) == 1


async def test_a_wrong_model_is_refused(served: Served) -> None:
    ran = await asyncio.to_thread(cli, "--url", served.url, "--model", "none")
    assert ran.exit_code == 2
    assert f"it has {MODEL}" in ran.output


async def test_a_malformed_trace_is_refused(served: Served, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": "soon"}\n')
    ran = await asyncio.to_thread(cli, "--url", served.url, "--trace", str(trace))
    assert ran.exit_code == 2
    assert "line 1" in ran.output


async def test_what_is_no_openai_server_is_refused(served: Served) -> None:
    with pytest.raises(BenchError, match="list its models"):
        await measure(f"{served.url}/somewhere")


async def test_a_run_without_an_answer_is_no_success() -> None:
    async with rough_server(refused) as server:
        ran = await asyncio.to_thread(
            cli, "--url", server.url, "--concurrency", "1", "--requests", "3"
        )
    assert ran.exit_code == 1
    assert "slow down" in ran.output
