"""From settings to a result: meets the server, runs each load, searches where that was asked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from typing import Protocol

import msgspec

from argosy.bench.arrivals import Arrivals
from argosy.bench.client import Client
from argosy.bench.driver import Driver
from argosy.bench.errors import BenchError
from argosy.bench.metrics import Objectives, Row, summarize
from argosy.bench.plan import Plan
from argosy.bench.rate_search import rate_search
from argosy.bench.request_body_builder import Writer
from argosy.bench.result import Point, Result, Settings, describe_machine, now
from argosy.bench.target import meet
from argosy.bench.workload import Load, make_plan
from argosy.process import raise_file_limit
from argosy.protocol import parse_endpoint


class Watcher(Protocol):
    """Sees a benchmark go by."""

    def begins(self, label: str, requests: int) -> None:
        """A run of at most `requests` requests, warm-up included."""
        ...

    def ended(self, row: Row, in_flight: int) -> None:
        """A request has ended."""
        ...


async def run(settings: Settings, headers: dict[str, str], watcher: Watcher) -> Result:
    """Carry it out. Raises BenchError where nothing can be measured; failures of requests are data.

    `headers` go with every request and are not recorded, for they may hold a key.
    """
    bench = _Bench(settings, headers, watcher)
    try:
        return await bench.run()
    finally:
        bench.close()


class _Bench:
    def __init__(self, settings: Settings, headers: dict[str, str], watcher: Watcher) -> None:
        self._settings = settings
        self._watcher = watcher
        raise_file_limit()
        try:
            address = parse_endpoint(settings.wishes.url)
        except ValueError as error:
            raise BenchError(f"{error}.") from error
        self._client = Client(address, time.perf_counter, headers, settings.timeout_s)
        self._points: list[Point] = []

    def close(self) -> None:
        self._client.close()

    async def run(self) -> Result:
        settings = self._settings
        if settings.search and settings.objectives is None:
            raise BenchError("A search needs objectives: give --goodput ttft:200,tpot:50.")
        if settings.search and len(settings.loads) > 1:
            raise BenchError("A search begins at one rate: give one --rate, and one --concurrency.")
        # Plans come first: what is wrong with files and options is said before the server is asked.
        plans = [
            make_plan(settings.workload, each, settings.seed, run)
            for run, each in enumerate(settings.loads)
        ]
        talks = settings.workload.turns > 1
        writer = Writer(await meet(self._client, settings.wishes, conversations=talks))
        best = None
        if settings.search:
            best = await self._search(writer, settings.loads[0])
        else:
            for each, plan in zip(settings.loads, plans, strict=True):
                if (await self._point(writer, each, plan)).interrupted:
                    break
        return Result(
            version=version("argosy"),
            created=now(),
            machine=describe_machine(),
            settings=settings,
            target=writer.target,
            points=self._points,
            best_rate=best,
        )

    async def _search(self, writer: Writer, template: Load) -> float | None:
        first = template.arrivals
        if first is None or first.rate is None:
            raise BenchError("A search begins at a rate: give --rate 1, for example.")
        search = rate_search(first.rate, self._settings.precision)
        rate = next(search)
        while True:
            arrivals = msgspec.structs.replace(first, rate=rate)
            each = msgspec.structs.replace(template, arrivals=arrivals)
            done = len(self._points)
            plan = make_plan(self._settings.workload, each, self._settings.seed, done)
            point = await self._point(writer, each, plan)
            if point.interrupted:
                return max((_rate(p) for p in self._points if p.held), default=None)
            try:
                rate = search.send(bool(point.held))
            except StopIteration as end:
                best: float | None = end.value
                return best

    async def _point(self, writer: Writer, each: Load, plan: Plan) -> Point:
        settings = self._settings
        label = describe_load(each)
        self._watcher.begins(label, plan.size + len(plan.warmup))
        started = now()
        give_up: Callable[[Row], bool] = _never
        if settings.search and settings.objectives is not None:
            give_up = _Patience(settings.objectives, settings.hold, plan).lost
        driver = Driver(
            plan,
            self._client,
            writer,
            clock=time.perf_counter,
            on_row=lambda row: self._see(driver, row, give_up),
            run_id=f"bench-{uuid.uuid4().hex[:12]}",
        )
        rows = await driver.run()
        summary = summarize(rows, settings.objectives)
        share = summary.attainment
        point = Point(
            label=label,
            load=each,
            plan=plan.digest(),
            started=started,
            summary=summary,
            rows=rows,
            interrupted=driver.interrupted,
            held=None if share is None else share >= settings.hold and not driver.stopped,
        )
        self._points.append(point)
        return point

    def _see(self, driver: Driver, row: Row, give_up: Callable[[Row], bool]) -> None:
        self._watcher.ended(row, driver.in_flight)
        if not driver.stopped and give_up(row):
            driver.stop()


class _Patience:
    """Ends a trial of a search once its outcome is certain."""

    def __init__(self, objectives: Objectives, hold: float, plan: Plan) -> None:
        self._objectives = objectives
        self._may_fail = int((1 - hold) * plan.size + 1e-9)
        self._failed = 0

    def lost(self, row: Row) -> bool:
        """Whether the objectives cannot hold any more."""
        if row.phase == "measured" and not self._objectives.met_by(row):
            self._failed += 1
        return self._failed > self._may_fail


def _never(_row: Row) -> bool:
    return False


def _rate(point: Point) -> float:
    arrivals = point.load.arrivals
    return 0.0 if arrivals is None or arrivals.rate is None else arrivals.rate


def describe_load(load: Load) -> str:
    """A short name: `rate 4`, `concurrency 8`, `all at once`, `trace`."""
    limit = "" if load.concurrency is None else f", at most {load.concurrency} at once"
    match load.arrivals:
        case None if load.concurrency is not None:
            return f"concurrency {load.concurrency}"
        case None:
            return "trace"
        case Arrivals(rate=None):
            return f"all at once{limit}"
        case Arrivals(rate=rate):
            return f"rate {rate:.4g}{limit}"
