"""`argosy explain`: timeline, routing decisions, limits and cost of one request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from argosy.cli.failure import fail
from argosy.cli.output import format_one_line, open_console
from argosy.cli.quantities import format_dollars, format_price, format_timestamp
from argosy.cli.server_client import DEFAULT_URL, GatewayUrl, call_admin_api

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR_WIDTH = 28
"""Width of the bars in characters."""
MAX_REASON_CHARS = 100
MIN_GAP_BAR_MS = 1.0
COST_TERMS = ("queue_s", "prefill_s", "decode_s", "memory_s", "stale_s", "adapter_s", "total_s")
SECTION_KEYS = frozenset(
    {
        *("object", "id", "request_id", "status", "error", "model", "path", "stream", "caller"),
        *("asked", "route", "route_reason", "version"),
        *("started_at", "ms", "queue", "rule", "attempts", "tokens"),
        *("finish_reasons", "stop_reasons"),
        *("limits", "ledger", "replica_report", "gateway", "source"),
    }
)
"""Keys that have their own section. Other keys were added by request filters, and are printed under their names."""
CONTENT_KEYS = {"prompts": "prompt", "outputs": "output"}
"""Keys with long texts, and the heading of one of their texts."""


def explain(
    request: Annotated[str, typer.Argument(help="Id of the request, or of the response.")],
    *,
    url: GatewayUrl = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", "--key", help="API key of the request's tenant.", envvar="ARGOSY_API_KEY"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's JSON.")] = False,
) -> None:
    """Explain a request: its queueing, its routing decisions, its limits, its cost and its timeline."""
    path = f"/admin/requests/{quote(request, safe='', errors='surrogateescape')}"
    explanation = call_admin_api(url, api_key, "GET", path)
    if explanation.get("object") != "request.explanation":
        fail(f"the server at {url} is not an Argosy gateway; check --url")
    if as_json:
        typer.echo(json.dumps(explanation, indent=2))
    else:
        print_explanation(open_console(), explanation)


def print_explanation(console: Console, explanation: dict[str, Any]) -> None:
    """Print an explanation to the console."""
    console.print(_headline(explanation))
    if explanation.get("source") == "ledger":
        console.print(format_one_line(explanation["reason"]), style="yellow", markup=False)
        console.print(_ledger_table(explanation))
        return
    console.print(_timeline_table(explanation))
    for number, attempt in enumerate(explanation["attempts"], 1):
        if attempt["candidates"]:
            console.print(_candidates_table(number, attempt, explanation["rule"]))
    if "limits" in explanation:
        console.print(_limits_table(explanation["limits"]))
    if "ledger" in explanation:
        console.print(_format_ledger_line(explanation["ledger"]))
    if "replica_report" in explanation:
        _print_replica_report(console, explanation["replica_report"])
    for name, section in explanation.items():
        if name not in SECTION_KEYS:
            console.print(_extra_table(name, section))


def _format_finish_reasons(explanation: dict[str, Any]) -> str:
    """Return the different finish reasons, with the reasons of early ends in parentheses."""
    early_stops = explanation.get("stop_reasons", {})
    reasons = {
        reason + (f" ({early_stops[choice]})" if choice in early_stops else "")
        for choice, reason in explanation["finish_reasons"].items()
    }
    return ", ".join(sorted(reasons))


def _headline(explanation: dict[str, Any]) -> str:
    from rich.markup import escape

    tokens, caller, ended = explanation["tokens"], explanation["caller"], explanation["ms"]["ended"]
    colours = {"completed": "green", "replayed": "green", "running": "blue", "stopped": "yellow"}
    colour = colours.get(explanation["status"], "red")
    error = f" ({escape(explanation['error'])})" if explanation["error"] else ""
    finish = format_one_line(_format_finish_reasons(explanation))
    route = f", by {escape(explanation['route'])}" if explanation["route"] else ""
    asked = (
        ""
        if explanation["asked"] == explanation["model"]
        else f" (for {escape(explanation['asked'])}{route})"
    )
    # only if changes of the model are rollouts
    version = f" version {escape(explanation['version'])}" if "version" in explanation else ""
    reason = explanation["route_reason"]
    lines = [
        f"[bold]{escape(explanation['id'])}[/]  [{colour}]{explanation['status']}[/]{error}",
        _format_target(explanation, f"[bold]{escape(explanation['model'])}[/]{version}{asked}"),
        f"{tokens['prompt']} prompt tokens ({tokens['cached']} cached), {tokens['output']} output"
        + _format_output_details(explanation)
        + (f", finished by {escape(finish)}" if finish else "")
        + ("" if ended is None else f", {ended:.0f} ms"),
    ]
    if reason:
        lines.append(f"{escape(explanation['model'])} answers: {escape(format_one_line(reason))}")
    if caller["project"]:
        key = f", key {escape(caller['key'])}" if caller["key"] else ""
        tier = f", tier {caller['tier']}" if caller["tier"] else ""
        lines.append(f"tenant {escape(caller['project'])}{key}{tier}")
    return "\n".join(lines)


def _format_output_details(explanation: dict[str, Any]) -> str:
    """Return reasoning tokens, tokens per step with drafts, and the seconds that these saved, in parentheses."""
    tokens, report = explanation["tokens"], explanation.get("replica_report", {})
    details = [f"{tokens['reasoning']} reasoning"] if "reasoning" in tokens else []
    if accepted := report.get("accepted_drafts", 0):
        details.append(f"{1 + accepted / report['steps']:.2f} a step")
    if saved_s := report.get("draft_saved_s", 0.0):
        details.append(f"drafts saved {saved_s:.2f} s")
    return f" ({', '.join(details)})" if details else ""


def _format_target(explanation: dict[str, Any], model: str) -> str:
    """Return path, model and how the response was sent. The ledger knows only the model."""
    if explanation["path"] is None:
        return model
    sent = "streamed" if explanation["stream"] else "sent whole"
    return f"{explanation['path']} to {model}, {sent}"


def _ledger_table(explanation: dict[str, Any]) -> Table:
    """Return the values that only the ledger has kept of a request."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1))
    ended_at = explanation["started_at"] + explanation["ms"]["ended"] / 1000
    for name, value in (
        ("started", format_timestamp(explanation["started_at"])),
        ("ended", format_timestamp(ended_at)),
        ("replica", explanation["replica"] or ""),
        ("cost", format_dollars(explanation["ledger"]["nano_dollars"])),
    ):
        table.add_row(name, Text(format_one_line(value)))
    return table


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """Bar of the timeline, in milliseconds after the request arrived."""

    name: str
    begin_ms: float
    end_ms: float
    style: str


