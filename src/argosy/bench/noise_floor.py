"""Noise floor of the client: its timestamps are compared with those of a stub server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator

import msgspec

from argosy.bench.client import BenchClient
from argosy.bench.distributions import ArrivalProcess, LengthDistribution
from argosy.bench.driver import Driver
from argosy.bench.errors import BenchError
from argosy.bench.metrics import RequestRow, SampleStats, compute_stats
from argosy.bench.plan import LoadPlan
from argosy.bench.response import JsonResponse
from argosy.bench.stub_server import STUB_MODEL, StubDelays, StubRequestTimes
from argosy.bench.target import BenchTarget, RequestBodyBuilder
from argosy.bench.workload import LoadSpec, Workload, build_plan
from argosy.protocol import parse_endpoint

_RUN_ID = "check"
_STUB_DELAYS = StubDelays(first_token_s=0.05, token_gap_s=0.01)
SCHEDULED_REQUESTS = 200
FLOOD_REQUESTS = 3000


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Errors that the client adds. Times are in milliseconds unless the name has another unit."""

    requests: int
    added_ttft: SampleStats
    """TTFT from the actual send, minus the stub's time from request to first token."""
    itl_error: SampleStats
    """Absolute difference between received and sent gaps."""
    lag: SampleStats
    max_requests_per_s: float
    """Rate of one-token responses, 32 in flight, with stub and client on this machine."""
    max_chunks_per_s: float
    """Chunk rate of streams without delay, 32 in flight."""
    cpu_us_per_chunk: float
    """This process's processor time per chunk of these streams, in microseconds."""


async def measure_noise_floor(seed: int = 0) -> NoiseFloor:
    """Measure the noise floor against a stub in its own process. Takes about ten seconds."""
    load = LoadSpec(arrivals=ArrivalProcess(rate=40), requests=SCHEDULED_REQUESTS)
    plan = _build_plan(load, 16, seed)
    async with _run_stub(_STUB_DELAYS) as client:
        rows, _ = await _run_plan(client, plan)
        response = await client.get("/served", JsonResponse())
        stub_times = msgspec.json.decode(response.body, type=dict[str, StubRequestTimes])
    async with _run_stub(StubDelays()) as client:
        flood = LoadSpec(concurrency=32, requests=FLOOD_REQUESTS)
        single_rows, single_s = await _run_plan(client, _build_plan(flood, 1, seed))
        before = time.process_time()
        streams = LoadSpec(concurrency=32, requests=96)
        stream_rows, stream_s = await _run_plan(client, _build_plan(streams, 400, seed))
        cpu_s = time.process_time() - before
    chunks = sum(len(row.chunks_s) for row in stream_rows)
    if not chunks or len(rows) != plan.request_count or any(row.outcome != "ok" for row in rows):
        raise BenchError("The self-check failed: the stub server did not answer every request.")
    return NoiseFloor(
        requests=len(rows),
        added_ttft=compute_stats(
            [_added_ttft_ms(row, stub_times[f"{_RUN_ID}-{row.index}"]) for row in rows]
        ),
        itl_error=compute_stats(
            [
                error
                for row in rows
                for error in _gap_errors_ms(row, stub_times[f"{_RUN_ID}-{row.index}"])
            ]
        ),
        lag=compute_stats([1e3 * (row.sent_s - row.scheduled_s) for row in rows]),
        max_requests_per_s=len(single_rows) / single_s,
        max_chunks_per_s=chunks / stream_s,
        cpu_us_per_chunk=1e6 * cpu_s / chunks,
    )


def render_noise_floor(floor: NoiseFloor) -> str:
    """Return the noise floor as a table."""
    lines = [f"{'':<28}{'p50':>9}{'p90':>9}{'p99':>9}{'p99.9':>9}{'max':>9}"]
    for name, stats in (
        ("added TTFT (ms)", floor.added_ttft),
        ("ITL error (ms)", floor.itl_error),
        ("schedule lag (ms)", floor.lag),
    ):
        numbers = (stats.p50, stats.p90, stats.p99, stats.p999, stats.max)
        lines.append(f"{name:<28}" + "".join(f"{number:>9.3f}" for number in numbers))
    return "\n".join(
        [
            *lines,
            f"maximum requests per second: {floor.max_requests_per_s:,.0f}",
            f"maximum chunks per second:   {floor.max_chunks_per_s:,.0f}",
            f"processor time per chunk:    {floor.cpu_us_per_chunk:.1f} us",
            "The stub shares this machine. With a server on another machine the rates are higher.",
        ]
    )


def _build_plan(load: LoadSpec, output: int, seed: int) -> LoadPlan:
    prompts, outputs = (LengthDistribution("fixed", tokens) for tokens in (32, output))
    return build_plan(Workload(input=prompts, output=outputs), load, seed)


async def _run_plan(client: BenchClient, plan: LoadPlan) -> tuple[list[RequestRow], float]:
    driver = Driver(
        plan,
        client,
        RequestBodyBuilder(BenchTarget(model=STUB_MODEL)),
        clock=time.perf_counter,
        on_row=lambda _: None,
        run_id=_RUN_ID,
    )
    before = time.perf_counter()
    rows = await driver.run()
    if driver.interrupted:
        raise asyncio.CancelledError
    return rows, time.perf_counter() - before


def _added_ttft_ms(row: RequestRow, stub_times: StubRequestTimes) -> float:
    return 1e3 * (
        (row.chunks_s[0] - row.sent_s) - (stub_times.token_sent_at[0] - stub_times.received_at)
    )


def _gap_errors_ms(row: RequestRow, stub_times: StubRequestTimes) -> list[float]:
    received = itertools.pairwise(row.chunks_s)
    sent = itertools.pairwise(stub_times.token_sent_at)
    return [
        1e3 * abs((r1 - r0) - (s1 - s0)) for (r0, r1), (s0, s1) in zip(received, sent, strict=True)
    ]


@contextlib.asynccontextmanager
async def _run_stub(delays: StubDelays) -> AsyncIterator[BenchClient]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from argosy.bench.stub_server import main; main()"),
        msgspec.json.encode(delays).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # only this process handles Ctrl-C, and then ends the stub
    )
    if process.stdout is None or process.stdin is None:
        raise BenchError("The self-check failed: the stub server has no pipes.")
    try:
        url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise BenchError("The self-check failed: the stub server did not start.")
        client = BenchClient(parse_endpoint(url), time.perf_counter, {}, 60.0)
        with contextlib.closing(client):
            yield client
    finally:
        process.stdin.close()
        await process.wait()
