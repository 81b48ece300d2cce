"""From settings to a result: meets the server, runs each load, searches where that was asked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from typing import Protocol

import msgspec

from argosy.bench.arrivals import ArrivalProcess
from argosy.bench.client import BenchClient
from argosy.bench.driver import Driver
from argosy.bench.errors import BenchError
from argosy.bench.metrics import Objectives, RequestRow, summarize
from argosy.bench.plan import LoadPlan
from argosy.bench.rate_search import search_rate
from argosy.bench.request_body_builder import RequestBodyBuilder
from argosy.bench.result import (
    BenchResult,
    BenchSettings,
    RunResult,
    describe_machine,
    utc_timestamp,
)
from argosy.bench.target import probe_target
from argosy.bench.workload import LoadSpec, build_plan
from argosy.process import raise_file_limit
from argosy.protocol import parse_endpoint


class ProgressListener(Protocol):
    """Sees a benchmark go by."""

    def on_run_start(self, label: str, requests: int) -> None:
        """A run of at most `requests` requests, warm-up included."""
        ...

    def on_request_end(self, row: RequestRow, in_flight: int) -> None:
        """A request has ended."""
        ...


async def run_benchmark(
    settings: BenchSettings, headers: dict[str, str], listener: ProgressListener
) -> BenchResult:
    """Carry it out. Raises BenchError where nothing can be measured; failures of requests are data.

    `headers` go with every request and are not recorded, for they may hold a key.
    """
    bench = _BenchRunner(settings, headers, listener)
    try:
        return await bench.run()
    finally:
        bench.close()


class _BenchRunner:
    def __init__(
        self, settings: BenchSettings, headers: dict[str, str], watcher: ProgressListener
    ) -> None:
        self._settings = settings
        self._listener = watcher
        raise_file_limit()
        try:
            address = parse_endpoint(settings.target_options.url)
        except ValueError as error:
            raise BenchError(f"{error}.") from error
        self._client = BenchClient(address, time.perf_counter, headers, settings.timeout_s)
        self._runs: list[RunResult] = []

    def close(self) -> None:
        self._client.close()

    async def run(self) -> BenchResult:
        settings = self._settings
        if settings.find_rate and settings.objectives is None:
            raise BenchError("A search needs objectives: give --goodput ttft:200,tpot:50.")
        if settings.find_rate and len(settings.loads) > 1:
            raise BenchError("A search begins at one rate: give one --rate, and one --concurrency.")
        # Plans come first: what is wrong with files and options is said before the server is asked.
        plans = [
            build_plan(settings.workload, each, settings.seed, run)
            for run, each in enumerate(settings.loads)
        ]
        talks = settings.workload.turns > 1
        writer = RequestBodyBuilder(
            await probe_target(self._client, settings.target_options, has_conversations=talks)
        )
        best = None
        if settings.find_rate:
            best = await self._search_rate(writer, settings.loads[0])
        else:
            for each, plan in zip(settings.loads, plans, strict=True):
                if (await self._run_load(writer, each, plan)).interrupted:
                    break
        return BenchResult(
            version=version("argosy"),
            created_at=utc_timestamp(),
            machine=describe_machine(),
            settings=settings,
            target=writer.target,
            runs=self._runs,
            best_rate=best,
        )

    async def _search_rate(self, writer: RequestBodyBuilder, template: LoadSpec) -> float | None:
        first = template.arrivals
        if first is None or first.rate is None:
            raise BenchError("A search begins at a rate: give --rate 1, for example.")
        search = search_rate(first.rate, self._settings.precision)
        rate = next(search)
        while True:
            arrivals = msgspec.structs.replace(first, rate=rate)
            each = msgspec.structs.replace(template, arrivals=arrivals)
            done = len(self._runs)
            plan = build_plan(self._settings.workload, each, self._settings.seed, done)
            point = await self._run_load(writer, each, plan)
            if point.interrupted:
                return max(
                    (_configured_rate(p) for p in self._runs if p.met_objectives), default=None
                )
            try:
                rate = search.send(bool(point.met_objectives))
            except StopIteration as end:
                best: float | None = end.value
                return best

    async def _run_load(
        self, writer: RequestBodyBuilder, each: LoadSpec, plan: LoadPlan
    ) -> RunResult:
        settings = self._settings
        label = describe_load(each)
        self._listener.on_run_start(label, plan.request_count + len(plan.warmup))
        started = utc_timestamp()
        give_up: Callable[[RequestRow], bool] = _never_stop
        if settings.find_rate and settings.objectives is not None:
            give_up = _EarlyStop(settings.objectives, settings.min_attainment, plan).is_lost
        driver = Driver(
            plan,
            self._client,
            writer,
            clock=time.perf_counter,
            on_row=lambda row: self._on_row(driver, row, give_up),
            run_id=f"bench-{uuid.uuid4().hex[:12]}",
        )
        rows = await driver.run()
        summary = summarize(rows, settings.objectives)
        share = summary.attainment
        point = RunResult(
            label=label,
            load=each,
            plan_digest=plan.digest(),
            started_at=started,
            summary=summary,
            rows=rows,
            interrupted=driver.interrupted,
            met_objectives=None
            if share is None
            else share >= settings.min_attainment and not driver.stopped,
        )
        self._runs.append(point)
        return point

    def _on_row(
        self, driver: Driver, row: RequestRow, should_stop: Callable[[RequestRow], bool]
    ) -> None:
        self._listener.on_request_end(row, driver.in_flight)
        if not driver.stopped and should_stop(row):
            driver.stop()


class _EarlyStop:
    """Ends a trial of a search once its outcome is certain."""

    def __init__(self, objectives: Objectives, min_attainment: float, plan: LoadPlan) -> None:
        self._objectives = objectives
        self._max_failed = int((1 - min_attainment) * plan.request_count + 1e-9)
        self._failed = 0

    def is_lost(self, row: RequestRow) -> bool:
        """Whether the objectives cannot hold any more."""
        if row.phase == "measured" and not self._objectives.is_met_by(row):
            self._failed += 1
        return self._failed > self._max_failed


def _never_stop(_row: RequestRow) -> bool:
    return False


def _configured_rate(point: RunResult) -> float:
    arrivals = point.load.arrivals
    return 0.0 if arrivals is None or arrivals.rate is None else arrivals.rate


def describe_load(load: LoadSpec) -> str:
    """A short name: `rate 4`, `concurrency 8`, `all at once`, `trace`."""
    limit = "" if load.concurrency is None else f", at most {load.concurrency} at once"
    match load.arrivals:
        case None if load.concurrency is not None:
            return f"concurrency {load.concurrency}"
        case None:
            return "trace"
        case ArrivalProcess(rate=None):
            return f"all at once{limit}"
        case ArrivalProcess(rate=rate):
            return f"rate {rate:.4g}{limit}"
