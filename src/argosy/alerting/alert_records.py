"""Alerts in the store: one document of each fleet, which one process at a time may replace."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import msgspec
import structlog

from argosy.policy.alerting import Alert, NoticeGroup
from argosy.process import run_in_daemon_thread
from argosy.store import FleetDocument, FleetStore, StoreError

DOCUMENT_NAME = "alerting/state"
STANDALONE_FLEET = "-"
"""Name under which gateways without a fleet keep their alerts. No fleet can have it."""
HOLD_S = 45.0
"""Time after its last write after which another process may take over from a holder."""
RENEWAL_INTERVAL_S = 15.0
RELEASE_TIMEOUT_S = 2.0
"""Time to wait for a store that hangs at the end. Another process then takes over after `HOLD_S`."""
STORE_TIMEOUT_S = 3.0
"""Time to wait for a store that hangs. Alerts are evaluated and notified without it then."""
NO_ANSWER = "the store does not respond"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.alerting")


class ReceiverState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether notices reach a receiver. Times are seconds since the epoch."""

    delivered_at: float | None = None
    failing_since: float | None = None
    """Time of the first failure since the last delivery; None if there is none."""
    error: str = ""


class TestResult(msgspec.Struct, frozen=True):
    """Result of an ordered test notice."""

    at: float
    error: str
    """Empty if it was delivered."""


class AlertState(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the process that evaluates alerts, for the next one."""

    holder: str = ""
    """Process that evaluates them; empty if it has stopped."""
    held_until: float = 0.0
    """Time from which another process may take over, in seconds since the epoch."""
    alerts: dict[str, Alert] = {}
    """Alerts that fire, and those that ended lately, by fingerprint."""
    groups: dict[str, NoticeGroup] = {}
    """Groups with their notices, by key. Those that are pending are the outbox."""
    receivers: dict[str, ReceiverState] = {}
    """State of the receivers that were sent something, by name; of Alertmanagers by address."""
    tests: dict[str, TestResult] = {}
    """Results of the latest test notices, by the id of their order."""
    evaluated_at: float = 0.0
    """Time of the last evaluation, in seconds since the epoch; 0 before the first."""

    def count_firing(self) -> Counter[tuple[str, ...]]:
        """Return how many alerts of each name and severity fire."""
        return Counter(
            (each.name, each.severity) for each in self.alerts.values() if each.is_firing
        )


def read_alerts(store: FleetStore, fleet: str) -> AlertState:
    """Return the stored alerts of a fleet, empty before the first evaluation. Blocks on the store."""
    return _decode(store.read_documents(fleet, DOCUMENT_NAME).get(DOCUMENT_NAME))


class AlertRecords:
    """The alerts of a fleet, as this process may change them. Use it from one event loop.

    While the store cannot be used, the holder continues with what it has in memory, and writes it later.

    Args:
        store: The store; None keeps everything in memory.
        fleet: Name of the fleet, or `STANDALONE_FLEET`.
        holder: Name of this process.
        is_leader: Whether this process leads the fleet, and therefore takes over from any other at once.
    """

    def __init__(
        self, store: FleetStore | None, fleet: str, holder: str, *, is_leader: bool = False
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._holder = holder
        self._is_leader = is_leader
        self._version = 0
        self._is_held = store is None
        self._is_saved = True
        self._saved_at = float("-inf")
        self._write_lock = asyncio.Lock()
        self._write_in_flight: asyncio.Future[bool] | None = None
        """Write that a store which hangs has not answered yet. No other one begins before."""
        self._problem = ""
        """Last problem of the store; empty once the state was written."""
        self.state = AlertState()
        """The latest state, also if the store does not have it yet."""

    @property
    def is_held(self) -> bool:
        """Whether this process evaluates the alerts."""
        return self._is_held

    async def acquire(self, now: float) -> bool:
        """Return whether this process evaluates the alerts now, after taking over if no other one does."""
        if self._store is None:
            return True
        if self._is_held and self._is_saved and 0 <= now - self._saved_at < RENEWAL_INTERVAL_S:
            return True
        try:
            async with self._write_lock:
                if self._write_in_flight is not None:  # or what it has written looks like another's
                    await self._await_write()
            read = partial(self._store.read_documents, self._fleet, DOCUMENT_NAME)
            async with asyncio.timeout(STORE_TIMEOUT_S):
                document = (await run_in_daemon_thread(read)).get(DOCUMENT_NAME)
        except (StoreError, TimeoutError) as error:
            self.report_problem(str(error) or NO_ANSWER)
            return self._is_held
        if not self._is_held or (0 if document is None else document.version) != self._version:
            stored = _decode(document)
            is_free = stored.holder in {"", self._holder} or stored.held_until <= now
            if not (is_free or self._is_leader):
                self._is_held = False
                return False
            self._version = 0 if document is None else document.version
            self.state = stored
            self._is_held = True
        return await self.save(now)

    async def save(self, now: float) -> bool:
        """Write the state. Returns False if another process took over, which has a state of its own."""
        return await self._write(self._holder, now + HOLD_S, now)

    def report_problem(self, problem: str) -> None:
        """Log a problem of the store, unless it is the last one and nothing was written since."""
        if problem != self._problem:
            log.warning("alerts_not_saved", reason=problem)
        self._problem = problem

    async def release(self) -> None:
        """Let another process take over at once."""
        if self._store is not None and self._is_held:
            try:
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._write("", 0.0, self._saved_at)
            except TimeoutError:
                self.report_problem(NO_ANSWER)
            self._is_held = False

    async def _write(self, holder: str, held_until: float, now: float) -> bool:
        if self._store is None:
            return True
        async with self._write_lock:
            self.state = msgspec.structs.replace(self.state, holder=holder, held_until=held_until)
            self._is_saved = False
            try:
                if self._write_in_flight is not None and not await self._await_write():
                    log.info("alerts_taken_over", fleet=self._fleet)
                    return False
                document = FleetDocument(self._version + 1, msgspec.json.encode(self.state))
                replace = partial(
                    self._store.replace_document,
                    self._fleet,
                    DOCUMENT_NAME,
                    document,
                    after=self._version,
                )
                self._write_in_flight = asyncio.ensure_future(run_in_daemon_thread(replace))
                if not await self._await_write():
                    log.info("alerts_taken_over", fleet=self._fleet)
                    return False
            except (StoreError, TimeoutError) as error:
                self.report_problem(str(error) or NO_ANSWER)
                return True  # no other process can take over either
            self._is_saved, self._saved_at, self._problem = True, now, ""
            return True

    async def _await_write(self) -> bool:
        """Wait for the write in flight, and return whether this process still evaluates the alerts.

        Raises:
            StoreError: It has failed.
            TimeoutError: It has not ended yet.
        """
        write = self._write_in_flight
        assert write is not None  # noqa: S101 - the caller has begun it
        await asyncio.wait([write], timeout=STORE_TIMEOUT_S)
        if not write.done():
            raise TimeoutError
        self._write_in_flight = None
        self._is_held = write.result()
        self._version += self._is_held
        return self._is_held


def _decode(document: FleetDocument | None) -> AlertState:
    """Return a stored state; an empty one for that of another version, which is replaced."""
    if document is None:
        return AlertState()
    try:
        return msgspec.json.decode(document.content, type=AlertState)
    except msgspec.MsgspecError as error:
        log.warning("alerts_unreadable", reason=str(error))
        return AlertState()
