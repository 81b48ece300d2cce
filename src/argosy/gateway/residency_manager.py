"""Puts models of this machine to sleep and wakes them up, as `policy.residency` decides. Requests wait meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from argosy.gateway.pool import ModelStartup, Pool, change_sleep
from argosy.gateway.proxy import DemandReport, ModelDemand
from argosy.policy import LOWEST_TIER, ReplicaStatus, Residency, ResidentModel, decide_residency
from argosy.protocol import LoadResponse

CHECK_INTERVAL_S = 0.1
"""Interval of the decisions, which bounds by how much a request waits longer than its model takes to wake up."""
IDLE_INTERVAL_S = 1.0
"""Interval at which it is looked for models that may sleep, while there are none."""
DEFAULT_RELOAD_S = 1.0
"""Assumed time in which a model wakes up that has not slept yet."""
RETRY_INTERVAL_S = 5.0
"""Time after a failure to wake a model up or to put it to sleep, in which it is left alone."""
DRAIN_DEADLINE_S = 30.0
"""How long the running requests of a model may take when its memory is needed. The rest continues when it is awake."""
USAGE_DELAY_S = 4.0
"""Time after which the reported memory of a replica that has fallen asleep is that of its sleep."""
MIN_WAITING_S = 0.001
MAX_COUNTED_TENANTS = 8
"""Tenants whose waiting requests count, each once, so that no number of requests keeps another model from waking up."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


@dataclass(slots=True)
class _Entry:
    """State of a model that may sleep."""

    residency: Residency
    since: float
    idle_since: float | None
    asleep_bytes: int = 0
    task: asyncio.Task[None] | None = None
    """Change of its residency that is in progress."""
    retry_at: float = 0.0
    startup: ModelStartup | None = None
    """Startup of the pool by which requests wait. None while it is awake."""


