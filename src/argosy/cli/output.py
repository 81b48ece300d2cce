"""Output of records: a table, a list of fields if the table is too wide, or JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

JsonOutput = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

MAX_TABLE_WIDTH = 10_000
"""Maximum width in characters of a table that is written to a file or a pipe, with one line per record."""
_COLORED_COLUMNS = frozenset({"phase", "status"})
_STATE_COLORS = {
    "ready": "green",
    "failed": "red",
    "refused": "red",
    "unreachable": "red",
    "ejected": "red",
    "page": "red",
    "out_of_service": "yellow",
    "draining": "yellow",
    "sleeping": "blue",
    "cordoned": "yellow",
    "ticket": "yellow",
}
"""Colours of states and severities. Other states that change by themselves have none."""
_SIGN_COLORS = {"+": "green", "-": "red", "~": "yellow"}
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and line feed."""
SHOWN_DIGEST_CHARS = 12
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


def print_records(
    records: Sequence[T],
    columns: Sequence[str],
    format_row: Callable[[T], Sequence[object]],
    empty_message: str,
    *,
    json: JsonOutput,
) -> None:
    """Print the records as a table, or as JSON. `format_row` returns the cells of a record.

    A terminal that is too narrow for the table gets a list with one field per line.
    """
    if json:
        print_json(records)
        return
    if not records:
        typer.echo(empty_message)
        return
    from rich.table import Table
    from rich.text import Text

    rows = [
        ["" if cell is None else format_one_line(str(cell)) for cell in format_row(record)]
        for record in records
    ]
    table = Table(*columns)
    for cells in rows:
        table.add_row(
            *(
                Text(cell, style=_STATE_COLORS.get(cell, "") if name in _COLORED_COLUMNS else "")
                for name, cell in zip(columns, cells, strict=True)
            )
        )
    console = open_console(markup=False)
    if (
        console.measure(table, options=console.options.update(width=MAX_TABLE_WIDTH)).maximum
        > console.width
    ):
        typer.echo("\n\n".join(_format_record(columns, cells) for cells in rows))
    else:
        console.print(table)


def _format_record(columns: Sequence[str], cells: Sequence[str]) -> str:
    """Return one line per column that is not empty. A narrow table would truncate ids."""
    width = max(map(len, columns))
    fields = zip(columns, cells, strict=True)
    return "\n".join(
        f"{column:{width}}  {color_state(cell) if column in _COLORED_COLUMNS else cell}"
        for column, cell in fields
        if cell
    )


def open_console(*, markup: bool = True) -> Console:
    """Return a console on standard output. Lines for files and pipes are not wrapped."""
    from rich.console import Console

    width = None if Console().is_terminal else MAX_TABLE_WIDTH
    return Console(width=width, markup=markup, emoji=False)


def strip_control_characters(text: str) -> str:
    """Remove control characters except tab and line feed, since a model's output may contain terminal commands."""
    return _CONTROL_CHARACTERS.sub("", text)


def color_state(state: str, text: str | None = None) -> str:
    """Return a state, or a text about it, in the colour that it has on a terminal."""
    return typer.style(state if text is None else text, fg=_STATE_COLORS.get(state.lower()))


def color_sign(line: str) -> str:
    """Return a line of a plan in the colour of its sign: what is added, removed or changed."""
    return typer.style(line, fg=_SIGN_COLORS.get(line.strip()[:1]))


def format_one_line(text: str) -> str:
    """Replace unprintable characters and line ends by U+FFFD, for cells with text from users."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def print_result(record: object, message: str, *, json: JsonOutput) -> None:
    """Print the result of a change: the sentence `message`, or the record as JSON."""
    if json:
        print_json(record)
    else:
        typer.echo(message)


def print_json(value: Any, **more: str) -> None:  # noqa: ANN401 - a record or a list of records
    """Print a record, with more fields if given, or a list of records as JSON, without key digests."""
    import msgspec

    builtins = msgspec.to_builtins(value)
    for record in builtins if isinstance(builtins, list) else [builtins]:
        record.pop("digest", None)
    output = builtins | more if more else builtins
    typer.echo(msgspec.json.format(msgspec.json.encode(output)).decode())


def shorten_digests(text: str) -> str:
    """Return a text with the digests of versions shortened to their beginnings."""
    return _DIGEST.sub(lambda match: match[0][:SHOWN_DIGEST_CHARS], text)