def timeline_steps(explanation: dict[str, Any]) -> Iterator[TimelineStep]:
    """Yield the steps of the request in chronological order."""
    ms = explanation["ms"]
    last = max(value for value in _all_times_ms(explanation) if value is not None)
    yield TimelineStep("read the request", 0.0, ms["read"], "cyan")
    yield TimelineStep("admission", ms["read"], _value_or(ms["admitted"], last), "cyan")
    if ms["queued"] is not None:
        dispatched = (
            explanation["attempts"][0]["chosen_ms"] if explanation["attempts"] else ms["ended"]
        )
        ahead = explanation["queue"]["ahead"]
        yield TimelineStep(
            f"queue, {ahead} ahead", ms["queued"], _value_or(dispatched, last), "yellow"
        )
    # End of the last attempt, from which no replica has the request, and the attempt's outcome.
    free_since, outcome = -math.inf, ""
    for attempt in explanation["attempts"]:
        begin, end = attempt["chosen_ms"], _value_or(attempt["ended_ms"], last)
        yield from _gap_steps(free_since, begin, outcome)
        free_since, outcome = max(free_since, end), attempt["outcome"]
        first = _value_or(attempt["first_token_ms"], end)
        note = f", resumed after {attempt['carried_on_at']}" if attempt["carried_on_at"] else ""
        note = ", hedge" if attempt["hedge"] else note
        yield TimelineStep(f"{attempt['replica']}{note}: first token", begin, first, "magenta")
        if attempt["first_token_ms"] is not None:
            yield TimelineStep(
                f"{attempt['replica']}: {_format_outcome(attempt)}", first, end, "green"
            )
        elif attempt["outcome"] != "success":
            yield TimelineStep(f"{attempt['replica']}: {_format_outcome(attempt)}", end, end, "red")
    yield from _gap_steps(free_since, last, outcome)


def _gap_steps(free_since_ms: float, until_ms: float, outcome: str) -> Iterator[TimelineStep]:
    """Yield a step for the time in which no replica has the request."""
    if outcome and until_ms - free_since_ms >= MIN_GAP_BAR_MS:
        names = {"success": "completion", "ended": "completion", "paused": "gave way to others"}
        name = names.get(outcome, "another replica")
        yield TimelineStep(name, free_since_ms, until_ms, "yellow")


def _all_times_ms(explanation: dict[str, Any]) -> Iterator[float | None]:
    yield from explanation["ms"].values()
    for attempt in explanation["attempts"]:
        yield from (attempt["chosen_ms"], attempt["ended_ms"], attempt["first_token_ms"])


