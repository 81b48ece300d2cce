"""The client's own noise floor: its stamps beside those of a stub server that says when it sent what."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator

import msgspec

from argosy.bench.arrivals import Arrivals
from argosy.bench.client import Client
from argosy.bench.driver import Driver
from argosy.bench.errors import BenchError
from argosy.bench.lengths import Lengths
from argosy.bench.metrics import Row, Stats, stats
from argosy.bench.plan import Plan
from argosy.bench.request_body_builder import Writer
from argosy.bench.response import Plain
from argosy.bench.stub_server import MODEL, Delays, Served
from argosy.bench.target import Target
from argosy.bench.workload import Load, Workload, make_plan
from argosy.protocol import parse_endpoint

_RUN = "check"
_SLOW = Delays(first_s=0.05, gap_s=0.01)


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """What the client adds. Milliseconds where nothing else is said."""

    requests: int
    added_ttft: Stats
    """TTFT from the actual send, less the time from request to first token inside the stub."""
    itl_error: Stats
    """Absolute difference between a gap as received and as sent."""
    lag: Stats
    max_requests_per_s: float
    """Answers of one token, 32 at once, stub and client on this machine."""
    max_chunks_per_s: float
    """Streams without delay, 32 at once."""
    cpu_us_per_chunk: float
    """Processor time of this process for each of those chunks."""


async def self_check(seed: int = 0) -> NoiseFloor:
    """Measure against a stub in a process of its own; takes about ten seconds."""
    load = Load(arrivals=Arrivals(rate=40), requests=200)
    plan = make_plan(Workload(input=Lengths("fixed", 32), output=Lengths("fixed", 16)), load, seed)
    async with _stub(_SLOW) as client:
        rows, _ = await _drive(client, plan)
        reply = await client.get("/served", Plain())
        served = msgspec.json.decode(reply.body, type=dict[str, Served])
    async with _stub(Delays()) as client:
        ones, ones_s = await _drive(client, _flood(requests=3000, output=1, seed=seed))
        before = time.process_time()
        many, many_s = await _drive(client, _flood(requests=96, output=400, seed=seed))
        cpu_s = time.process_time() - before
    chunks = sum(len(row.chunks_s) for row in many)
    if not chunks or len(rows) != plan.size or any(row.outcome != "ok" for row in rows):
        raise BenchError("The self-check failed: its own server did not answer every request.")
    return NoiseFloor(
        requests=len(rows),
        added_ttft=stats([_added_ttft(row, served[f"{_RUN}-{row.index}"]) for row in rows]),
        itl_error=stats(
            [error for row in rows for error in _gap_errors(row, served[f"{_RUN}-{row.index}"])]
        ),
        lag=stats([1e3 * (row.sent_s - row.scheduled_s) for row in rows]),
        max_requests_per_s=len(ones) / ones_s,
        max_chunks_per_s=chunks / many_s,
        cpu_us_per_chunk=1e6 * cpu_s / chunks,
    )


def noise_report(floor: NoiseFloor) -> str:
    """For people."""
    lines = [f"{'':<28}{'p50':>9}{'p90':>9}{'p99':>9}{'p99.9':>9}{'max':>9}"]
    for name, each in (
        ("added TTFT (ms)", floor.added_ttft),
        ("ITL error (ms)", floor.itl_error),
        ("schedule lag (ms)", floor.lag),
    ):
        numbers = (each.p50, each.p90, each.p99, each.p999, each.max)
        lines.append(f"{name:<28}" + "".join(f"{number:>9.3f}" for number in numbers))
    return "\n".join(
        [
            *lines,
            f"most requests per second:    {floor.max_requests_per_s:,.0f}",
            f"most chunks per second:      {floor.max_chunks_per_s:,.0f}",
            f"processor time per chunk:    {floor.cpu_us_per_chunk:.1f} us",
            "The stub shares this machine: with the server elsewhere the rates are higher.",
        ]
    )


def _flood(*, requests: int, output: int, seed: int) -> Plan:
    workload = Workload(input=Lengths("fixed", 32), output=Lengths("fixed", output))
    return make_plan(workload, Load(concurrency=32, requests=requests), seed)


async def _drive(client: Client, plan: Plan) -> tuple[list[Row], float]:
    target = Target(
        model=MODEL,
        api="completions",
        ignore_eos=True,
        chunk_usage=True,
        temperature=0.0,
        extra_body={},
    )
    driver = Driver(
        plan,
        client,
        Writer(target),
        clock=time.perf_counter,
        on_row=lambda _: None,
        run_id=_RUN,
    )
    before = time.perf_counter()
    rows = await driver.run()
    if driver.interrupted:
        raise asyncio.CancelledError
    return rows, time.perf_counter() - before


def _added_ttft(row: Row, served: Served) -> float:
    return 1e3 * ((row.chunks_s[0] - row.sent_s) - (served.sent_at[0] - served.asked_at))


def _gap_errors(row: Row, served: Served) -> list[float]:
    received = itertools.pairwise(row.chunks_s)
    sent = itertools.pairwise(served.sent_at)
    return [
        1e3 * abs((r1 - r0) - (s1 - s0)) for (r0, r1), (s0, s1) in zip(received, sent, strict=True)
    ]


@contextlib.asynccontextmanager
async def _stub(delays: Delays) -> AsyncIterator[Client]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from argosy.bench.stub_server import main; main()"),
        msgspec.json.encode(delays).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is told to this process, which ends it
    )
    if process.stdout is None or process.stdin is None:
        raise BenchError("The self-check failed: its own server has no pipes.")
    try:
        url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise BenchError("The self-check failed: its own server did not start.")
        client = Client(parse_endpoint(url), time.perf_counter, {}, 60.0)
        with contextlib.closing(client):
            yield client
    finally:
        process.stdin.close()
        await process.wait()
