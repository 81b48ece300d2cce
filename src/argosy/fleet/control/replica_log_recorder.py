"""Records the ends of replicas' logs in the store: when a run ends, and while a gateway shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.term_journal import TermJournal
from argosy.fleet.launchers import LaunchedReplica, LaunchError, LaunchState
from argosy.process import run_in_daemon_thread
from argosy.process_monitor import read_log_end
from argosy.store import CONTROLLER_LOG, DeposedError, ReplicaLogRun, StoreError
from argosy.telemetry import redact_log

MAX_LOG_BYTES = 64 * 1024
MAX_WATCHED = 16
"""Number of logs that are read for gateways at a time."""
READ_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 1.0
MAX_WATCHED_AGE_S = 5.0
"""Age from which a watched log is saved again though it has not changed, which shows that it is still read."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")

_Run = tuple[str, float]
"""Name of a replica, and when the run started."""


class ReplicaLogRecorder:
    """Recorder of a leading controller. Not thread-safe: use it from one event loop.

    Args:
        list_watched: Returns those that a gateway in this process shows.
        controller_log: Log of the controller, if a keeper writes one.
    """

    def __init__(
        self,
        journal: TermJournal,
        observer: FleetObserver,
        publisher: GatewayPublisher,
        list_watched: Callable[[], Collection[str]],
        controller_log: Path,
    ) -> None:
        self._leadership = journal.leadership
        self._store = journal.store.replica_logs
        self._records = journal.records
        self._observer = observer
        self._publisher = publisher
        self._list_watched = list_watched
        self._controller_log = controller_log
        self._clock = journal.clock
        self._started_at = self._clock()
        self._ends: dict[_Run, asyncio.Task[None]] = {}
        """Recordings of the ends of runs that launchers still list, also completed ones."""
        self._shown: dict[_Run, tuple[bytes, float]] = {}
        """Log of each watched run as the store has it, and when it was read."""
        self._save_lock = asyncio.Lock()

    async def run(self) -> None:
        """Record the logs that gateways show, until cancelled.

        Raises:
            DeposedError: Another controller leads by now.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            names = sorted({*self._publisher.watched_logs, *self._list_watched()})[:MAX_WATCHED]
            watched = {
                (replica.name, replica.started_at): (launcher, replica)
                for launcher, replica in (self._observer.listed if names else ())
                if replica.name in names
                and replica.state in {LaunchState.RUNNING, LaunchState.DRAINING}
            }
            controller = (CONTROLLER_LOG, self._started_at)
            for run in self._shown.keys() - {*watched, controller}:
                del self._shown[run]
            await asyncio.gather(*(self._record_shown(*each) for each in watched.values()))
            if CONTROLLER_LOG in names:
                await self._record_controller()

    async def close(self) -> None:
        """End the recordings."""
        tasks = list(self._ends.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def record_ends(self) -> None:
        """Start to record the runs that have ended since the last call."""
        exited = {
            (replica.name, replica.started_at): (launcher, replica)
            for launcher, replica in self._observer.listed
            if replica.state is LaunchState.EXITED and replica.started_at
        }
        for run in self._ends.keys() - exited.keys():
            if self._ends[run].done():
                del self._ends[run]
        for run, (launcher, replica) in exited.items():
            if run not in self._ends:
                self._ends[run] = asyncio.create_task(
                    self._record_end(launcher, replica), name=f"record-log-{replica.name}"
                )

    async def wait_for_end(self, name: str) -> None:
        """Wait until the ends of a replica's runs are recorded, before a new run or a removal changes its log."""
        tasks = [task for (replica, _), task in self._ends.items() if replica == name]
        if tasks:
            await asyncio.wait(tasks)

    async def _record_end(self, launcher: str, replica: LaunchedReplica) -> None:
        end, error = await self._read(launcher, replica)
        run = self._describe(replica, error)
        try:
            async with self._save_lock:
                await self._save(replica.name, run, end)
        except DeposedError:
            return  # the next leader records it
        except StoreError as failure:
            log.warning("store_unavailable", reason=str(failure))
            del self._ends[replica.name, replica.started_at]  # the next round tries again

    async def _record_shown(self, launcher: str, replica: LaunchedReplica) -> None:
        end, error = await self._read(launcher, replica)
        await self._save_shown(replica.name, self._describe(replica, error), end)

    async def _record_controller(self) -> None:
        if not self._controller_log.is_absolute():  # that of `argosy serve`, which has no folder
            return
        try:
            end = await run_in_daemon_thread(read_log_end, self._controller_log, MAX_LOG_BYTES)
        except OSError as error:
            log.warning("replica_log_unreadable", replica=CONTROLLER_LOG, reason=str(error))
            return
        epoch, now = self._leadership.lease.epoch, self._clock()
        if end:
            run = ReplicaLogRun(started_at=self._started_at, attempt=epoch, read_at=now)
            await self._save_shown(CONTROLLER_LOG, run, end)

    async def _save_shown(self, name: str, run: ReplicaLogRun, end: bytes) -> None:
        key = (name, run.started_at)
        shown, shown_at = self._shown.get(key, (b"", float("-inf")))
        if shown == run.error.encode() + end and run.read_at - shown_at < MAX_WATCHED_AGE_S:
            return
        try:
            async with self._save_lock:
                if key in self._ends:  # it ended meanwhile
                    return
                await self._save(name, run, end)
        except DeposedError:
            raise
        except StoreError as failure:
            log.warning("store_unavailable", reason=str(failure))
        else:
            self._shown[key] = (run.error.encode() + end, run.read_at)

    async def _read(self, launcher: str, replica: LaunchedReplica) -> tuple[bytes, str]:
        """Return the end of a log, and why it could not be read."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                read_log = self._observer.launcher(launcher).read_log(replica.name, MAX_LOG_BYTES)
                return await read_log, ""
        except TimeoutError:
            error = f"its launcher did not answer within {READ_TIMEOUT_S:g} s"
        except (LaunchError, OSError) as failure:
            error = str(failure)
        log.warning("replica_log_unreadable", replica=replica.name, reason=error)
        return b"", error

    def _describe(self, replica: LaunchedReplica, error: str) -> ReplicaLogRun:
        record = self._records.replicas.get(replica.name)
        is_same = record is not None and record.attempt == replica.attempt
        stop_reason = record.stop_reason if record is not None and is_same else ""
        reason = replica.start_error or stop_reason or replica.reason
        is_exited = replica.state is LaunchState.EXITED
        return ReplicaLogRun(
            started_at=replica.started_at,
            attempt=replica.attempt,
            exited_at=(replica.exited_at or self._clock()) if is_exited else None,
            exit_status=replica.exit_status if is_exited else None,
            # PostgreSQL's text has no NUL characters.
            reason=reason.replace("\0", "") if is_exited else "",
            read_at=self._clock(),
            error=error.replace("\0", ""),
        )

    async def _save(self, replica: str, run: ReplicaLogRun, end: bytes) -> None:
        if len(end) >= MAX_LOG_BYTES:  # it begins within a line
            end = end.partition(b"\n")[2] or end

        def save() -> None:
            self._store.save(self._leadership.lease, replica, run, redact_log(end))

        await run_in_daemon_thread(save)
