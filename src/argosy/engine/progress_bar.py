"""Progress bar of offline runs on standard error, with finished prompts, tokens per second and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import rich.progress
from rich.console import Console


class ProgressBar(Protocol):
    """Display of a run's progress."""

    def advance(self, prompts: int) -> None:
        """Add `prompts` to the number of finished prompts."""
        ...

    def add_tokens(self, count: int) -> None:
        """Add `count` to the number of generated tokens."""
        ...


class NoProgressBar:
    """Progress bar that displays nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def advance(self, prompts: int) -> None:
        """Ignore the progress."""

    def add_tokens(self, count: int) -> None:
        """Ignore the progress."""


class CallerProgressBar:
    """Progress bar that the caller's function creates, for example `tqdm.tqdm`."""

    def __init__(self, create_bar: Callable[..., Any], total: int) -> None:
        self._bar = create_bar(total=total, desc="generating")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, prompts: int) -> None:
        """Add `prompts` to the number of finished prompts."""
        self._bar.update(prompts)

    def add_tokens(self, count: int) -> None:
        """Ignore the tokens, which such a bar does not show."""


class RichProgressBar:
    """Progress bar that is drawn only if standard error is a terminal."""

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
        """Add `prompts` to the number of finished prompts."""
        self._bar.advance(self._task, prompts)

    def add_tokens(self, count: int) -> None:
        """Add `count` to the number of generated tokens and update the rate."""
        self._tokens += count
        elapsed = max(time.monotonic() - self._started_at, 1e-3)
        self._bar.update(self._task, rate=self._tokens / elapsed)
