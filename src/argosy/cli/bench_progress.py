"""Progress display of `argosy bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy.progress_bar import ProgressBar

if TYPE_CHECKING:
    from argosy.bench import RequestRow


class BenchProgress(ProgressBar):
    """Progress bar of the current run, with the numbers of requests."""

    def __init__(self) -> None:
        # Each refresh takes processor time from a server on the same machine.
        super().__init__("probing the server", refresh_per_second=2)
        self._requests = self._failed = 0

    def on_run_start(self, label: str, requests: int) -> None:
        """Show the bar of a run."""
        self._requests, self._failed = requests, 0
        self.restart(label, requests)

    def on_request_end(self, row: RequestRow, in_flight: int) -> None:
        """Advance the bar by one request."""
        self._failed += row.outcome == "error"
        failed = f", {self._failed} failed" if self._failed else ""
        self.update(advance=1)
        self.update(note=f"{self.completed:.0f}/{self._requests}, {in_flight} in flight{failed}")
