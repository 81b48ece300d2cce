"""Progress bar on standard error, which `LLM` and all commands show."""

from __future__ import annotations

from typing import Any, Self


class ProgressBar:
    """Progress bar that is drawn while its context is open, if standard error is a terminal.

    Args:
        description: What is in progress.
        total: Value at the end. None if it is unknown yet.
        is_shown: Whether to draw the bar on a terminal.
        refresh_per_second: How often it is drawn.
    """

    def __init__(
        self,
        description: str,
        total: float | None = None,
        *,
        is_shown: bool = True,
        refresh_per_second: float = 10,
    ) -> None:
        # Imported here, so that `argosy --help` stays fast.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console = Console(stderr=True)
        """Console to print lines above the bar."""
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.console,
            refresh_per_second=refresh_per_second,
            transient=True,
            disable=not (is_shown and self.console.is_terminal),
        )
        self._task = self._bar.add_task(description, total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def completed(self) -> float:
        """Value of the progress."""
        return self._bar.tasks[0].completed

    def stop(self) -> None:
        """Remove the bar. May be called more than once."""
        self._bar.stop()

    def restart(self, description: str, total: float | None) -> None:
        """Begin again at 0, with another description."""
        self._bar.reset(self._task, total=total, description=description, note="")

    def update(
        self,
        *,
        advance: float | None = None,
        completed: float | None = None,
        description: str | None = None,
        note: str | None = None,
    ) -> None:
        """Change what is given. `completed` is the value of the progress, and `note` a text behind the bar."""
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._bar.update(
            self._task, advance=advance, completed=completed, description=description, **fields
        )
