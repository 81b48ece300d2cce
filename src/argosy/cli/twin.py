"""`argosy twin`: run the production's decisions under a virtual clock, with simulated requests and faults.

The files may be from anyone: they are bounded as all settings files are, and nothing that they name is started or
connected to. Only a trace that a scenario names is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import to_builtins
from msgspec.structs import replace
from typer import Argument, Option

from argosy.cli.account_lookup import StoreUrl, open_existing_store
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_target import (
    FilesArgument,
    FilesOption,
    load_declaration,
    open_declared,
    parse_revision,
)
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.usage import SinceOption, UntilOption
from argosy.machine_resources import usable_cpus

if TYPE_CHECKING:
    from argosy.bench import MetricName
    from argosy.deployment import ForecastFigure, ForecastRange, PoolForecast
    from argosy.store import Store, UsageFilter, UsageRecord
    from argosy.twin import FittedCost, Scenario, TwinResult

MAX_SEEDS = 1_000_000
MAX_REPLAYED = 200_000
"""Requests of the ledger that are replayed, which bounds memory and time."""
MAX_FORECAST_SEEDS = 20
DAY_S = 86_400.0
SHOWN_LATENCIES: tuple[MetricName, ...] = ("ttft", "tpot", "e2e")

app = typer.Typer(
    help="Digital twin: the fleet's own decisions under a virtual clock.", no_args_is_help=True
)

ScenarioFiles = Annotated[
    list[Path],
    Argument(
        metavar="SCENARIO...",
        help="YAML files; each overrides the settings of those before it.",
        exists=True,
        dir_okay=False,
    ),
]

ChangesOption = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="SETTING=VALUE",
        help="Change a setting, such as pool.replicas=8. May be repeated.",
    ),
]


@app.callback()
def twin() -> None:
    """Run simulated requests and faults through the production's own scheduler, gateway and controller."""


