"""`argosy bench`: put a load on an OpenAI-compatible server and measure it; compare two results."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from argosy.cli import bench_arguments as parse
from argosy.cli import bench_options as options
from argosy.cli.bench_progress import Progress
from argosy.cli.failure import BROKEN, fail

if TYPE_CHECKING:
    from argosy.bench import Result, Settings

app = typer.Typer(help="Measure an OpenAI-compatible server under load.")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    *,
    url: options.Url = "http://127.0.0.1:8000",
    model: options.Model = None,
    api: options.Api = "completions",
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
    hold: options.Hold = 0.99,
    precision: options.Precision = 0.05,
    seed: options.Seed = 0,
    input_len: options.InputLen = "uniform:32-512",
    output_len: options.OutputLen = "uniform:16-128",
    prefix_len: options.PrefixLen = 0,
    prefix_groups: options.PrefixGroups = 1,
    turns: options.Turns = 1,
    think: options.Think = 0.0,
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
    """Put a load on a server and measure what its users would see."""
    if context.invoked_subcommand is not None:
        return
    if self_check:
        _check_self(seed)
        return
    from argosy.bench import BenchError, Settings, Wishes, Workload, parse_lengths, parse_objectives

    try:
        settings = Settings(
            wishes=Wishes(
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
                input=parse_lengths(input_len),
                output=parse_lengths(output_len),
                prefix_tokens=prefix_len,
                prefix_groups=prefix_groups,
                turns=turns,
                think_s=think,
                prompts=None if prompts is None else str(prompts),
                trace=None if trace is None else str(trace),
                trace_speed=trace_speed,
            ),
            loads=parse.loads(
                rates=parse.numbers("--rate", rate),
                limits=parse.numbers("--concurrency", concurrency),
                shape={"poisson": 1.0, "gamma": burstiness, "constant": None}[arrival],
                requests=parse.count(requests, duration, trace),
                duration_s=duration,
                warmup=warmup,
                ramp_s=ramp,
                traced=trace is not None,
            ),
            seed=seed,
            objectives=None if goodput is None else parse_objectives(goodput),
            search=find_rate,
            hold=hold,
            precision=precision,
            timeout_s=timeout,
        )
        _measure(
            settings, parse.headers(api_key, header or []), _Outputs(save, html, csv, prometheus)
        )
    except BenchError as error:
        fail(str(error))


@app.command("compare")
def compare(
    a: options.Side,
    b: options.Side,
    *,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the ratios as JSON.")] = None,
) -> None:
    """Compare results that --save wrote: ratios B/A with 95 % confidence intervals.

    Several runs a side, best taken in turns, tell what varies between runs as well.
    """
    from argosy.bench import BenchError, comparison_text, load, write
    from argosy.bench import compare as compare_results

    try:
        first, second = ([load(path) for path in _files(side)] for side in (a, b))
        ratios = compare_results(first, second, seed=seed)
        if output is not None:
            import msgspec

            write(output, msgspec.json.encode(ratios))
    except BenchError as error:
        fail(str(error))
    typer.echo(comparison_text(first, second, ratios))


def _files(side: str) -> list[Path]:
    """The files that `side` names: a file as it is, else names and patterns with commas between them."""
    from argosy.bench import BenchError

    if os.path.exists(side):  # noqa: PTH110 - a long list is no file, and no error
        return [Path(side)]
    files = []
    for part in side.split(","):
        found = sorted(glob.glob(part)) if glob.has_magic(part) else [part]  # noqa: PTH207
        if not found:
            raise BenchError(f"No file is like {part}.")
        files += [Path(name) for name in found]
    return files


class _Outputs(NamedTuple):
    """Where a result goes, besides the terminal."""

    save: Path | None
    html: Path | None
    csv: Path | None
    prometheus: Path | None

    def check(self) -> None:
        """Say before the run, not after it, that its result has no place. Raises BenchError."""
        from argosy.bench import BenchError

        for path in self:
            if path is None or (path.exists() and not path.is_dir() and not path.is_file()):
                continue  # a device or a pipe says for itself what it takes
            folder = path.resolve().parent
            if not folder.is_dir():
                raise BenchError(f"There is no directory for {path}: make it, or choose another.")
            if path.is_dir():
                raise BenchError(f"{path} is a directory: name a file in it.")
            try:
                TemporaryFile(dir=folder).close()
            except OSError as error:
                raise BenchError(f"Cannot write {path}: {error.strerror}.") from error

    def write(self, result: Result) -> None:
        """Write what was asked for. Raises BenchError."""
        from argosy.bench import html_report, prometheus_text, rows_csv, save, write

        if self.save is not None:
            save(result, self.save)
        if self.html is not None:
            write(self.html, html_report(result).encode())
        if self.csv is not None:
            write(self.csv, rows_csv(result).encode())
        if self.prometheus is not None:
            write(self.prometheus, prometheus_text(result))


def _measure(settings: Settings, headers: dict[str, str], outputs: _Outputs) -> None:
    """Run it, print it, write it."""
    import uvloop

    from argosy.bench import run, text_report

    outputs.check()
    with Progress() as progress:
        result = uvloop.run(run(settings, headers, progress))
    typer.echo(text_report(result))
    outputs.write(result)
    _leave(result)


def _leave(result: Result) -> None:
    """A run that measured nothing is no success."""
    if not any(point.summary.completed for point in result.points):
        fail("No request succeeded: see the errors above.", BROKEN)


def _check_self(seed: int) -> None:
    import uvloop

    from argosy.bench import BenchError, noise_report, self_check

    try:
        typer.echo(noise_report(uvloop.run(self_check(seed))))
    except BenchError as error:
        fail(str(error), BROKEN)
