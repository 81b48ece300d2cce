"""Process whose `LocalProcessLauncher`s are killed: each time at a later line of its code, or by the test.

Usage: `python -m tests.support.killed_launcher FOLDER [STEP]`. With a step, it forks for each step-th line a child that
is killed before that line of a start, and prints a line after its end. Without one it starts a replica that dies with
it, prints a line and sleeps.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog

from argosy.fleet.launchers import LocalProcessLauncher
from tests.integration.fleet.launcher_suite import read_pid, spec

if TYPE_CHECKING:
    from _typeshed import TraceFunction

TRACED = f"{os.sep}fleet{os.sep}launchers{os.sep}"


def main(folder: str, step: str = "") -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if not step:
        asyncio.run(launch_dying_replica(Path(folder)))
    number, status = 0, 1
    while status:
        number += int(step)
        pid = os.fork()
        if pid == 0:
            kill_at(number)
            asyncio.run(launch(Path(folder)))
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        print(number, flush=True)  # noqa: T201 - the test reads it
        sys.stdin.readline()


def kill_at(number: int) -> None:
    """Kill this process before it executes a line of the launchers for the `number`-th time."""
    left = number

    def trace(frame: FrameType, event: str, _argument: object) -> TraceFunction | None:
        nonlocal left
        if TRACED not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


async def launch(folder: Path) -> None:
    await LocalProcessLauncher(folder).start(spec("fork"), 1)


async def launch_dying_replica(folder: Path) -> None:
    launcher = LocalProcessLauncher(folder, die_with_launcher=True)
    await launcher.start(spec("fork"), 1)
    await read_pid((await launcher.list_replicas())["a-1-0"])
    print("started", flush=True)  # noqa: T201 - the test reads it
    await asyncio.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
