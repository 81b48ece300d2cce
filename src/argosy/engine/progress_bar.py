"""A bar on standard error for offline runs: prompts done, tokens per second, time left."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

import rich.progress
from rich.console import Console


class ProgressBar(Protocol):
    """Hears how far a run has come."""

    def advance(self, prompts: int) -> None:
        """So many more prompts are done."""
        ...

    def add_tokens(self, count: int) -> None:
        """So many more tokens were generated."""
        ...


class NoProgressBar:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def advance(self, prompts: int) -> None:
        """Nothing to show."""

    def add_tokens(self, count: int) -> None:
        """Nothing to show."""


class RichProgressBar:
    """A bar; drawn only when standard error is a terminal."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("generating"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[rate]:.0f} tokens/s"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("generating", total=total, rate=0.0)
        self._tokens = 0
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, prompts: int) -> None:
        """So many more prompts are done."""
        self._bar.advance(self._task, prompts)

    def add_tokens(self, count: int) -> None:
        """So many more tokens were generated."""
        self._tokens += count
        elapsed = max(time.monotonic() - self._started_at, 1e-3)
        self._bar.update(self._task, rate=self._tokens / elapsed)
