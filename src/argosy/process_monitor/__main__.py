"""Entry point of a monitor. Reads `MonitorSettings` from standard input, and writes a line with the result.

The result is a string in JSON: why the process could not be created, or empty.
"""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec

from argosy.process_monitor.messages import MonitorSettings
from argosy.process_monitor.monitor import ProcessMonitor


def main() -> int:
    """Run one process to its end, and return 0 if it could be started."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the launcher was killed before it had written all
        return 1
    try:
        monitor = ProcessMonitor(msgspec.json.decode(line, type=MonitorSettings))
        monitor.start()
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        _report(f"{name}{error.strerror or error}")
        return 1
    _report("")
    monitor.run()
    return 0


def _report(result: str) -> None:
    """Write the result, and close standard output. A launcher that was killed meanwhile does not read it."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(result) + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
