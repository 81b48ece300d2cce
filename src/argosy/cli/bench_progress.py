"""Progress display of `argosy bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from argosy.bench import RequestRow


class BenchProgress:
    """Progress bar on standard error, shown only on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
            # Each refresh takes processor time from a server on the same machine.
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("probing the server", total=None, now="")
        self._failed_requests = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def on_run_start(self, label: str, requests: int) -> None:
        """Show a new bar for the run."""
        self._failed_requests = 0
        self._task = self._bar.add_task(label, total=requests, now="")

    def on_request_end(self, row: RequestRow, in_flight: int) -> None:
        """Advance the bar by one request."""
        self._failed_requests += row.outcome == "error"
        failed = f", [red]{self._failed_requests} failed[/red]" if self._failed_requests else ""
        self._bar.update(self._task, advance=1, now=f"{in_flight} in flight{failed}")
