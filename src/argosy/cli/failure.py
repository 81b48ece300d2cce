"""How a command says what went wrong: one sentence on standard error, no traceback."""

from __future__ import annotations

from typing import NoReturn

import typer

EXIT_USAGE = 2
"""Exit status: what was asked for cannot be done as things are; the sentence says what to change."""
EXIT_FAILURE = 1
"""Exit status: it worked, and then it broke."""


def fail(message: str, status: int = EXIT_USAGE) -> NoReturn:
    """Print `sentence` and leave."""
    typer.secho(f"argosy: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(status)
