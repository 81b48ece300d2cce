"""Process of one replica, started by a launcher: `python -m argosy.fleet.replica_process`.

The process reads a `ReplicaSpec` as one line of JSON from standard input, and writes `ReplicaReport`s as lines to
standard output. The launcher keeps standard input open. When it is closed the launcher is gone, and the process exits.
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
    """Serve until SIGTERM, and return the exit status."""
    _set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the launcher decides what to stop
    report_fd = os.dup(1)
    os.dup2(2, 1)  # redirects what libraries print from the reports to the log
    with PrestartedCore() as core:  # the core's slow imports run in parallel with this process's
        line = sys.stdin.buffer.readline()
        if not line:  # the launcher is gone
            return 0
        threading.Thread(target=_exit_with_launcher, name="launcher", daemon=True).start()
        return _serve(line, report_fd, core)


def _serve(line: bytes, report_fd: int, core: PrestartedCore) -> int:
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
        os.write(report_fd, msgspec.json.encode(message) + b"\n")

    spec = msgspec.json.decode(line, type=ReplicaSpec)
    try:
        serve_replica(
            spec.server,
            spec.engine,
            on_ready=lambda _url: report(ReplicaServing()),
            on_load_progress=lambda activity, fraction: report(ReplicaLoading(activity, fraction)),
            prestarted_core=core,
        )
    except (EngineFailedError, ValueError) as error:
        report(ReplicaRefused(str(error)))
        return EXIT_FAILED
    except OSError as error:
        report(ReplicaRefused(format_os_error(error)))
        return EXIT_FAILED
    return 0


def _set_parent_death_signal() -> None:
    """Let Linux kill this process when the thread that created it ends, even if this process hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_launcher() -> NoReturn:
    os.read(0, 1)  # the launcher sends nothing more, so this returns when it closes the pipe
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
