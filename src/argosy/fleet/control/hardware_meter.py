"""Meter of a leader that adds up what the hardware of the replicas costs, by day, pool and model."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import NamedTuple

from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.term_journal import TermJournal
from argosy.fleet.launchers import LaunchState
from argosy.process import run_in_daemon_thread
from argosy.store import HardwareDay

SAVE_INTERVAL_S = 60.0
MAX_GAP_S = 60.0
"""Longest time between two observations that counts. What ran meanwhile is unknown."""
DAY_S = 86_400
_HOUR_MS = 3_600_000


class _Pool(NamedTuple):
    """Replicas that cost the same on one day."""

    day: int
    pool: str
    model: str
    nano_dollars_per_hour: int


class HardwareMeter:
    """Meter of one term. Not thread-safe: use it from one event loop."""

    def __init__(
        self, journal: TermJournal, observer: FleetObserver, publisher: GatewayPublisher
    ) -> None:
        self._journal = journal
        self._observer = observer
        self._publisher = publisher
        self._recorded_at = self._saved_at = journal.clock()
        self._replica_ms: Counter[_Pool] = Counter()
        self._busy_ms: Counter[_Pool] = Counter()

    def record(self, declared: DeclaredFleet, now: float) -> None:
        """Count the time since the last call for the replicas that run now, in pools with a price.

        A replica is busy if its latest load report has requests. Of replicas without reports as many are busy as
        requests of the model are active.
        """
        elapsed_ms = max(0, int((now - self._recorded_at) * 1000))
        if elapsed_ms > MAX_GAP_S * 1000:
            self._recorded_at, elapsed_ms = now, int(MAX_GAP_S * 1000)
        else:
            self._recorded_at += elapsed_ms / 1000
        priced = {pool.name: pool for pool in declared.config.pools if pool.dollars_per_hour}
        if not priced:
            return
        running, silent = Counter[_Pool](), Counter[_Pool]()
        for _, replica in self._observer.listed:
            pool = priced.get(replica.pool)
            if pool is None or replica.state not in {LaunchState.RUNNING, LaunchState.DRAINING}:
                continue
            price = round(pool.dollars_per_hour * 10**9)
            key = _Pool(int(now // DAY_S), pool.name, pool.model, price)
            self._replica_ms[key] += elapsed_ms
            reading = self._observer.reading(replica.name)
            load = None if reading is None else reading.load
            if declared.check_paths(replica.pool, replica.generation).load is None:
                silent[key] += 1
            elif load is not None and load.running + load.waiting:
                running[key] += 1
        active = self._count_active() if silent else {}
        for key, count in silent.items():
            running[key] += min(count, active.get(key.model, 0))
        for key, count in running.items():
            self._busy_ms[key] += count * elapsed_ms

    async def save(self) -> None:
        """Add what was counted to the store, at an interval.

        Raises:
            DeposedError: Another controller leads by now.
            StoreError: The store cannot be used. A later call adds it.
        """
        now = self._journal.clock()
        if not self._replica_ms or 0 <= now - self._saved_at < SAVE_INTERVAL_S:
            return
        uses = [
            HardwareDay(
                day=key.day,
                pool=key.pool,
                model=key.model,
                replica_ms=replica_ms,
                busy_ms=self._busy_ms[key],
                nano_dollars=replica_ms * key.nano_dollars_per_hour // _HOUR_MS,
            )
            for key, replica_ms in self._replica_ms.items()
        ]
        add = self._journal.store.hardware_costs.add
        await run_in_daemon_thread(partial(add, self._journal.leadership.lease, uses))
        self._saved_at = now
        self._replica_ms.clear()
        self._busy_ms.clear()

    def _count_active(self) -> Counter[str]:
        """Return the requests in queues or at replicas by model, as the gateways report them."""
        active = Counter[str]()
        for status in self._publisher.statuses.values():
            for demand in () if status is None or status.demand is None else status.demand.models:
                active[demand.model] += demand.active_requests
        return active
