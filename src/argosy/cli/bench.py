"""`argosy bench`: measure an OpenAI-compatible server under load, and compare two results."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from argosy.cli import bench_arguments as parse
from argosy.cli import bench_options as options
from argosy.cli.bench_progress import BenchProgress
from argosy.cli.failure import EXIT_FAILURE, fail

if TYPE_CHECKING:
    from argosy.bench import BenchResult, BenchSettings

app = typer.Typer(help="Measure an OpenAI-compatible server under load.")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    *,
    url: options.Url = "http://127.0.0.1:8000",
    model: options.Model = None,
    api: options.ApiOption = "completions",
    api_key: options.ApiKey = None,
    header: options.Header = None,
    extra_body: options.ExtraBody = None,
    temperature: options.Temperature = 0.0,
    ignore_eos: options.IgnoreEos = True,
    chunk_usage: options.ChunkUsage = True,
    timeout: options.Timeout = 600.0,
    rate: options.Rate = None,
    arrival: options.ArrivalKind = "poisson",
    burstiness: options.Burstiness = 1.0,
    concurrency: options.Concurrency = None,
    requests: options.Requests = None,
    duration: options.Duration = None,
    warmup: options.Warmup = 0,
    ramp: options.Ramp = 0.0,
    find_rate: options.FindRate = False,
    min_attainment: options.MinAttainment = 0.99,
    precision: options.Precision = 0.05,
    seed: options.Seed = 0,
    input_len: options.InputLen = "uniform:32-512",
    output_len: options.OutputLen = "uniform:16-128",
    prefix_len: options.PrefixLen = 0,
    prefix_groups: options.PrefixGroups = 1,
    turns: options.Turns = 1,
    think_time: options.ThinkTime = 0.0,
    prompts: options.Prompts = None,
    trace: options.Trace = None,
    trace_speed: options.TraceSpeed = 1.0,
    prompt_form: options.PromptForm = "auto",
    tokenizer: options.Tokenizer = None,
    goodput: options.Goodput = None,
    save: options.Save = None,
    html: options.Html = None,
    csv: options.Csv = None,
    prometheus: options.Prometheus = None,
    self_check: options.SelfCheck = False,
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
        TargetOptions,
        Workload,
        parse_length_distribution,
        parse_objectives,
    )

    try:
        settings = BenchSettings(
            target_options=TargetOptions(
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
    a: options.ResultFiles,
    b: options.ResultFiles,
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
        """Check before the run that the files can be written.

        Raises:
            BenchError: A file cannot be written.
        """
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
        """Write the result to each file that is given.

        Raises:
            BenchError: A file cannot be written.
        """
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
    _fail_if_none_completed(result)


def _fail_if_none_completed(result: BenchResult) -> None:
    """Fail the command if no request succeeded, since nothing was measured."""
    if not any(run.summary.completed for run in result.runs):
        fail("No request succeeded: see the errors above.", EXIT_FAILURE)


def _run_self_check(seed: int) -> None:
    import uvloop

    from argosy.bench import BenchError, measure_noise_floor, render_noise_floor

    try:
        typer.echo(render_noise_floor(uvloop.run(measure_noise_floor(seed))))
    except BenchError as error:
        fail(str(error), EXIT_FAILURE)
