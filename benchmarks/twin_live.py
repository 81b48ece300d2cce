"""Compare the twin with a live engine and a live fleet of this machine. Prints JSON lines and a table.

    python -m benchmarks.record twin_live     (about 5 minutes on an idle machine)

The bundled model is served by one replica, and then by three behind the gateway, of which one is killed (`kill -9`).
For each of them, prices and the time outside the engine are fitted to one run (`argosy twin fit`). The twin then
predicts another run with another rate, other lengths and another time of the kill. `argosy bench` and the twin read the
same trace file. While the killed replica starts, it takes CPU time from the others, as they share the CPUs. By how much
their steps then take longer is measured in the first run too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from argosy.bench import RunResult, RunSummary, load_result
from argosy.engine.scheduling import StepRecord
from argosy.twin import (
    Engine,
    Fault,
    FittedCost,
    PoolSettings,
    Scenario,
    TwinResult,
    Workload,
    fit_cost,
    fit_request_time,
    read_steps,
    run_with_intervals,
    write_scenario,
)
from benchmarks.server_process import RunningServer, run_server, wait_for_replicas

MAX_SEQS = 16
KV_BLOCKS = 2048
DETECTION_S = 1.0
"""Mean time until the simulated controller starts a replica again that has exited."""
GOALS = {"tpot mean": 5.0, "ttft p50": 10.0, "ttft p99": 20.0}
"""Largest errors in percent that section 7.2 of the design allows."""


class Load(NamedTuple):
    """Requests of a run."""

    seed: int
    rate: float
    """Mean requests per second, of a Poisson process."""
    prompt: float
    """Median of the prompt tokens."""
    output: float
    kill_at: float | None
    """Part of the run after which a replica is killed."""


class Setup(NamedTuple):
    """A deployment that is measured twice."""

    name: str
    replicas: int
    fitted: Load
    predicted: Load


SETUPS = (
    Setup("engine", 1, Load(1, 3.0, 150, 40, None), Load(2, 4.5, 220, 60, None)),
    Setup("fleet", 3, Load(3, 1.5, 150, 40, 0.4), Load(4, 2.0, 220, 60, 0.55)),
)


class LiveRun(NamedTuple):
    """Measurements of a run."""

    run: RunResult
    killed_s: float | None
    """Time of the kill after the start of the run."""
    killed_at: float
    """The same on the monotonic clock."""
    restart_s: float
    """Time from the kill until all replicas were ready."""


def write_trace(path: Path, load: Load, seconds: float) -> None:
    """Write the requests of a load as a trace in Mooncake's format, which `argosy bench` and the twin read."""
    draw = random.Random(load.seed)
    lines, at_s = [], 0.0
    while at_s < seconds:
        request = {
            "timestamp": round(1000 * at_s),
            "input_length": max(8, min(1000, round(draw.lognormvariate(0, 0.7) * load.prompt))),
            "output_length": max(4, min(400, round(draw.lognormvariate(0, 0.6) * load.output))),
        }
        lines.append(json.dumps(request))
        at_s += draw.expovariate(load.rate)
    path.write_text("\n".join(lines) + "\n")


class Restart(NamedTuple):
    """Restart of a replica on the CPUs that the others use."""

    seconds: float
    slowdown: float
    """Factor by which the steps of the others take longer meanwhile."""


async def measure(
    server: RunningServer, replicas: int, trace: Path, kill_s: float | None
) -> LiveRun:
    """Send the requests of a trace with `argosy bench`, and kill a busy replica after `kill_s` seconds."""
    result_path = trace.with_suffix(".result.json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "argosy.cli", "bench", "--url", server.url, "--trace", trace),
        *("--save", result_path),
        stdout=asyncio.subprocess.DEVNULL,
        env=os.environ | {"ARGOSY_API_KEY": ""},
    )
    killed, killed_at, restart_s = None, 0.0, 0.0
    if kill_s is not None:
        await asyncio.sleep(kill_s)
        replica = await server.find_busy_replica(random.Random(0))
        replica.kill()
        killed, killed_at = time.time(), time.monotonic()
        await asyncio.sleep(0.5)
        await wait_for_replicas(server, replicas)
        restart_s = time.monotonic() - killed_at
    if await process.wait():
        raise SystemExit("argosy bench failed")
    (run,) = load_result(result_path).runs
    started_at = datetime.fromisoformat(run.started_at).timestamp()
    killed_s = None if killed is None else killed - started_at
    return LiveRun(run, killed_s, killed_at, restart_s)


def describe(
    setup: Setup, trace: Path, seconds: float, live: LiveRun, engine: Engine, restart: Restart
) -> Scenario:
    """Return the scenario of a measured run: its requests and its kill, with the prices and the restart as fitted."""
    faults: list[Fault] = []
    if live.killed_s is not None:
        faults.append(Fault(kind="kill", at_s=round(live.killed_s, 3)))
        faults += [
            Fault(
                kind="slow",
                at_s=round(live.killed_s + 0.01, 3),
                replica=number,
                duration_s=restart.seconds,
                factor=restart.slowdown,
            )
            for number in range(setup.replicas - 1)
        ]
    return Scenario(
        duration_s=seconds + 1.0,
        pool=PoolSettings(
            replicas=setup.replicas, zones=1, start_s=max(0.1, restart.seconds - DETECTION_S)
        ),
        engine=engine,
        workload=Workload(trace=str(trace)),
        faults=tuple(faults),
    )


