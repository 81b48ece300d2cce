"""`argosy validate`: all errors of a settings file, with their lines, without a store or a server.

The files may be from anyone, such as the author of a change that CI checks. They are bounded as all settings files are,
at most 100 errors are looked for, and nothing that they name is opened, started or connected to.
"""

from __future__ import annotations

from pathlib import Path

import typer

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.fleet_target import FilesArgument, FilesOption, list_files


def validate(files: FilesArgument = None, *, overlays: FilesOption = None) -> None:
    """Check a declaration of a fleet, or a gateway's settings file, and show all errors as FILE:LINE: SETTING: PROBLEM.

    Only the files are read, so that it suits CI: `argosy plan` also looks at the machine. `-` is the standard input.
    Exits with status 0 if the files are valid, 1 if they are not, and 2 if one cannot be read.
    """
    from argosy.deployment import check_files

    paths = [
        Path("/dev/stdin") if str(path) == "-" else path for path in list_files(files, overlays)
    ]
    try:
        checked = check_files(paths)
    except ValueError as error:
        fail(str(error))
    for line in (*checked.errors, *checked.warnings):
        typer.echo(line)
    shown = ", ".join(map(str, paths))
    if not checked.errors:
        typer.echo(f"{shown}: valid {checked.kind}", err=True)
        return
    count = len(checked.errors)
    summary, these = ("1 error", "it is") if count == 1 else (f"{count} errors", "these are")
    rest = "" if checked.is_complete else f"; others may show when {these} corrected"
    typer.echo(f"{shown}: {summary}{rest}", err=True)
    raise typer.Exit(EXIT_FAILURE)
