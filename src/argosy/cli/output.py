"""How commands show records: a table for people, a list where it is too wide, or JSON for programs."""

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
"""Most columns of a table that goes into a file or a pipe, where each record has a line."""
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but for tabs and line ends."""


def print_records(
    records: Sequence[T],
    columns: Sequence[str],
    format_row: Callable[[T], Sequence[object]],
    empty_message: str,
    *,
    json: JsonOutput,
) -> None:
    """Print a table with a `row` for each record, the sentence `none` where there is no record, or all as JSON."""
    if json:
        print_json(records)
        return
    if not records:
        typer.echo(empty_message)
        return
    from rich.table import Table

    rows = [
        ["" if cell is None else format_one_line(str(cell)) for cell in format_row(one)]
        for one in records
    ]
    table = Table(*columns)
    for cells in rows:
        table.add_row(*cells)
    console = open_console(markup=False)
    if (
        console.measure(table, options=console.options.update(width=MAX_TABLE_WIDTH)).maximum
        > console.width
    ):
        typer.echo("\n\n".join(_format_record(columns, cells) for cells in rows))
    else:
        console.print(table)


def _format_record(columns: Sequence[str], cells: Sequence[str]) -> str:
    """A record with a line for each column that says something: what is cut, as ids would be, helps nobody."""
    wide = max(map(len, columns))
    told = zip(columns, cells, strict=True)
    return "\n".join(f"{column:{wide}}  {cell}" for column, cell in told if cell)


def open_console(*, markup: bool = True) -> Console:
    """Where people read; lines that go into a file or a pipe are as long as what they say."""
    from rich.console import Console

    width = None if Console().is_terminal else MAX_TABLE_WIDTH
    return Console(width=width, markup=markup, emoji=False)


def strip_control_characters(text: str) -> str:
    """Without what would command the terminal: models and servers say it if they are made to. Lines stay lines."""
    return _CONTROL_CHARACTERS.sub("", text)


def format_one_line(text: str) -> str:
    """The same in one line, as a cell of a table is: some are users' own."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def print_result(record: object, message: str, *, json: JsonOutput) -> None:
    """Print what became of a record: a sentence, or the record as JSON."""
    if json:
        print_json(record)
    else:
        typer.echo(message)


def print_json(value: Any, **more: str) -> None:  # noqa: ANN401 - a record or a list of them
    """Print records as JSON, without the digests of keys; one record with `more` beside its fields."""
    import msgspec

    plain = msgspec.to_builtins(value)
    for record in plain if isinstance(plain, list) else [plain]:
        record.pop("digest", None)
    shown = plain | more if more else plain
    typer.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
