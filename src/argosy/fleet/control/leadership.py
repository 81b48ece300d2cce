"""Leadership of a fleet: of several controllers on one store, at most one acts."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import structlog

from argosy.process import run_in_daemon_thread
from argosy.store import DeposedError, FleetLease, FleetStore, StoreError

RENEWALS_PER_LEASE = 4
SAFETY_SHARE = 0.75
"""Part of the lease after its last renewal in which the leader acts. The rest covers clocks that run differently."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class Leadership:
    """Part of a controller in the election. Not thread-safe: use it from one event loop.

    A leader renews its lease. A standby takes the lease over once it has not seen it renewed for `lease_s`, by its own
    clock. It does so at once if the leader has released it, or was a process of this machine that is gone. The new
    lease has the next epoch, by which launchers, gateways and the event log refuse what a deposed leader still does.

    Args:
        holder: Name of this controller, unique among those that run.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        store: FleetStore,
        fleet: str,
        holder: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._holder = holder
        self._lease_s = lease_s
        self._clock = clock
        self._lease: FleetLease | None = None
        self._newer_epoch = 0
        self._valid_until = float("-inf")
        self._outage: tuple[float, str] | None = None
        """Start of an outage of the store that no event records yet, and its reason."""

    @property
    def lease(self) -> FleetLease:
        """The lease of this leader.

        Raises:
            DeposedError: This controller does not lead, or could not renew its lease in time.
        """
        if self._lease is None or self._clock() >= self._valid_until:
            raise DeposedError(f"This controller does not lead the fleet {self._fleet!r}.")
        return self._lease

    async def acquire(self) -> FleetLease:
        """Wait until this controller leads. Waits through failures of the store."""
        seen, seen_at = None, self._clock()
        while True:
            started_at = self._clock()
            try:
                current = await run_in_daemon_thread(self._store.read_lease, self._fleet)
                if current != seen:
                    if seen is not None:
                        self._outage = None  # the leader works again, and recorded it
                    seen, seen_at = current, self._clock()
                is_free = not current.holder or is_gone(current.holder)
                if is_free or self._clock() - seen_at >= self._lease_s:
                    lease = await run_in_daemon_thread(
                        self._store.acquire_lease, self._holder, current, self._newer_epoch
                    )
                    if lease is not None:
                        self._set_lease(lease, started_at)
                        log.info("leadership_acquired", fleet=self._fleet, epoch=lease.epoch)
                        return lease
            except StoreError as error:
                self._record_outage(error)
                seen = None  # the leader cannot renew its lease either
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)

    async def keep(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            DeposedError: Another controller leads by now.
        """
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            started_at = self._clock()
            if self._lease is None:
                raise DeposedError(f"This controller does not lead the fleet {self._fleet!r}.")
            try:
                renewed = await run_in_daemon_thread(self._store.renew_lease, self._lease)
            except DeposedError:
                self._lease = None
                log.warning("leadership_lost", fleet=self._fleet)
                raise
            except StoreError as error:
                self._record_outage(error)
            else:
                self._set_lease(renewed, started_at)

    async def release(self, newer_epoch: int = 0) -> None:
        """Let a standby take over at once. Failures are ignored, since the lease ends by itself.

        The next lease of this controller has a later epoch than `newer_epoch`. An environment may have seen one that
        the store does not know, if the store was restored from a backup.
        """
        self._newer_epoch = max(self._newer_epoch, newer_epoch)
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                await run_in_daemon_thread(self._store.release_lease, lease)
            except StoreError as error:
                log.info("lease_not_released", reason=str(error))

    def take_outage(self) -> str:
        """Describe the outage of the store that has ended, once. Empty if there was none, or it lasts."""
        if self._outage is None or self._clock() >= self._valid_until:
            return ""
        (since, reason), self._outage = self._outage, None
        return f"for {self._clock() - since:.0f} s nothing was recorded, healed or scaled: {reason}"

    def _record_outage(self, error: StoreError) -> None:
        log.warning("store_unavailable", reason=str(error))
        since = self._clock() if self._outage is None else self._outage[0]
        self._outage = since, str(error)

    def _set_lease(self, lease: FleetLease, renewed_at: float) -> None:
        self._lease = lease
        self._valid_until = renewed_at + SAFETY_SHARE * self._lease_s


def process_holder() -> str:
    """Return the name of this process as a holder of leases: host, process, and the machine's boot and namespace."""
    return f"{socket.gethostname()}/{os.getpid()}/{_process_scope()}"


def is_gone(holder: str) -> bool:
    """Return whether a holder was a process of this machine that no longer runs. Others are unknown."""
    _, _, process = holder.partition("/")
    pid, _, scope = process.partition("/")
    return scope == _process_scope() != "" and not psutil.pid_exists(int(pid))


def _process_scope() -> str:
    """Return in which process ids mean the same processes; empty if that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot[:8]}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
