"""One replica as a process of whoever launched it: `python -m argosy.fleet.replica_process`.

It reads a `ReplicaSpec` as a line of JSON from stdin and writes `Report`s as lines to stdout. Its launcher keeps
stdin open: when that ends the launcher is gone, and so is the replica.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

from argosy.engine import PrestartedCore

EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until told to stop; the exit status."""
    _set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which decides
    reports = os.dup(1)
    os.dup2(2, 1)  # what a library prints belongs to the log
    with PrestartedCore() as early:  # its imports take longest: it does them during ours
        line = sys.stdin.buffer.readline()
        if not line:  # the launcher has changed its mind
            return 0
        threading.Thread(target=_exit_with_launcher, name="launcher", daemon=True).start()
        return _serve(line, reports, early)


def _serve(line: bytes, reports: int, early: PrestartedCore) -> int:
    import msgspec

    from argosy.engine import EngineFailedError, serve_replica
    from argosy.fleet.launch_messages import (
        ReplicaLoading,
        ReplicaRefused,
        ReplicaReport,
        ReplicaServing,
        ReplicaSpec,
    )
    from argosy.process import format_os_error, protect_standard_streams

    protect_standard_streams()

    def report(message: ReplicaReport) -> None:
        os.write(reports, msgspec.json.encode(message) + b"\n")

    spec = msgspec.json.decode(line, type=ReplicaSpec)
    try:
        serve_replica(
            spec.server,
            spec.engine,
            on_ready=lambda _url: report(ReplicaServing()),
            on_load_progress=lambda what, done: report(ReplicaLoading(what, done)),
            prestarted_core=early,
        )
    except (EngineFailedError, ValueError) as error:
        report(ReplicaRefused(str(error)))
        return EXIT_FAILED
    except OSError as error:
        report(ReplicaRefused(format_os_error(error)))
        return EXIT_FAILED
    return 0


def _set_parent_death_signal() -> None:
    """Ask Linux to kill this process with the thread that made it, even if it hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_launcher() -> NoReturn:
    os.read(0, 1)  # nothing more is sent: this returns when the other end is closed
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