def fit_restart(live: LiveRun, records: Sequence[StepRecord]) -> tuple[FittedCost, Restart]:
    """Fit the prices to the steps outside the restart, and find by how much those within it take longer."""
    until = live.killed_at + live.restart_s
    within = [record for record in records if live.killed_at < record.ended_at < until]
    outside = [record for record in records if not live.killed_at < record.ended_at < until]
    fitted = fit_cost(outside if len(outside) > len(within) else records)
    expected_s = sum(
        fitted.cost.step_seconds(each.decode_rows, each.context_tokens, each.prefill_chunks)
        for each in within
    )
    slowdown = sum(each.seconds for each in within) / expected_s if len(within) > 20 else 1.0
    return fitted, Restart(round(live.restart_s, 3), max(1.0, round(slowdown, 3)))


async def run_setup(
    setup: Setup, seconds: float, folder: Path
) -> tuple[FittedCost, Scenario, LiveRun]:
    """Measure two runs of a deployment, and return the fit of the first, and the second with its scenario."""
    steps = folder / setup.name
    arguments = [
        *("--replicas", str(setup.replicas), "--speculation", "off", "--max-seqs", str(MAX_SEQS)),
        *("--step-log", str(steps)),
    ]
    traces = [folder / f"{setup.name}-{name}.jsonl" for name in ("fitted", "predicted")]
    loads = (setup.fitted, setup.predicted)
    for trace, load in zip(traces, loads, strict=True):
        write_trace(trace, load, seconds)
    async with run_server(*arguments, state=folder / f"{setup.name}-state") as server:
        await wait_for_replicas(server, setup.replicas)
        runs = []
        for trace, load in zip(traces, loads, strict=True):
            kill_s = None if load.kill_at is None else load.kill_at * seconds
            runs.append(await measure(server, setup.replicas, trace, kill_s))
            if len(runs) == 1:
                records = read_steps([steps])
    first, second = runs
    fitted, restart = fit_restart(first, records)
    engine = Engine(
        max_seqs=MAX_SEQS,
        max_step_tokens=1024,
        max_prefill_fraction=0.25,
        max_model_len=2048,
        kv_blocks=KV_BLOCKS,
        cost=fitted.cost,
        cost_samples=fitted.samples,
    )
    replayed = describe(setup, traces[0], seconds, first, engine, restart)
    engine = replace(engine, request_s=round(fit_request_time(replayed, first.run.rows), 6))
    return fitted, describe(setup, traces[1], seconds, second, engine, restart), second


def list_figures(summary: RunSummary) -> dict[str, tuple[float, str]]:
    """Return the compared figures of a run, each with its key in `TwinResult.intervals`."""
    ttft, tpot = summary.latency["ttft"], summary.latency["tpot"]
    return {
        "tpot mean": (tpot.mean, "tpot.mean"),
        "tpot p50": (tpot.p50, "tpot.p50"),
        "ttft p50": (ttft.p50, "ttft.p50"),
        "ttft p99": (ttft.p99, "ttft.p99"),
        "tokens/s": (summary.output_token_rate, "output_token_rate"),
        "completed": (float(summary.completed), ""),
    }


def compare(setup: Setup, predicted: TwinResult, measured: RunSummary) -> list[dict[str, object]]:
    """Return a row for each figure: predicted with its interval, measured, and the error in percent."""
    rows: list[dict[str, object]] = []
    expected = list_figures(predicted.summary)
    for name, (value, _) in list_figures(measured).items():
        forecast, key = expected[name]
        error = 100.0 * (forecast / value - 1.0) if value else 0.0
        goal = GOALS.get(name)
        rows.append(
            {
                "setup": setup.name,
                "figure": name,
                "predicted": round(forecast, 3),
                "interval": round(predicted.intervals.get(key, 0.0), 3),
                "measured": round(value, 3),
                "error_percent": round(error, 1),
                "goal_percent": goal,
                "met": None if goal is None else abs(error) <= goal,
            }
        )
    return rows


def format_table(rows: list[dict[str, object]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| | Figure | Predicted | Measured | Error | Goal |", "|---|---|---|---|---|---|"]
    for row in rows:
        goal = "" if row["goal_percent"] is None else f"{row['goal_percent']:g} %"
        lines.append(
            f"| {row['setup']} | {row['figure']} | {row['predicted']:.2f} ± {row['interval']:.2f} "
            f"| {row['measured']:.2f} | {row['error_percent']:+.1f} % | {goal} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, predict, and print the rows and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=55.0, help="length of each of four runs")
    parser.add_argument("--setups", nargs="+", default=[each.name for each in SETUPS])
    parser.add_argument("--keep", type=Path, help="folder for traces, step logs and scenarios")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for setup in SETUPS:
            if setup.name not in options.setups:
                continue
            fitted, scenario, live = asyncio.run(run_setup(setup, options.seconds, folder))
            write_scenario(folder / f"{setup.name}.yaml", scenario, f"Predicted {setup.name}")
            predicted = run_with_intervals(scenario, 1)
            if predicted.failure:
                raise SystemExit(predicted.failure)
            compared = compare(setup, predicted, live.run.summary)
            fit = msgspec.to_builtins(replace(fitted, samples=()))
            print(
                json.dumps(
                    {
                        "setup": setup.name,
                        "fit": fit,
                        "request_s": scenario.engine.request_s,
                        "start_s": scenario.pool.start_s,
                        "restart_slowdown": [f.factor for f in scenario.faults if f.kind == "slow"][
                            :1
                        ],
                        "utilisation": round(predicted.utilisation, 3),
                        "load_average": round(os.getloadavg()[0], 2),
                    }
                )
            )
            for row in compared:
                print(json.dumps(row), flush=True)
            rows += compared
    print(format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
