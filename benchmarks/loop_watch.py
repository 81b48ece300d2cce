"""Run an `argosy` command, and record the long turns of its event loop by the CPU time of the loop's thread.

    python -m benchmarks.loop_watch FILE gateway -c gateway.yaml

A timer of the loop reads the thread's CPU time every 2 ms, so a recorded turn may include 2 ms of other turns. A second
thread looks where the loop's thread is during a long turn. FILE gets a JSON line for each turn of 10 ms or more.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import uvloop

BEAT_S = 0.002
LOOK_INTERVAL_S = 0.01
MIN_TURN_S = 0.01
"""Shortest turn that is recorded."""
FRAMES = 4
"""Innermost frames of the recorded place."""


class LongTurn(msgspec.Struct, frozen=True):
    """Turn of an event loop."""

    at: float
    """Time of its end on the clock of `time.monotonic`."""
    cpu_s: float
    gc_s: float
    """CPU time of the garbage collector in it."""
    where: str
    """Innermost frames when it had taken long, or an empty string."""


class LoopWatch:
    """Measures the turns of the loop of the thread that calls `run`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._turns: list[LongTurn] = []
        self._beat_cpu_s = 0.0
        self._gc_began_s = self._gc_s = 0.0
        self._where = ""

    def run(self, main: Coroutine[Any, Any, Any], **options: Any) -> Any:  # noqa: ANN401 - as uvloop's
        """Run the coroutine on a watched loop, in place of `uvloop.run`."""

        async def watched() -> Any:  # noqa: ANN401 - the result of the coroutine
            self._beat_cpu_s = time.thread_time()
            self._beat()
            thread = threading.get_ident()
            threading.Thread(target=self._look, args=(thread,), daemon=True).start()
            return await main

        gc.callbacks.append(self._on_gc)
        return _run(watched(), **options)

    def _beat(self) -> None:
        now_s = time.thread_time()
        cpu_s, self._beat_cpu_s = now_s - self._beat_cpu_s, now_s
        gc_s, self._gc_s = self._gc_s, 0.0
        where, self._where = self._where, ""
        if cpu_s >= MIN_TURN_S:
            self._turns.append(LongTurn(time.monotonic(), cpu_s, gc_s, where))
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began_s = time.thread_time()
        else:
            self._gc_s += time.thread_time() - self._gc_began_s

    def _look(self, thread: int) -> None:
        """Look at the loop's thread during long turns, and write the turns to the file."""
        clock = time.pthread_getcpuclockid(thread)
        with self._file.open("ab", buffering=0) as file:
            while True:
                time.sleep(LOOK_INTERVAL_S)
                if time.clock_gettime(clock) - self._beat_cpu_s >= 2 * MIN_TURN_S:
                    self._where = self._where or _place(thread)
                turns, self._turns = self._turns, []
                if turns:
                    file.write(b"".join(msgspec.json.encode(turn) + b"\n" for turn in turns))


def _place(thread: int) -> str:
    """Return the innermost frames of a thread."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - there is no other way
    places: list[str] = []
    while frame is not None and len(places) < FRAMES:
        code = frame.f_code
        places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(places)


def read_turns(file: Path, begin: float, end: float) -> list[LongTurn]:
    """Return the turns that ended in this time, on the clock of `time.monotonic`."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    turns = [msgspec.json.decode(line, type=LongTurn) for line in lines]
    return [turn for turn in turns if begin <= turn.at <= end]


_run = uvloop.run


def main() -> None:
    """Run the command."""
    from argosy.cli import main as run_command

    uvloop.run = LoopWatch(Path(sys.argv[1])).run
    del sys.argv[1]
    run_command()


if __name__ == "__main__":
    main()
