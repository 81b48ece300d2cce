"""`argosy explain`: where the time of one request went, and why each decision was taken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.money import format_dollars, format_price
from argosy.cli.output import format_one_line, open_console
from argosy.cli.server_client import error_message, explain_connect_error, open_client

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR_WIDTH = 28
"""Characters of the bars."""
MAX_REASON_CHARS = 100
MIN_GAP_BAR_MS = 1.0
COST_TERMS = ("queue_s", "prefill_s", "decode_s", "memory_s", "stale_s", "total_s")
SECTION_KEYS = frozenset(
    {
        *("object", "id", "request_id", "status", "error", "model", "path", "stream", "caller"),
        *("asked", "route"),
        *("started_at", "ms", "queue", "rule", "attempts", "tokens", "finish_reasons"),
        *("limits", "ledger"),
    }
)
"""What the sections show; everything else was added by stages, and is shown under its key."""


def explain(
    request: Annotated[str, typer.Argument(help="Id of the answer, or of the request.")],
    *,
    url: Annotated[
        str, typer.Option(help="Gateway, or unix:PATH.", envvar="ARGOSY_URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", "--key", help="A key of its tenant.", envvar="ARGOSY_API_KEY"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the gateway says.")] = False,
) -> None:
    """Explain a request: its queue, the replicas that it went to and why, its limits, cost and times."""
    import httpx2

    with open_client(url, api_key) as client:
        try:
            answer = client.get(
                f"/admin/requests/{quote(request, safe='', errors='surrogateescape')}"
            )
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            fail(f"no gateway answers at {url}: {explain_connect_error(error, 'give its --url')}")
        except httpx2.HTTPError as error:
            fail(f"the connection to {url} broke ({error}); see the gateway's log", EXIT_FAILURE)
    if answer.status_code != 200:
        fail(error_message(answer.content))
    told = _parse_explanation(answer.content)
    if told is None:
        fail(f"what answers at {url} is no gateway of Argosy; check --url")
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        print_explanation(open_console(), told)


def _parse_explanation(content: bytes) -> dict[str, Any] | None:
    """An explanation; None when it is something else."""
    try:
        told = json.loads(content)
    except ValueError:
        return None
    explains = isinstance(told, dict) and told.get("object") == "request.explanation"
    return told if explains else None


def print_explanation(console: Console, explanation: dict[str, Any]) -> None:
    """Print an explanation for people."""
    console.print(_headline(explanation))
    console.print(_timeline_table(explanation))
    for number, attempt in enumerate(explanation["attempts"], 1):
        if attempt["candidates"]:
            console.print(_candidates_table(number, attempt, explanation["rule"]))
    if "limits" in explanation:
        console.print(_limits_table(explanation["limits"]))
    if "ledger" in explanation:
        console.print(_format_ledger_line(explanation["ledger"]))
    for name, added in explanation.items():
        if name not in SECTION_KEYS:
            console.print(_extra_table(name, added))


def _headline(explanation: dict[str, Any]) -> str:
    from rich.markup import escape

    tokens, caller, ended = explanation["tokens"], explanation["caller"], explanation["ms"]["ended"]
    colours = {"completed": "green", "replayed": "green", "running": "blue", "stopped": "yellow"}
    colour = colours.get(explanation["status"], "red")
    why = f" ({escape(explanation['error'])})" if explanation["error"] else ""
    finish = format_one_line(", ".join(sorted(set(explanation["finish_reasons"].values()))))
    led = f", by {escape(explanation['route'])}" if explanation["route"] else ""
    asked = (
        ""
        if explanation["asked"] == explanation["model"]
        else f" (for {escape(explanation['asked'])}{led})"
    )
    lines = [
        f"[bold]{escape(explanation['id'])}[/]  [{colour}]{explanation['status']}[/]{why}",
        f"{explanation['path']} to [bold]{escape(explanation['model'])}[/]{asked}, "
        + ("streamed" if explanation["stream"] else "sent whole"),
        f"{tokens['prompt']} prompt tokens ({tokens['cached']} cached), {tokens['output']} output"
        + (f", finished by {escape(finish)}" if finish else "")
        + ("" if ended is None else f", {ended:.0f} ms"),
    ]
    if caller["project"]:
        key = f", key {escape(caller['key'])}" if caller["key"] else ""
        lines.append(f"tenant {escape(caller['project'])}{key}, tier {caller['tier']}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """One bar of the waterfall, in milliseconds since the request came."""

    name: str
    begin_ms: float
    end_ms: float
    style: str


def timeline_steps(explanation: dict[str, Any]) -> Iterator[TimelineStep]:
    """What took the time, in order."""
    ms = explanation["ms"]
    last = max(value for value in _all_times_ms(explanation) if value is not None)
    yield TimelineStep("read the request", 0.0, ms["read"], "cyan")
    yield TimelineStep("let in", ms["read"], _value_or(ms["admitted"], last), "cyan")
    if ms["queued"] is not None:
        placed = explanation["attempts"][0]["chosen_ms"] if explanation["attempts"] else ms["ended"]
        ahead = explanation["queue"]["ahead"]
        yield TimelineStep(f"queue, {ahead} ahead", ms["queued"], _value_or(placed, last), "yellow")
    free, outcome = -math.inf, ""  # since when nobody has it, and how the last attempt ended
    for attempt in explanation["attempts"]:
        begin, end = attempt["chosen_ms"], _value_or(attempt["ended_ms"], last)
        yield from _gap_steps(free, begin, outcome)
        free, outcome = max(free, end), attempt["outcome"]
        first = _value_or(attempt["first_token_ms"], end)
        why = f", on after {attempt['carried_on_at']}" if attempt["carried_on_at"] else ""
        why = ", hedge" if attempt["hedge"] else why
        yield TimelineStep(f"{attempt['replica']}{why}: first token", begin, first, "magenta")
        if attempt["first_token_ms"] is not None:
            yield TimelineStep(
                f"{attempt['replica']}: {_format_outcome(attempt)}", first, end, "green"
            )
        elif attempt["outcome"] != "success":
            yield TimelineStep(f"{attempt['replica']}: {_format_outcome(attempt)}", end, end, "red")
    yield from _gap_steps(free, last, outcome)


def _gap_steps(free_since_ms: float, until_ms: float, outcome: str) -> Iterator[TimelineStep]:
    """What happened while no replica had it."""
    if outcome and until_ms - free_since_ms >= MIN_GAP_BAR_MS:
        waits = outcome not in {"success", "ended"}
        yield TimelineStep(
            "another replica" if waits else "its end", free_since_ms, until_ms, "yellow"
        )


def _all_times_ms(explanation: dict[str, Any]) -> Iterator[float | None]:
    yield from explanation["ms"].values()
    for attempt in explanation["attempts"]:
        yield from (attempt["chosen_ms"], attempt["ended_ms"], attempt["first_token_ms"])


def _format_outcome(attempt: dict[str, Any]) -> str:
    why = format_one_line(attempt["reason"] or "")
    if len(why) > MAX_REASON_CHARS:
        why = f"{why[:MAX_REASON_CHARS]}…"
    return f"{attempt['outcome']} ({why})" if why else f"{attempt['outcome']}"


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _timeline_table(explanation: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("step", box=None, header_style="bold", padding=(0, 1))
    table.add_column("from ms", justify="right")
    table.add_column("took ms", justify="right")
    table.add_column("", no_wrap=True)
    shown = list(timeline_steps(explanation))
    whole = max(step.end_ms for step in shown) or 1.0
    for step in shown:
        left = round(step.begin_ms / whole * BAR_WIDTH)
        long = max(1, round((step.end_ms - step.begin_ms) / whole * BAR_WIDTH))
        bar = Text(" " * min(left, BAR_WIDTH - 1) + "━" * min(long, BAR_WIDTH), style=step.style)
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
    for term in COST_TERMS:
        table.add_column(term.removesuffix("_s"), justify="right")
    for candidate in attempt["candidates"]:
        chosen = candidate["replica"] == attempt["replica"]
        cells = [f"{candidate[term]:.4f}" for term in COST_TERMS]
        name = Text(candidate["replica"])
        table.add_row(name, *cells, style="bold" if chosen else "dim")
    return table


def _limits_table(lines: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="limits", title_justify="left", box=None, padding=(0, 1))
    table.add_column("of", no_wrap=True)
    table.add_column("what")
    for name in ("at most", "used", "asks for"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits")
    for line in lines:
        money = line["unit"] == "nano_dollars"
        unit = "dollars" if money else line["unit"]
        span = f" per {line['window']}" if line["window"] else ""
        model = f" for {line['model']}" if line["model"] else ""
        amounts = (line["limit"], line["used"], line["asked"])
        table.add_row(
            line["owner"],
            Text(f"{unit}{span}{model}"),
            *(format_dollars(amount) if money else f"{amount:,}" for amount in amounts),
            "yes" if line["fits"] else _format_wait(line["wait_s"]),
        )
    return table


def _format_wait(wait_s: float | None) -> str:
    """When there is room in a limit that has none."""
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
    sums = " + ".join(f"{count:,} {kind} at {format_price(rate)}" for count, kind, rate in parts)
    return f"ledger: {format_dollars(line['nano_dollars'])} = {sums} a million"


def _extra_table(name: str, section: Any) -> Table:  # noqa: ANN401 - what a stage said, in JSON's types
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


def _format_value(value: Any) -> str:  # noqa: ANN401 - JSON's types
    return value if isinstance(value, str) else json.dumps(value)