@app.command()
def run(
    scenario_files: ScenarioFiles,
    *,
    seed: Annotated[int, Option(min=0, help="First seed.")] = 1,
    seeds: Annotated[int, Option(min=1, max=MAX_SEEDS, help="Number of seeds to run.")] = 1,
    jobs: Annotated[
        int | None, Option(min=1, max=256, help="Processes; by default one for each CPU.")
    ] = None,
    changes: ChangesOption = None,
    save_failure: Annotated[
        Path | None,
        Option(help="Shrink the first failing seed, and write it as a scenario to this file."),
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Run a scenario, and show latencies, failures, utilisation and a hash of all that happened.

    Exits with status 1 if an invariant did not hold for a seed.
    """
    from argosy.twin import change_scenario, read_scenario, run_with_intervals

    try:
        scenario = change_scenario(read_scenario(scenario_files), changes or ())
        if seeds == 1:
            results = [run_with_intervals(scenario, seed)]
        else:
            results = list(_run_seeds(scenario, range(seed, seed + seeds), jobs))
    except ValueError as error:
        fail(str(error))
    failed = [result for result in results if result.failure]
    if json:
        print_json(results)
    elif seeds == 1:
        _print_result(results[0])
    else:
        _print_seeds(results)
    if not failed:
        return
    if save_failure is not None:
        _save_failure(scenario, failed[0], save_failure)
    raise typer.Exit(EXIT_FAILURE)


@app.command()
def replay(
    scenario_files: ScenarioFiles,
    *,
    store: StoreUrl = None,
    since: SinceOption = None,
    until: UntilOption = None,
    model: Annotated[str | None, Option(help="Only requests for this model.")] = None,
    changes: ChangesOption = None,
    seed: Annotated[int, Option(min=0, help="Seed of all that is random.")] = 1,
    json: JsonOutput = False,
) -> None:
    """Replay the requests of the ledger through the pool of a scenario, and once more with the settings of `--set`.

    The ledger has times and numbers of tokens, and no texts. Its owner decides who may read it.
    """
    from argosy.store import UsageFilter
    from argosy.twin import change_scenario, convert_records, read_scenario, run_scenario

    try:
        scenario = read_scenario(scenario_files)
        where = UsageFilter(
            since=time.time() - DAY_S if since is None else since, until=until, model=model
        )
        requests, tenants = convert_records(_read_ledger(store, where))
        last = requests[-1].at_s or 0.0
        scenario = replace(
            scenario,
            duration_s=max(1.0, last),
            requests=requests,
            workload=replace(scenario.workload, tenants=tenants, trace=None),
        )
        results = [run_scenario(scenario, seed)]
        if changes:
            results.append(run_scenario(change_scenario(scenario, changes), seed))
    except ValueError as error:
        fail(str(error))
    if json:
        print_json(results)
        return
    for title, result in zip(
        ("as in the scenario", f"with {', '.join(changes or ())}"), results, strict=False
    ):
        typer.echo(f"--- {title}")
        _print_result(result)


@app.command()
def fit(
    step_logs: Annotated[
        list[Path],
        Argument(
            metavar="STEPS...",
            help="Folders or files that replicas with --step-log have written.",
            exists=True,
        ),
    ],
    *,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write the prices to this scenario file.")
    ] = None,
    scenario_file: Annotated[
        Path | None,
        Option(
            "--scenario",
            help="Scenario of the requests that were measured; finds the time outside the engine.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    result_file: Annotated[
        Path | None,
        Option(
            "--result",
            help="Result of `argosy bench` for the trace of that scenario.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Fit the prices of a scenario to the steps of a live engine, each with its standard error.

    The result is a scenario file with `engine.cost`, which `argosy twin run` takes after another one.
    """
    from argosy.bench import BenchError
    from argosy.twin import fit_cost, read_steps

    if (scenario_file is None) != (result_file is None):
        fail("give --scenario and --result, or neither of them")
    try:
        fitted, request_s = fit_cost(read_steps(step_logs)), None
        if scenario_file is not None and result_file is not None:
            request_s = _fit_request_time(fitted, scenario_file, result_file)
    except (BenchError, ValueError) as error:
        fail(str(error))
    if output is not None:
        _write_fitted(output, fitted, request_s)
    if json:
        print_json({"request_s": request_s, **to_builtins(fitted)})
    else:
        _print_fitted(fitted, request_s)


def _fit_request_time(fitted: FittedCost, scenario_file: Path, result_file: Path) -> float:
    from argosy.bench import load_result
    from argosy.twin import fit_request_time, read_scenario

    scenario = read_scenario([scenario_file])
    engine = replace(scenario.engine, cost=fitted.cost, hardware=None)
    rows = [row for run in load_result(result_file).runs for row in run.rows]
    return fit_request_time(replace(scenario, engine=engine), rows)


def _print_fitted(fitted: FittedCost, request_s: float | None) -> None:
    for name, value in to_builtins(fitted.cost).items():
        error_s = getattr(fitted.standard_errors, name)
        typer.echo(f"{name:>16} {1e6 * value:>12,.3f} us  +- {1e6 * error_s:,.3f}")
    if request_s is not None:
        typer.echo(f"{'request_s':>16} {1e6 * request_s:>12,.3f} us")
    typer.echo(
        f"{fitted.steps:,} steps, {fitted.outliers:,} outliers, median error {fitted.error:.1%} of a step"
    )


def _write_fitted(path: Path, fitted: FittedCost, request_s: float | None) -> None:
    from argosy.settings import dump_yaml

    engine = {"cost": to_builtins(fitted.cost), "cost_samples": to_builtins(fitted.samples)}
    if request_s is not None:
        engine["request_s"] = round(request_s, 6)
    comment = f"# Prices fitted to {fitted.steps} steps by `argosy twin fit`.\n"
    try:
        path.write_text(comment + dump_yaml({"engine": engine}), encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}", EXIT_FAILURE)


@app.command()
def plan(
    files: FilesArgument = None,
    *,
    overlays: FilesOption = None,
    since: SinceOption = None,
    scenario_file: Annotated[
        Path | None,
        Option(
            "--scenario",
            help="Scenario with the prices of the engine's steps, and statistics for models without requests.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    present_file: Annotated[
        Path | None,
        Option(
            "--present",
            help="Declaration to compare with, in place of the one in force.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seeds: Annotated[int, Option(min=1, max=MAX_FORECAST_SEEDS, help="Number of seeds.")] = 3,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show what a change of the declaration does to requests, before `apply` does it. Nothing is changed.

    The pools at present and as declared serve the requests of the ledger (by default those of the last day), or
    without any those of a scenario. Settings that the twin does not simulate are refused by name.
    """
    from argosy.store import UsageFilter
    from argosy.twin import forecast_change, read_scenario

    with open_declared(files, overlays, store) as (target, config):
        latest = target.latest()
        present = None if latest is None else parse_revision(latest)
        if present_file is not None:
            present = load_declaration([present_file], None)
        try:
            where = UsageFilter(since=time.time() - DAY_S if since is None else since)
            forecast = forecast_change(
                present,
                config,
                _list_answers(target.store, where),
                None if scenario_file is None else read_scenario([scenario_file]),
                seeds,
            )
        except ValueError as error:
            fail(str(error))
    if json:
        print_json(forecast)
        return
    for path in forecast.without_effect:
        typer.echo(f"{path}: no request notices it")
    for pool in forecast.pools:
        _print_forecast(pool, forecast.seeds)
    typer.echo(forecast.sentence)


def _print_forecast(pool: PoolForecast, seeds: int) -> None:
    typer.echo(
        f"--- {pool.pool}: {pool.requests:,} requests in {pool.duration_s:,.0f} s, from "
        f"{'the ledger' if pool.traffic == 'ledger' else 'the statistics of the scenario'}; {pool.calibration}"
    )
    print_records(
        pool.figures,
        ("figure", "present", "declared", f"range of {seeds} seeds"),
        lambda row: (
            row.name,
            "-" if row.present is None else _show(row, row.present.mean),
            _show(row, row.declared.mean),
            _show_range(row, row.declared),
        ),
        "",
        json=False,
    )


def _show(figure: ForecastFigure, value: float) -> str:
    from argosy.twin import show_value

    return show_value(figure, value)


def _show_range(figure: ForecastFigure, found: ForecastRange) -> str:
    return f"{_show(figure, found.low)} to {_show(figure, found.high)}"


def _read_ledger(store: str | None, where: UsageFilter) -> list[UsageRecord]:
    """Return the requests of the ledger. Raises ValueError if there is none with tokens, or too many."""
    with open_existing_store(store) as opened:
        records = _list_answers(opened, where)
    if not records:
        raise ValueError("the ledger has no answers in this time: choose another one with --since")
    return records


def _list_answers(store: Store, where: UsageFilter) -> list[UsageRecord]:
    """Return the requests with output. Raises ValueError if there are too many."""
    records: list[UsageRecord] = []
    for page in store.ledger.iter_records(where):
        records += [record for record in page if record.output_tokens]
        if len(records) > MAX_REPLAYED:
            raise ValueError(
                f"there are more than {MAX_REPLAYED:,} requests: choose a shorter time with --since"
            )
    return records


def _run_seeds(scenario: Scenario, seeds: range, jobs: int | None) -> Iterator[TwinResult]:
    """Run the seeds, in several processes if there are several. Their order is kept."""
    from argosy.twin import run_scenario

    run_one = partial(run_scenario, scenario)
    workers = min(jobs or usable_cpus(), len(seeds))
    if workers == 1:
        yield from map(run_one, seeds)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run_one, seeds, chunksize=max(1, min(8, len(seeds) // workers)))


def _print_result(result: TwinResult) -> None:
    summary = result.summary
    typer.echo(
        f"{result.simulated_s:,.0f} s simulated with {result.events:,} events: {summary.completed:,} requests "
        f"completed, {summary.failed:,} failed, {summary.cancelled:,} cancelled"
    )
    typer.echo(f"{'ms':>12} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'p99.9':>10}")
    for metric in SHOWN_LATENCIES:
        stats = summary.latency[metric]
        values = (stats.mean, stats.p50, stats.p90, stats.p99, stats.p999)
        typer.echo(f"{metric.upper():>12} " + " ".join(f"{value:>10,.1f}" for value in values))
        if result.intervals:
            names = ("mean", "p50", "p90", "p99", "p999")
            widths = [result.intervals[f"{metric}.{name}"] for name in names]
            typer.echo(f"{'+-':>12} " + " ".join(f"{width:>10,.1f}" for width in widths))
    typer.echo(
        f"output {summary.output_token_rate:,.1f} tokens/s, utilisation {result.utilisation:.0%}, "
        f"{result.replica_hours:.2f} replica-hours, {result.cached_fraction:.0%} of prompts cached"
    )
    if summary.goodput is not None:
        typer.echo(
            f"goodput {summary.goodput:.2f} requests/s, {summary.attainment or 0.0:.1%} of requests met the objectives"
        )
    for title, counts in (
        ("errors", summary.errors),
        ("attempts and ends", result.effects),
        ("controller", result.actions),
    ):
        if counts:
            shown = ", ".join(f"{name} {count}" for name, count in counts.items())
            typer.echo(f"{title}: {shown}")
    if result.failure:
        typer.secho(f"broken: {result.failure}", fg=typer.colors.RED)
    typer.echo(_identify(result))


def _identify(result: TwinResult) -> str:
    from argosy.version import VERSION

    return (
        f"seed {result.seed}, configuration {result.configuration}, version {VERSION}, "
        f"hash {result.trace_hash}"
    )


def _print_seeds(results: list[TwinResult]) -> None:
    failed = [result for result in results if result.failure]
    completed = sum(result.summary.completed for result in results)
    lost = sum(result.summary.failed for result in results)
    typer.echo(
        f"{len(results):,} seeds, {completed:,} requests completed, {lost:,} failed; "
        f"every invariant held for {len(results) - len(failed):,} seeds"
    )
    for result in failed[:10]:
        typer.secho(f"seed {result.seed}: {result.failure}", fg=typer.colors.RED)
    typer.echo(f"first: {_identify(results[0])}")


def _save_failure(scenario: Scenario, result: TwinResult, path: Path) -> None:
    from argosy.twin import shrink, write_scenario

    smallest = shrink(scenario, result.seed)
    requests, faults = len(smallest.requests or ()), len(smallest.faults)
    comment = f"Shrunk from seed {result.seed}; run it with --seed {result.seed}.\n{result.failure}"
    try:
        write_scenario(path, smallest, comment)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}", EXIT_FAILURE)
    typer.echo(f"shrunk to {requests} requests and {faults} faults: {path}", err=True)
