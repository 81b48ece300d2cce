"""Failure of a command: one sentence on standard error and an exit status, without a traceback."""

from __future__ import annotations

from typing import NoReturn

import typer

EXIT_USAGE = 2
"""Exit status of a command that cannot start. The message says what to change."""
EXIT_FAILURE = 1
"""Exit status of a command that failed while it ran."""

EXIT_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells have it."""


def fail(message: str, status: int = EXIT_USAGE) -> NoReturn:
    """Print `message` to standard error and exit with `status`."""
    typer.secho(f"argosy: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(status)
