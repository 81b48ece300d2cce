"""Command-line interface: the `argosy` command.

The public module `app` registers one module per command. The account commands open the store directly through
`account_lookup`. The commands `serve`, `gateway` and `replica` run servers. `replica_options` makes the options of
replicas from the settings that declare them. The commands `chat`, `explain` and `bench` are HTTP clients of a server.
The module `output` prints records as tables or JSON, and `failure` ends a command with a message and an exit status.
Modules import heavy packages inside functions, so that `argosy --help` stays fast.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer import Typer

    from argosy.engine import PrestartedCore


def main() -> None:
    """Run the command line and exit with its status. While modules are imported, Ctrl-C ends the process at once."""
    handles_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupt:  # nothing needs a clean-up yet, and a traceback of imports would not help
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getpid() == 1:  # of a container: the system ignores what process 1 does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        core = None
        if sys.argv[1:2] == ["replica"]:
            from argosy.engine import PrestartedCore

            # Its slow imports run in parallel with those of the command line and the server.
            core = stack.enter_context(PrestartedCore())
        _run_command(core, handles_interrupt=handles_interrupt)


def _run_command(core: PrestartedCore | None, *, handles_interrupt: bool) -> None:
    from typer.main import get_command

    from argosy.cli.app import app
    from argosy.process import protect_standard_streams

    protect_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot encode
    _keep_named_command(app, sys.argv[1:2])
    command = get_command(app)
    if handles_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command(obj=core)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(
            f"argosy: the output could not be written, because the disk is full ({error.strerror})"
        )


def _keep_named_command(app: Typer, arguments: Sequence[str]) -> None:
    """Remove all other commands if the first argument names one. Building all of them would take 70 ms."""
    named = [command for command in app.registered_commands if command.name in arguments]
    if named:
        app.registered_commands, app.registered_groups = named, []


__all__ = ["app", "main"]
