"""`argosy doctor`: why prompts miss the prefix cache, and what a change of them would save."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from argosy.cli.output import JsonOutput, print_json, print_records, print_result
from argosy.cli.quantities import (
    format_count,
    format_dollars,
    format_timestamp,
    parse_duration,
)
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, GatewayUrl, call_admin_api

app = typer.Typer(help="Findings about requests, with remedies.", no_args_is_help=True)
PATH = "/admin/prefix-doctor"
CLASSES = {
    "cached_tokens": "cached",
    "unavoidable_tokens": "unavoidable",
    "lost_by_prompt_tokens": "lost by prompts",
    "lost_by_placement_tokens": "lost by placement",
}


@app.callback()
def _doctor() -> None:
    """Findings about requests, with remedies."""


@app.command()
def prefix(
    *,
    model: Annotated[str | None, typer.Option(help="Name of the model; by default all.")] = None,
    project: Annotated[str | None, typer.Option(help="Id of the project; by default all.")] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Examine all of these prompts for this time from now, at most 1h, instead of a sample. Their sums "
            "begin again.",
        ),
    ] = None,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Show why prompts miss the prefix cache of one gateway's replicas, at which token, and what a fix saves."""
    if duration is not None:
        body: dict[str, object] = {"duration_s": parse_duration(duration)}
        given = {"model": model, "project": project}
        body |= {name: value for name, value in given.items() if value is not None}
        watch = call_admin_api(url, api_key, "POST", PATH, body)
        until = format_timestamp(watch["until"])
        message = f"All prompts are examined until {until}. Repeat the command without --for."
        print_result(watch, message, json=json)
        return
    answer = call_admin_api(
        url, api_key, "GET", PATH, parameters={"model": model, "project": project}
    )
    if json:
        print_json(answer)
        return
    if not answer["data"]:
        typer.echo(
            f"No prompts were examined. {answer['sample_ratio']:.0%} of the time is sampled; --for 10m examines all."
        )
    for number, report in enumerate(answer["data"]):
        typer.echo("\n" * bool(number) + _describe(report))
        print_records(
            report["findings"],
            ("Cause", "Requests", "Of input", "TTFT", "Tokens a day", "Dollars a day", "Advice"),
            _format_finding,
            "Nothing to mend was found.",
            json=False,
        )


def _describe(report: dict[str, Any]) -> str:
    total = max(1, report["input_tokens"])
    shares = ", ".join(f"{report[name] / total:.0%} {label}" for name, label in CLASSES.items())
    owner = f" of {report['project']}" if report["project"] else ""
    skipped = report["skipped_requests"]
    missing = f" ({skipped} more were not)" if skipped else ""
    return (
        f"{report['model']}{owner}: {report['requests']} requests were examined{missing} since "
        f"{format_timestamp(report['since'])}. Of {format_count(report['input_tokens'])} tokens, {shares}."
    )


def _format_finding(finding: dict[str, Any]) -> tuple[object, ...]:
    bound = "<= " if finding["is_upper_bound"] else ""
    return (
        finding["cause"],
        finding["requests"],
        f"{finding['input_share']:.1%}",
        f"{bound}{finding['saved_ttft_s'] * 1000:.0f} ms",
        bound + format_count(finding["tokens_per_day"]),
        bound + format_dollars(finding["nano_dollars_per_day"]),
        finding["advice"],
    )
