"""How commands show records: a table for people, a list where it is too wide, or JSON for programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

WIDE = 10_000
"""Most columns of a table that goes into a file or a pipe, where each record has a line."""
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but for tabs and line ends."""


def show(
    records: Sequence[T],
    columns: Sequence[str],
    row: Callable[[T], Sequence[object]],
    none: str,
    *,
    json: AsJson,
) -> None:
    """Print a table with a `row` for each record, the sentence `none` where there is no record, or all as JSON."""
    if json:
        show_json(records)
        return
    if not records:
        typer.echo(none)
        return
    from rich.table import Table

    rows = [["" if cell is None else printable(str(cell)) for cell in row(one)] for one in records]
    table = Table(*columns)
    for cells in rows:
        table.add_row(*cells)
    console = terminal(markup=False)
    if console.measure(table, options=console.options.update(width=WIDE)).maximum > console.width:
        typer.echo("\n\n".join(_listed(columns, cells) for cells in rows))
    else:
        console.print(table)


def _listed(columns: Sequence[str], cells: Sequence[str]) -> str:
    """A record with a line for each column that says something: what is cut, as ids would be, helps nobody."""
    wide = max(map(len, columns))
    told = zip(columns, cells, strict=True)
    return "\n".join(f"{column:{wide}}  {cell}" for column, cell in told if cell)


def terminal(*, markup: bool = True) -> Console:
    """Where people read; lines that go into a file or a pipe are as long as what they say."""
    from rich.console import Console

    width = None if Console().is_terminal else WIDE
    return Console(width=width, markup=markup, emoji=False)


def harmless(text: str) -> str:
    """Without what would command the terminal: models and servers say it if they are made to. Lines stay lines."""
    return _COMMANDS.sub("", text)


def printable(text: str) -> str:
    """The same in one line, as a cell of a table is: some are users' own."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def tell(record: object, sentence: str, *, json: AsJson) -> None:
    """Print what became of a record: a sentence, or the record as JSON."""
    if json:
        show_json(record)
    else:
        typer.echo(sentence)


def show_json(value: Any, **more: str) -> None:  # noqa: ANN401 - a record or a list of them
    """Print records as JSON, without the digests of keys; one record with `more` beside its fields."""
    import msgspec

    plain = msgspec.to_builtins(value)
    for record in plain if isinstance(plain, list) else [plain]:
        record.pop("digest", None)
    shown = plain | more if more else plain
    typer.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
