"""Logs of a fleet's replicas for operators, as its controller records them in the store."""

from __future__ import annotations

import asyncio
import re
import time

from argosy.process import run_in_daemon_thread
from argosy.store import ReplicaLogRun, ReplicaLogStore
from argosy.telemetry import LogFormatter, LogSelection, parse_log

WATCH_S = 15.0
"""Time after a request for which the controller keeps the log of a running replica up to date."""
MAX_WATCHED = 16
FIRST_LOG_TIMEOUT_S = 3.0
"""How long the first request for a running replica waits for the controller."""
POLL_INTERVAL_S = 0.2
MAX_LINES = 500
MAX_LINE_LEN = 2000
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class ReplicaLogs:
    """Reads logs, and names those that people look at. Not thread-safe: use it from one event loop."""

    def __init__(self, fleet: str, store: ReplicaLogStore) -> None:
        self._fleet = fleet
        self._store = store
        self._watched_until: dict[str, float] = {}

    def list_watched(self) -> list[str]:
        """Return the replicas whose logs the controller shall keep up to date."""
        now = time.monotonic()
        self._watched_until = {
            name: until for name, until in self._watched_until.items() if until > now
        }
        return list(self._watched_until)

    async def list_runs(self, replica: str, *, is_running: bool) -> list[ReplicaLogRun]:
        """Return the runs of a replica whose logs are kept, the latest first, and watch its log from now on.

        The first call for a replica that runs waits a moment for the controller to read its log.
        """
        is_first = replica not in self.list_watched()
        if len(self._watched_until) < MAX_WATCHED or not is_first:
            self._watched_until[replica] = time.monotonic() + WATCH_S
        runs = old = await run_in_daemon_thread(self._store.list_runs, self._fleet, replica)
        waits = is_first and is_running and (not old or old[0].exited_at is None)
        deadline = time.monotonic() + FIRST_LOG_TIMEOUT_S
        while waits and runs == old and time.monotonic() < deadline:
            await asyncio.sleep(POLL_INTERVAL_S)
            runs = await run_in_daemon_thread(self._store.list_runs, self._fleet, replica)
        return runs

    async def read_lines(
        self, replica: str, started_at: float, selection: LogSelection, *, as_text: bool
    ) -> list[str]:
        """Return the last selected lines of a run's log, as it has them or in the form that a person reads."""

        def read() -> list[str]:
            log = self._store.read_log(self._fleet, replica, started_at)
            return _format_log(log, selection, as_text=as_text)

        return await run_in_daemon_thread(read)


def _format_log(log: bytes, selection: LogSelection, *, as_text: bool) -> list[str]:
    """Return the last lines of a log, without colours and without what a progress bar has overwritten.

    Long lines are cut, unless they are events in JSON.
    """
    text = _COLOR.sub("", log.decode(errors="replace")).removesuffix("\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")] if text else []
    selected = [line for line in parse_log(lines) if selection.matches(line)][-MAX_LINES:]
    if as_text:
        formatter = LogFormatter()
        texts = [text for line in selected for text in formatter.format(line).split("\n")]
        return [*map(_shorten, texts[-MAX_LINES:])]
    return [line.text if line.is_event else _shorten(line.text) for line in selected]


def _shorten(line: str) -> str:
    left_out = len(line) - MAX_LINE_LEN
    return line if left_out <= 0 else f"{line[:MAX_LINE_LEN]} [{left_out} more characters]"
