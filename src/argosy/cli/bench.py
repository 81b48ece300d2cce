"""`argosy bench`: measure an OpenAI-compatible server under load, and compare two results."""

from __future__ import annotations

import glob
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from typer import Argument, Option

from argosy.cli import bench_arguments as parse
from argosy.cli.failure import EXIT_FAILURE, EXIT_INTERRUPTED, fail
from argosy.progress_bar import ProgressBar

if TYPE_CHECKING:
    from argosy.bench import BenchResult, BenchSettings, RequestRow

_server = partial(Option, rich_help_panel="Server")
_load = partial(Option, rich_help_panel="Load")
_prompts = partial(Option, rich_help_panel="Prompts")
_results = partial(Option, rich_help_panel="Results")

MAX_PLANNED = 10_000_000
"""Largest number of planned requests or tokens. The whole plan is held in memory."""

ResultFiles = Annotated[
    str,
    Argument(
        metavar="FILE[,FILE...]", help="Result files of one side, or patterns like 'old-*.json'."
    ),
]

app = typer.Typer(help="Measure an OpenAI-compatible server under load.")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    *,
    url: Annotated[
        str, _server(help="URL of the server, or unix:PATH.", envvar="ARGOSY_URL")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, _server(help="Model name; by default the server's first model.")
    ] = None,
    api: Annotated[Literal["completions", "chat"], _server(help="API to measure.")] = "completions",
    api_key: Annotated[
        str | None,
        _server(help="Sent as a bearer token.", envvar=["ARGOSY_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
    header: Annotated[
        list[str] | None, _server(help="`NAME: VALUE`; may be given several times.")
    ] = None,
    extra_body: Annotated[
        str | None, _server(help="JSON object whose fields are added to each request.")
    ] = None,
    temperature: Annotated[float, _server(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool,
        _server(
            "--ignore-eos/--no-ignore-eos",
            help="Generate up to the planned length, if the server supports it.",
        ),
    ] = True,
    chunk_usage: Annotated[
        bool,
        _server(
            "--chunk-usage/--no-chunk-usage",
            help="Request a token count in each chunk, if the server supports it.",
        ),
    ] = True,
    timeout: Annotated[
        float, _server(min=0.001, help="Timeout of one request in seconds.")
    ] = 600.0,
    rate: Annotated[
        str | None,
        _load(
            metavar="R[,R...]",
            help="Requests per second, sent on schedule even if the server is slow; `inf` sends all at once."
            " Several are a sweep.",
        ),
    ] = None,
    arrival: Annotated[
        Literal["poisson", "gamma", "constant"],
        _load("--arrival", help="Distribution of the arrivals."),
    ] = "poisson",
    burstiness: Annotated[
        float, _load(help="Burstiness of gamma arrivals: 1 is Poisson, less is burstier.")
    ] = 1.0,
    concurrency: Annotated[
        str | None,
        _load(
            metavar="N[,N...]",
            help="Requests in flight: without --rate exactly this number, with --rate at most.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        _load(min=1, max=MAX_PLANNED, help="Number of requests; 200 without a duration."),
    ] = None,
    duration: Annotated[
        float | None, _load(min=0.001, help="Seconds in which requests are started.")
    ] = None,
    warmup: Annotated[
        int,
        _load(min=0, max=MAX_PLANNED, help="Number of warm-up requests, which are not measured."),
    ] = 0,
    ramp: Annotated[
        float, _load(min=0.0, help="Seconds in which the load grows; not measured.")
    ] = 0.0,
    find_rate: Annotated[
        bool,
        _load(
            "--find-rate",
            help="Find the highest rate that meets the objectives, starting at --rate.",
        ),
    ] = False,
    min_attainment: Annotated[
        float, _load(min=0.0, max=1.0, help="Share of requests that must meet the objectives.")
    ] = 0.99,
    precision: Annotated[
        float, _load(min=0.001, help="Relative precision of the found rate.")
    ] = 0.05,
    seed: Annotated[
        int, _load(min=0, help="Seed of the plan; the same seed plans the same requests.")
    ] = 0,
    input_len: Annotated[
        str,
        _prompts(
            metavar="LENGTHS",
            help="Prompt tokens: 128, uniform:32-512, normal:256,64 or lognormal:200,0.8.",
        ),
    ] = "uniform:32-512",
    output_len: Annotated[
        str, _prompts(metavar="LENGTHS", help="Output tokens, in the same syntax.")
    ] = "uniform:16-128",
    prefix_len: Annotated[
        int, _prompts(min=0, max=MAX_PLANNED, help="Tokens of a shared prompt prefix.")
    ] = 0,
    prefix_groups: Annotated[
        int, _prompts(min=1, max=MAX_PLANNED, help="Number of different prefixes.")
    ] = 1,
    turns: Annotated[int, _prompts(min=1, help="Requests per conversation.")] = 1,
    think_time: Annotated[float, _prompts(min=0.0, help="Seconds between two turns.")] = 0.0,
    prompts: Annotated[
        Path | None, _prompts(help="File of prompts: JSON lines, or text with one prompt per line.")
    ] = None,
    trace: Annotated[
        Path | None,
        _prompts(
            help="Mooncake, BurstGPT or Azure trace for lengths, and for times without --rate."
        ),
    ] = None,
    trace_speed: Annotated[
        float, _prompts(min=0.001, help="Speed factor of the trace's times.")
    ] = 1.0,
    prompt_form: Annotated[
        Literal["auto", "tokens", "words"], _prompts(help="Content of synthetic prompts.")
    ] = "auto",
    tokenizer: Annotated[
        str | None,
        _prompts(
            metavar="PATH",
            help="A tokenizer.json for token prompts if the server has no /tokenize.",
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        _results(
            metavar="OBJECTIVES",
            help="Objectives of a good request in ms: ttft:200,tpot:50,e2el:4000.",
        ),
    ] = None,
    save: Annotated[
        Path | None, _results(help="JSON file for the result, with a row per request.")
    ] = None,
    html: Annotated[Path | None, _results(help="HTML file for a report with plots.")] = None,
    csv: Annotated[Path | None, _results(help="CSV file with a row per request.")] = None,
    prometheus: Annotated[
        Path | None,
        _results(
            help="File for the summaries in the format of node_exporter's textfile collector (NAME.prom)."
        ),
    ] = None,
    self_check: Annotated[
        bool, _results("--self-check", help="Measure the noise of this client and exit.")
    ] = False,
) -> None:
    """Send requests to a server and measure latency and throughput as its clients see them."""
    if context.invoked_subcommand is not None:
        return
    if self_check:
        _run_self_check(seed)
        return
    from argosy.bench import (
        BenchError,
        BenchSettings,
        BenchTarget,
        Workload,
        parse_length_distribution,
        parse_objectives,
    )

    try:
        settings = BenchSettings(
            target=BenchTarget(
                url=url,
                model=model,
                api=api,
                prompt_form=prompt_form,
                tokenizer=tokenizer,
                ignore_eos=ignore_eos,
                chunk_usage=chunk_usage,
                temperature=temperature,
                extra_body=parse.parse_object(extra_body),
            ),
            workload=Workload(
                input=parse_length_distribution(input_len),
                output=parse_length_distribution(output_len),
                prefix_tokens=prefix_len,
                prefix_groups=prefix_groups,
                turns=turns,
                think_s=think_time,
                prompts=None if prompts is None else str(prompts),
                trace=None if trace is None else str(trace),
                trace_speed=trace_speed,
            ),
            loads=parse.parse_loads(
                rates=parse.parse_positive_numbers("--rate", rate),
                concurrencies=parse.parse_positive_numbers("--concurrency", concurrency),
                burstiness={"poisson": 1.0, "gamma": burstiness, "constant": None}[arrival],
                requests=parse.resolve_request_count(requests, duration, trace),
                duration_s=duration,
                warmup=warmup,
                ramp_s=ramp,
                has_trace=trace is not None,
            ),
            seed=seed,
            objectives=None if goodput is None else parse_objectives(goodput),
            find_rate=find_rate,
            min_attainment=min_attainment,
            precision=precision,
            timeout_s=timeout,
        )
        _run_and_report(
            settings,
            parse.build_headers(api_key, header or []),
            _OutputPaths(save, html, csv, prometheus),
        )
    except BenchError as error:
        fail(str(error))


@app.command("compare")
def compare_files(
    a: ResultFiles,
    b: ResultFiles,
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for the ratios as JSON.")] = None,
) -> None:
    """Compare results that --save wrote: ratios B/A with 95 % confidence intervals.

    Several runs per side, best taken in turns, also show the variation between runs.
    """
    from argosy.bench import (
        BenchError,
        compare_results,
        format_comparison,
        load_result,
        write_file,
    )

    try:
        first, second = ([load_result(path) for path in _expand_paths(side)] for side in (a, b))
        ratios = compare_results(first, second, seed=seed)
        if output is not None:
            import msgspec

            write_file(output, msgspec.json.encode(ratios))
    except BenchError as error:
        fail(str(error))
    typer.echo(format_comparison(first, second, ratios))


def _expand_paths(patterns: str) -> list[Path]:
    """Return the files of one side: an existing file as it is, otherwise comma-separated names and patterns."""
    from argosy.bench import BenchError

    if os.path.exists(patterns):  # noqa: PTH110 - Path.exists raises for a long list of names
        return [Path(patterns)]
    files = []
    for part in patterns.split(","):
        found = sorted(glob.glob(part)) if glob.has_magic(part) else [part]  # noqa: PTH207
        if not found:
            raise BenchError(f"No file matches {part}.")
        files += [Path(name) for name in found]
    return files


class _OutputPaths(NamedTuple):
    """Files that the result is written to, in addition to the terminal."""

    save: Path | None
    html: Path | None
    csv: Path | None
    prometheus: Path | None

    def validate(self) -> None:
        """Check before the run that the files can be written. Raises BenchError."""
        from argosy.bench import BenchError

        for path in self:
            if path is None or (path.exists() and not path.is_dir() and not path.is_file()):
                continue  # a device or a pipe, which is opened only for writing the result
            folder = path.resolve().parent
            if not folder.is_dir():
                raise BenchError(
                    f"The directory of {path} does not exist: create it, or choose another."
                )
            if path.is_dir():
                raise BenchError(f"{path} is a directory: name a file in it.")
            try:
                TemporaryFile(dir=folder).close()
            except OSError as error:
                raise BenchError(f"Cannot write {path}: {error.strerror}.") from error

    def write_result(self, result: BenchResult) -> None:
        """Write the result to each file that is given. Raises BenchError."""
        from argosy.bench import (
            format_csv,
            format_prometheus,
            render_html_report,
            save_result,
            write_file,
        )

        if self.save is not None:
            save_result(result, self.save)
        if self.html is not None:
            write_file(self.html, render_html_report(result).encode())
        if self.csv is not None:
            write_file(self.csv, format_csv(result).encode())
        if self.prometheus is not None:
            write_file(self.prometheus, format_prometheus(result))


def _run_and_report(
    settings: BenchSettings, headers: dict[str, str], outputs: _OutputPaths
) -> None:
    """Run the benchmark, print the report and write the files."""
    import uvloop

    from argosy.bench import render_text_report, run_benchmark

    outputs.validate()
    with BenchProgress() as progress:
        result = uvloop.run(run_benchmark(settings, headers, progress))
    typer.echo(render_text_report(result))
    outputs.write_result(result)
    if any(run.interrupted for run in result.runs):
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(run.summary.completed for run in result.runs):  # nothing was measured
        fail("No request succeeded: see the errors above.", EXIT_FAILURE)


def _run_self_check(seed: int) -> None:
    import uvloop

    from argosy.bench import BenchError, measure_noise_floor, render_noise_floor

    try:
        typer.echo(render_noise_floor(uvloop.run(measure_noise_floor(seed))))
    except BenchError as error:
        fail(str(error), EXIT_FAILURE)


class BenchProgress(ProgressBar):
    """Progress bar of the current run, with the numbers of requests."""

    def __init__(self) -> None:
        # Each refresh takes processor time from a server on the same machine.
        super().__init__("probing the server", refresh_per_second=2)
        self._requests = self._failed = 0

    def on_run_start(self, label: str, requests: int) -> None:
        """Show the bar of a run."""
        self._requests, self._failed = requests, 0
        self.restart(label, requests)

    def on_request_end(self, row: RequestRow, in_flight: int) -> None:
        """Advance the bar by one request."""
        self._failed += row.outcome == "error"
        failed = f", {self._failed} failed" if self._failed else ""
        self.update(advance=1)
        self.update(note=f"{self.completed:.0f}/{self._requests}, {in_flight} in flight{failed}")
