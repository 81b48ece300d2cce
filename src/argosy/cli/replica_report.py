"""Section of `argosy explain` with the report of the native replica: counts, times, and logged content."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from argosy.cli.output import format_one_line

if TYPE_CHECKING:
    from rich.console import Console

CONTENT_KEYS = {"prompts": "prompt", "outputs": "output"}
"""Keys with long texts, and the heading of one of their texts."""


def print_replica_report(console: Console, report: dict[str, Any]) -> None:
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