def _format_outcome(attempt: dict[str, Any]) -> str:
    reason = format_one_line(attempt["reason"] or "")
    if len(reason) > MAX_REASON_CHARS:
        reason = f"{reason[:MAX_REASON_CHARS]}…"
    return f"{attempt['outcome']} ({reason})" if reason else f"{attempt['outcome']}"


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _timeline_table(explanation: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("step", box=None, header_style="bold", padding=(0, 1))
    table.add_column("from ms", justify="right")
    table.add_column("took ms", justify="right")
    table.add_column("", no_wrap=True)
    steps = list(timeline_steps(explanation))
    total_ms = max(step.end_ms for step in steps) or 1.0
    for step in steps:
        indent = round(step.begin_ms / total_ms * BAR_WIDTH)
        length = max(1, round((step.end_ms - step.begin_ms) / total_ms * BAR_WIDTH))
        bar = Text(
            " " * min(indent, BAR_WIDTH - 1) + "━" * min(length, BAR_WIDTH), style=step.style
        )
        table.add_row(
            Text(step.name), f"{step.begin_ms:.1f}", f"{step.end_ms - step.begin_ms:.1f}", bar
        )
    return table


def _candidates_table(number: int, attempt: dict[str, Any], rule: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = f"Attempt {number}: chosen by {rule}; costs in seconds"
    table = Table(
        "replica", title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1)
    )
    has_weights = any(candidate.get("weight", 1) != 1 for candidate in attempt["candidates"])
    terms = (*COST_TERMS[:-1], *(["weight"] if has_weights else []), COST_TERMS[-1])
    for term in terms:
        table.add_column(term.removesuffix("_s"), justify="right")
    for candidate in attempt["candidates"]:
        chosen = candidate["replica"] == attempt["replica"]
        cells = [f"{candidate[term]:.4f}" for term in terms]
        name = Text(candidate["replica"])
        table.add_row(name, *cells, style="bold" if chosen else "dim")
    return table


def _limits_table(lines: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="limits", title_justify="left", box=None, padding=(0, 1))
    table.add_column("owner", no_wrap=True)
    table.add_column("unit")
    for name in ("limit", "used", "requested"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits")
    for line in lines:
        is_money = line["unit"] == "nano_dollars"
        unit = "dollars" if is_money else line["unit"]
        span = f" per {line['window']}" if line["window"] else ""
        model = f" for {line['model']}" if line["model"] else ""
        amounts = (line["limit"], line["used"], line["asked"])
        table.add_row(
            line["owner"],
            Text(f"{unit}{span}{model}"),
            *(format_dollars(amount) if is_money else f"{amount:,}" for amount in amounts),
            "yes" if line["fits"] else _format_wait(line["wait_s"]),
        )
    return table


def _format_wait(wait_s: float | None) -> str:
    """Return when an exhausted limit admits the request."""
    if wait_s is None:
        return "never"
    return f"in {wait_s:.1f} s" if wait_s else "no"


def _format_ledger_line(line: dict[str, Any]) -> str:
    rates, fresh = line["rates"], line["input_tokens"] - line["cached_tokens"]
    parts = (
        (fresh, "input", rates["input"]),
        (line["cached_tokens"], "cached", rates["cached_input"]),
        (line["output_tokens"], "output", rates["output"]),
    )
    costs = " + ".join(f"{count:,} {kind} at {format_price(rate)}" for count, kind, rate in parts)
    return f"ledger: {format_dollars(line['nano_dollars'])} = {costs} per million tokens"


def _extra_table(name: str, section: Any) -> Table:  # noqa: ANN401 - JSON value of a filter
    from rich.table import Table
    from rich.text import Text

    table = Table(title=name, title_justify="left", box=None, padding=(0, 1))
    rows = section if isinstance(section, list) else [section]
    names = list(dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row))
    for heading in names or [""]:
        table.add_column(heading)
    for row in rows:
        values = [row.get(key, "") for key in names] if isinstance(row, dict) else [row]
        table.add_row(*(Text(_format_value(value)) for value in values))
    return table


def _format_value(value: Any) -> str:  # noqa: ANN401 - JSON value
    return value if isinstance(value, str) else json.dumps(value)


def _print_replica_report(console: Console, report: dict[str, Any]) -> None:
    """Print a report, its prompts and outputs last and with their line breaks."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="replica report", title_justify="left", box=None, show_header=False)
    for name, value in report.items():
        if name not in CONTENT_KEYS:
            shown = value if isinstance(value, str) else json.dumps(_round(value))
            table.add_row(format_one_line(name), Text(format_one_line(shown)))
    if table.row_count:
        console.print(table)
    for key, heading in CONTENT_KEYS.items():
        texts = report.get(key, [])
        for number, text in enumerate(texts, 1):
            console.print(Text(f"{heading} {number} of {len(texts)}", style="bold"))
            console.print(Text("\n".join(map(format_one_line, text.split("\n")))))


def _round(value: Any) -> Any:  # noqa: ANN401 - JSON value
    return round(value, 3) if isinstance(value, float) else value
