"""Runner of a benchmark: probes the server, runs each load, and searches for a rate if requested."""

from __future__ import annotations

import time
import uuid
from importlib.metadata import version
from typing import Protocol

import msgspec

from argosy.bench.client import BenchClient
from argosy.bench.distributions import ArrivalProcess
from argosy.bench.draft_counts import read_draft_counts
from argosy.bench.driver import Driver
from argosy.bench.errors import BenchError
from argosy.bench.metrics import RequestRow, summarize
from argosy.bench.objectives import search_rate
from argosy.bench.plan import LoadPlan
from argosy.bench.result import (
    BenchResult,
    BenchSettings,
    RunResult,
    describe_machine,
    utc_timestamp,
)
from argosy.bench.target import RequestBodyBuilder, probe_target
from argosy.bench.workload import LoadSpec, build_plan
from argosy.process import raise_file_limit
from argosy.protocol import parse_endpoint


class ProgressListener(Protocol):
    """Callbacks for the progress of a benchmark."""

    def on_run_start(self, label: str, requests: int) -> None:
        """A run starts with at most `requests` requests, warm-up included."""
        ...

    def on_request_end(self, row: RequestRow, in_flight: int) -> None:
        """A request has ended."""
        ...


async def run_benchmark(
    settings: BenchSettings, headers: dict[str, str], listener: ProgressListener
) -> BenchResult:
    """Run a benchmark. Results do not contain the headers of its requests, because they may hold a key.

    Raises BenchError if nothing can be measured. Failures of single requests are part of the result.
    """
    runner = _BenchRunner(settings, headers, listener)
    try:
        return await runner.run()
    finally:
        runner.close()


class _BenchRunner:
    def __init__(
        self, settings: BenchSettings, headers: dict[str, str], listener: ProgressListener
    ) -> None:
        self._settings = settings
        self._listener = listener
        raise_file_limit()
        try:
            address = parse_endpoint(settings.target.url)
        except ValueError as error:
            raise BenchError(f"{error}.") from error
        self._client = BenchClient(address, time.perf_counter, headers, settings.timeout_s)
        self._runs: list[RunResult] = []

    def close(self) -> None:
        self._client.close()

    async def run(self) -> BenchResult:
        settings = self._settings
        if settings.find_rate and settings.objectives is None:
            raise BenchError("--find-rate needs objectives: give --goodput ttft:200,tpot:50.")
        if settings.find_rate and len(settings.loads) > 1:
            raise BenchError(
                "--find-rate starts at one rate: give one --rate, and one --concurrency."
            )
        # Plans are built first, so that errors in files and options are reported before any request.
        plans = [
            build_plan(settings.workload, load, settings.seed, run)
            for run, load in enumerate(settings.loads)
        ]
        has_conversations = settings.workload.turns > 1
        body_builder = RequestBodyBuilder(
            await probe_target(self._client, settings.target, has_conversations=has_conversations)
        )
        best_rate = None
        if settings.find_rate:
            best_rate = await self._search_rate(body_builder, settings.loads[0])
        else:
            for load, plan in zip(settings.loads, plans, strict=True):
                if (await self._run_load(body_builder, load, plan)).interrupted:
                    break
        return BenchResult(
            version=version("argosy"),
            created_at=utc_timestamp(),
            machine=describe_machine(),
            settings=settings,
            target=body_builder.target,
            runs=self._runs,
            best_rate=best_rate,
        )

    async def _search_rate(
        self, body_builder: RequestBodyBuilder, template: LoadSpec
    ) -> float | None:
        arrivals_template = template.arrivals
        if arrivals_template is None or arrivals_template.rate is None:
            raise BenchError("--find-rate needs a rate to start at: give --rate 1, for example.")
        search = search_rate(arrivals_template.rate, self._settings.precision)
        rate = next(search)
        tried: list[tuple[float, RunResult]] = []
        while True:
            arrivals = msgspec.structs.replace(arrivals_template, rate=rate)
            load = msgspec.structs.replace(template, arrivals=arrivals)
            run_index = len(self._runs)
            plan = build_plan(self._settings.workload, load, self._settings.seed, run_index)
            run = await self._run_load(body_builder, load, plan)
            tried.append((rate, run))
            if run.interrupted:
                return max((rate for rate, run in tried if run.met_objectives), default=None)
            try:
                rate = search.send(bool(run.met_objectives))
            except StopIteration as end:
                best_rate: float | None = end.value
                return best_rate

    async def _run_load(
        self, body_builder: RequestBodyBuilder, load: LoadSpec, plan: LoadPlan
    ) -> RunResult:
        settings = self._settings
        label = describe_load(load)
        self._listener.on_run_start(label, plan.request_count + len(plan.warmup))
        started_at = utc_timestamp()
        objectives = settings.objectives if settings.find_rate else None
        allowed_misses = int((1 - settings.min_attainment) * plan.request_count + 1e-9)
        misses = 0

        def on_row(row: RequestRow) -> None:
            """Report a request. A trial of a search stops as soon as it can no longer meet the objectives."""
            nonlocal misses
            self._listener.on_request_end(row, driver.in_flight)
            if objectives is not None and row.phase == "measured":
                misses += not objectives.is_met_by(row)
                if misses > allowed_misses and not driver.stopped:
                    driver.stop()

        driver = Driver(
            plan,
            self._client,
            body_builder,
            clock=time.perf_counter,
            on_row=on_row,
            run_id=f"bench-{uuid.uuid4().hex[:12]}",
        )
        drafts_before = await read_draft_counts(self._client)
        rows = await driver.run()
        drafts = (await read_draft_counts(self._client)).since(drafts_before)
        summary = summarize(rows, settings.objectives)
        attainment = summary.attainment
        result = RunResult(
            label=label,
            load=load,
            plan_digest=plan.digest(),
            started_at=started_at,
            summary=summary,
            rows=rows,
            tokens_per_step=drafts.tokens_per_step,
            draft_acceptance=drafts.acceptance,
            draft_saved_s=drafts.saved_s,
            interrupted=driver.interrupted,
            met_objectives=None
            if attainment is None
            else attainment >= settings.min_attainment and not driver.stopped,
        )
        self._runs.append(result)
        return result


def describe_load(load: LoadSpec) -> str:
    """Return a short name of the load: `rate 4`, `concurrency 8`, `all at once` or `trace`."""
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
