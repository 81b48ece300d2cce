"""`argosy explain`: where the time of one request went, and why each decision was taken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from argosy.cli.failure import BROKEN, fail
from argosy.cli.money import show_dollars, show_price
from argosy.cli.output import printable, terminal
from argosy.cli.server_client import connect, reason, why_not

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 28
"""Characters of the bars."""
LONGEST_REASON = 100
WORTH_A_BAR_MS = 1.0
TERMS = ("queue_s", "prefill_s", "decode_s", "memory_s", "stale_s", "total_s")
SHOWN = frozenset(
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

    with connect(url, api_key) as client:
        try:
            answer = client.get(
                f"/admin/requests/{quote(request, safe='', errors='surrogateescape')}"
            )
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            fail(f"no gateway answers at {url}: {why_not(error, 'give its --url')}")
        except httpx2.HTTPError as error:
            fail(f"the connection to {url} broke ({error}); see the gateway's log", BROKEN)
    if answer.status_code != 200:
        fail(reason(answer.content))
    told = _read(answer.content)
    if told is None:
        fail(f"what answers at {url} is no gateway of Argosy; check --url")
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        show(terminal(), told)


def _read(content: bytes) -> dict[str, Any] | None:
    """An explanation; None when it is something else."""
    try:
        told = json.loads(content)
    except ValueError:
        return None
    explains = isinstance(told, dict) and told.get("object") == "request.explanation"
    return told if explains else None


def show(console: Console, told: dict[str, Any]) -> None:
    """Print an explanation for people."""
    console.print(_headline(told))
    console.print(_waterfall(told))
    for number, attempt in enumerate(told["attempts"], 1):
        if attempt["candidates"]:
            console.print(_candidates(number, attempt, told["rule"]))
    if "limits" in told:
        console.print(_limits(told["limits"]))
    if "ledger" in told:
        console.print(_ledger(told["ledger"]))
    for name, added in told.items():
        if name not in SHOWN:
            console.print(_added(name, added))


def _headline(told: dict[str, Any]) -> str:
    from rich.markup import escape

    tokens, caller, ended = told["tokens"], told["caller"], told["ms"]["ended"]
    colours = {"completed": "green", "replayed": "green", "running": "blue", "stopped": "yellow"}
    colour = colours.get(told["status"], "red")
    why = f" ({escape(told['error'])})" if told["error"] else ""
    finish = printable(", ".join(sorted(set(told["finish_reasons"].values()))))
    led = f", by {escape(told['route'])}" if told["route"] else ""
    asked = "" if told["asked"] == told["model"] else f" (for {escape(told['asked'])}{led})"
    lines = [
        f"[bold]{escape(told['id'])}[/]  [{colour}]{told['status']}[/]{why}",
        f"{told['path']} to [bold]{escape(told['model'])}[/]{asked}, "
        + ("streamed" if told["stream"] else "sent whole"),
        f"{tokens['prompt']} prompt tokens ({tokens['cached']} cached), {tokens['output']} output"
        + (f", finished by {escape(finish)}" if finish else "")
        + ("" if ended is None else f", {ended:.0f} ms"),
    ]
    if caller["project"]:
        key = f", key {escape(caller['key'])}" if caller["key"] else ""
        lines.append(f"tenant {escape(caller['project'])}{key}, tier {caller['tier']}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Step:
    """One bar of the waterfall, in milliseconds since the request came."""

    name: str
    begin: float
    end: float
    style: str


def steps(told: dict[str, Any]) -> Iterator[Step]:
    """What took the time, in order."""
    ms = told["ms"]
    last = max(value for value in _all_times(told) if value is not None)
    yield Step("read the request", 0.0, ms["read"], "cyan")
    yield Step("let in", ms["read"], _or(ms["admitted"], last), "cyan")
    if ms["queued"] is not None:
        placed = told["attempts"][0]["chosen_ms"] if told["attempts"] else ms["ended"]
        ahead = told["queue"]["ahead"]
        yield Step(f"queue, {ahead} ahead", ms["queued"], _or(placed, last), "yellow")
    free, outcome = -math.inf, ""  # since when nobody has it, and how the last attempt ended
    for attempt in told["attempts"]:
        begin, end = attempt["chosen_ms"], _or(attempt["ended_ms"], last)
        yield from _between(free, begin, outcome)
        free, outcome = max(free, end), attempt["outcome"]
        first = _or(attempt["first_token_ms"], end)
        why = f", on after {attempt['carried_on_at']}" if attempt["carried_on_at"] else ""
        why = ", hedge" if attempt["hedge"] else why
        yield Step(f"{attempt['replica']}{why}: first token", begin, first, "magenta")
        if attempt["first_token_ms"] is not None:
            yield Step(f"{attempt['replica']}: {_outcome(attempt)}", first, end, "green")
        elif attempt["outcome"] != "success":
            yield Step(f"{attempt['replica']}: {_outcome(attempt)}", end, end, "red")
    yield from _between(free, last, outcome)


def _between(free: float, until: float, outcome: str) -> Iterator[Step]:
    """What happened while no replica had it."""
    if outcome and until - free >= WORTH_A_BAR_MS:
        waits = outcome not in {"success", "ended"}
        yield Step("another replica" if waits else "its end", free, until, "yellow")


def _all_times(told: dict[str, Any]) -> Iterator[float | None]:
    yield from told["ms"].values()
    for attempt in told["attempts"]:
        yield from (attempt["chosen_ms"], attempt["ended_ms"], attempt["first_token_ms"])


def _outcome(attempt: dict[str, Any]) -> str:
    why = printable(attempt["reason"] or "")
    if len(why) > LONGEST_REASON:
        why = f"{why[:LONGEST_REASON]}…"
    return f"{attempt['outcome']} ({why})" if why else f"{attempt['outcome']}"


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _waterfall(told: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("step", box=None, header_style="bold", padding=(0, 1))
    table.add_column("from ms", justify="right")
    table.add_column("took ms", justify="right")
    table.add_column("", no_wrap=True)
    shown = list(steps(told))
    whole = max(step.end for step in shown) or 1.0
    for step in shown:
        left = round(step.begin / whole * WIDTH)
        long = max(1, round((step.end - step.begin) / whole * WIDTH))
        bar = Text(" " * min(left, WIDTH - 1) + "━" * min(long, WIDTH), style=step.style)
        table.add_row(Text(step.name), f"{step.begin:.1f}", f"{step.end - step.begin:.1f}", bar)
    return table


def _candidates(number: int, attempt: dict[str, Any], rule: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = f"Attempt {number}: chosen by {rule}; costs in seconds"
    table = Table(
        "replica", title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1)
    )
    for term in TERMS:
        table.add_column(term.removesuffix("_s"), justify="right")
    for candidate in attempt["candidates"]:
        chosen = candidate["replica"] == attempt["replica"]
        cells = [f"{candidate[term]:.4f}" for term in TERMS]
        name = Text(candidate["replica"])
        table.add_row(name, *cells, style="bold" if chosen else "dim")
    return table


def _limits(lines: list[dict[str, Any]]) -> Table:
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
            *(show_dollars(amount) if money else f"{amount:,}" for amount in amounts),
            "yes" if line["fits"] else _when(line["wait_s"]),
        )
    return table


def _when(wait_s: float | None) -> str:
    """When there is room in a limit that has none."""
    if wait_s is None:
        return "never"
    return f"in {wait_s:.1f} s" if wait_s else "no"


def _ledger(line: dict[str, Any]) -> str:
    rates, fresh = line["rates"], line["input_tokens"] - line["cached_tokens"]
    parts = (
        (fresh, "input", rates["input"]),
        (line["cached_tokens"], "cached", rates["cached_input"]),
        (line["output_tokens"], "output", rates["output"]),
    )
    sums = " + ".join(f"{count:,} {kind} at {show_price(rate)}" for count, kind, rate in parts)
    return f"ledger: {show_dollars(line['nano_dollars'])} = {sums} a million"


def _added(name: str, added: Any) -> Table:  # noqa: ANN401 - what a stage said, in JSON's types
    from rich.table import Table
    from rich.text import Text

    table = Table(title=name, title_justify="left", box=None, padding=(0, 1))
    rows = added if isinstance(added, list) else [added]
    names = list(dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row))
    for heading in names or [""]:
        table.add_column(heading)
    for row in rows:
        values = [row.get(key, "") for key in names] if isinstance(row, dict) else [row]
        table.add_row(*(Text(_plain(value)) for value in values))
    return table


def _plain(value: Any) -> str:  # noqa: ANN401 - JSON's types
    return value if isinstance(value, str) else json.dumps(value)
