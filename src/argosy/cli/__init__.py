"""The `argosy` command."""

import errno
import io
import signal
import sys


def main() -> None:
    """Run the command line; exits with its status. Ctrl-C ends it at once while it is being loaded."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:  # there is nothing to clean up yet, and a traceback of imports helps nobody
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from typer.main import get_command

    from argosy.cli.app import app
    from argosy.process import protect_standard_streams

    protect_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal has no letters for
    command = get_command(app)
    if heeds:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(f"argosy: there was no room for what was to be written ({error.strerror})")


__all__ = ["main"]