class ResidencyManager:
    """Manager of the models with `sleep` in their settings. Not thread-safe: use it from one event loop.

    Args:
        list_pools: Returns the pools of all models.
        read_demand: Returns the demand for all models.
        memory_bytes: Memory for all of them together. None sets no limit.
    """

    def __init__(
        self,
        list_pools: Callable[[], Sequence[Pool]],
        read_demand: Callable[[], DemandReport],
        memory_bytes: int | None,
    ) -> None:
        self._list_pools = list_pools
        self._read_demand = read_demand
        self._memory_bytes = memory_bytes
        self._entries: dict[Pool, _Entry] = {}
        self._misfits: Mapping[str, int] = {}

    async def run(self) -> None:
        """Decide again and again, until cancelled."""
        try:
            while True:
                self.check(time.monotonic())
                await asyncio.sleep(CHECK_INTERVAL_S if self._entries else IDLE_INTERVAL_S)
        finally:
            for entry in self._entries.values():
                if entry.task is not None:
                    entry.task.cancel()

    def check(self, now: float) -> None:
        """Decide once, and begin what was decided."""
        pools = {pool.model: pool for pool in self._list_pools() if pool.sleep is not None}
        for pool in self._entries.keys() - set(pools.values()):
            pool.wake_s = None
            pool.set_startup(None, now)
            del self._entries[pool]
        if not pools:
            return
        models = [
            model
            for demand in self._read_demand().models
            if demand.model in pools
            and (model := self._observe(pools[demand.model], demand, now)) is not None
        ]
        decision = decide_residency(models, self._memory_bytes, now)
        for name in decision.misfits.keys() - self._misfits.keys():
            log.warning(
                "model_exceeds_memory",
                model=name,
                memory_bytes=self._memory_bytes,
                available_bytes=decision.misfits[name],
                remedy="raise model_memory, or lower the KV memory of the models",
            )
        self._misfits = decision.misfits
        for name in decision.sleeps:
            self._begin(pools[name], Residency.FALLING_ASLEEP, now)
        for name in decision.wakes:
            self._begin(pools[name], Residency.WAKING, now)
        for pool in pools.values():
            self._update_startup(pool, now)

    def _observe(self, pool: Pool, demand: ModelDemand, now: float) -> ResidentModel | None:
        """Return the state of a model. None if it has no replica that can sleep."""
        replicas = [each for each in pool.replicas.values() if each.report is not None]
        if not replicas or pool.sleep is None:
            return None
        statuses = [replica.health.status(now) for replica in replicas]
        found = Residency.AWAKE
        if ReplicaStatus.SLEEPING in statuses:
            found = Residency.ASLEEP
        elif ReplicaStatus.READY not in statuses:
            found = Residency.WAKING  # it loads, or has failed
        entry = self._entries.get(pool)
        if entry is None:
            entry = self._entries[pool] = _Entry(found, now, now)
        elif entry.task is None and entry.residency is not found:
            entry.residency, entry.since = found, now
        reports = [replica.report for replica in replicas if replica.report is not None]
        is_reported = now - entry.since >= USAGE_DELAY_S and all(
            report.sleep_level or status is not ReplicaStatus.SLEEPING
            for report, status in zip(reports, statuses, strict=True)
        )
        if entry.residency is Residency.ASLEEP and is_reported:
            entry.asleep_bytes = sum(map(_memory_bytes, reports))
        has_requests = pool.active_requests or any(report.server_load for report in reports)
        if has_requests:
            entry.idle_since = None
        elif entry.idle_since is None:
            entry.idle_since = now
        tenants = min(MAX_COUNTED_TENANTS, demand.queued_tenants)
        waiting_s = tenants * max(MIN_WAITING_S, demand.queue_age_s)
        if now - pool.unserved_at < RETRY_INTERVAL_S:
            waiting_s += MIN_WAITING_S
        sleep, awake_bytes = pool.sleep, sum(report.awake_bytes for report in reports)
        is_blocked = now < entry.retry_at  # it neither wakes up nor falls asleep
        keep_alive_s = sleep.after_s if pool.keep_alive_s is None else pool.keep_alive_s
        return ResidentModel(
            name=pool.model,
            residency=entry.residency,
            since=now if is_blocked else entry.since,
            awake_bytes=awake_bytes,
            asleep_bytes=min(entry.asleep_bytes, awake_bytes),
            reload_s=max(report.wake_s for report in reports) or DEFAULT_RELOAD_S,
            waiting_s=0.0 if is_blocked else waiting_s,
            longest_wait_s=demand.queue_age_s,
            waiting_tier=LOWEST_TIER if demand.queued_tier is None else demand.queued_tier,
            served_tier=demand.served_tier,
            rate=sum(demand.arrived) / max(1, len(demand.arrived)),
            idle_since=None if is_blocked else entry.idle_since,
            keep_alive_s=keep_alive_s,
            is_pinned=sleep.pinned or keep_alive_s == math.inf,
        )

    def _begin(self, pool: Pool, residency: Residency, now: float) -> None:
        entry = self._entries[pool]
        if now < entry.retry_at:
            return
        entry.residency, entry.since = residency, now
        entry.task = asyncio.create_task(
            self._change(pool, entry, residency), name=f"residency-{pool.model}"
        )

    async def _change(self, pool: Pool, entry: _Entry, residency: Residency) -> None:
        """Put the replicas of a model to sleep, or wake them up."""
        sleeps = residency is Residency.FALLING_ASLEEP
        level = pool.sleep.level if sleeps and pool.sleep is not None else 0
        started_at = time.monotonic()
        replicas = [each for each in pool.replicas.values() if each.is_native]
        results = await asyncio.gather(
            *(change_sleep(replica, level, DRAIN_DEADLINE_S) for replica in replicas),
            return_exceptions=True,
        )
        now, entry.task = time.monotonic(), None
        errors = [result for result in results if isinstance(result, BaseException)]
        entry.since = now
        if errors:
            entry.retry_at = now + RETRY_INTERVAL_S
            entry.residency = Residency.AWAKE if sleeps else Residency.ASLEEP
            log.warning(
                "model_residency_failed", model=pool.model, wanted=residency, error=str(errors[0])
            )
            return
        entry.residency = Residency.ASLEEP if sleeps else Residency.AWAKE
        log.info(
            "model_residency_changed",
            model=pool.model,
            residency=entry.residency,
            seconds=round(now - started_at, 3),
        )
        self.check(now)

    def _update_startup(self, pool: Pool, now: float) -> None:
        """Let requests wait while the model is not awake, with the notices of a start."""
        entry = self._entries.get(pool)
        if entry is None:
            return
        if entry.residency is Residency.AWAKE or pool.has_failed(now):
            if entry.startup is not None:
                entry.startup = pool.wake_s = None
                pool.set_startup(None, now)
            return
        reports = [each.report for each in pool.replicas.values() if each.report is not None]
        is_waking = entry.residency is Residency.WAKING
        wake_s = max((report.wake_s for report in reports), default=0.0)
        available_bytes, problem = self._misfits.get(pool.model), ""
        if available_bytes is not None:
            needed_bytes = sum(report.awake_bytes for report in reports)
            problem = (
                f"needs {needed_bytes / 2**20:,.0f} MiB of memory, of which model_memory leaves it"
                f" {max(0, available_bytes) / 2**20:,.0f} MiB. Use another model, or ask for a larger model_memory."
            )
        may_wake = now >= entry.retry_at and not problem
        pool.wake_s = (wake_s or DEFAULT_RELOAD_S) if may_wake else None
        startup = ModelStartup(
            state="failing" if problem else "starting" if is_waking else "stopped",
            problem=problem,
            expected_s=wake_s or None,
            started_at=time.time() - (now - entry.since) if is_waking else None,
        )
        previous = entry.startup
        has_changed = previous is None or (previous.state, previous.problem) != (
            startup.state,
            startup.problem,
        )
        if has_changed or pool.startup is None:
            entry.startup = startup
            pool.set_startup(startup, now)


def _memory_bytes(report: LoadResponse) -> int:
    """Return the memory of a replica: what it uses in its sleep, or what it needs at most while it is awake."""
    if report.sleep_level and report.usage is not None:
        return report.usage.memory_bytes
    return report.awake_bytes
