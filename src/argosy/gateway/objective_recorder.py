"""Counts requests for the service level objectives of a gateway, and writes the counts to the store."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from argosy.deployment import ObjectivesConfig
from argosy.gateway.principal import TIERS
from argosy.gateway.request_context import RequestContext
from argosy.policy.objectives import (
    HOUR_S,
    MISS_CAUSES,
    SLOT_S,
    SLOW,
    EndedRequest,
    HourCounts,
    Objective,
    judge_request,
)
from argosy.process import run_in_daemon_thread
from argosy.store import MissDetails, ObjectiveHour, ObjectiveHours, StoreError
from argosy.telemetry import GatewayMetrics

ROW_RETENTION_S = 36 * 86_400
"""Age from which hours are deleted. The longest window has 35 days."""
SLOT_RETENTION_S = 75 * HOUR_S
"""Age from which only the sums of an hour are kept. The longest window of burn rates has 3 days."""
MAX_MARKED_SLOTS = 6
"""Slots that one round marks as reported at most. A longer gap is a step of the clock, or a suspended machine."""
MAX_WAITING_HOURS = 24
"""Hours that are kept while the store cannot be used."""
CLOSE_TIMEOUT_S = 5.0
STOPPED = 1

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class _HourRecord:
    """Counts of one hour that this process has made."""

    __slots__ = ("details", "is_written", "slots")

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}
        """Requests and misses by number of the slot."""
        self.details = MissDetails()
        self.is_written = False

    def slot(self, second: int) -> list[int]:
        """Return the counts of the slot of a second, which the caller changes."""
        self.is_written = False
        return self.slots.setdefault(second % HOUR_S // SLOT_S, [0, 0])

    def to_counts(self) -> HourCounts:
        slots = sorted(self.slots)
        counts = [self.slots[each] for each in slots]
        return HourCounts(slots, [each[0] for each in counts], [each[1] for each in counts])


class _Counter:
    """Counts of one objective, with what a request would otherwise look up or compute again."""

    __slots__ = ("counts", "hour", "id", "labels", "objective", "slot_start")

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.id = objective.id  # a digest
        self.labels = (objective.name,)
        self.slot_start = -SLOT_S
        self.hour = _HourRecord()
        self.counts = [0, 0]


class ObjectiveRecorder:
    """Counts for all objectives of a gateway. Not thread-safe: use it from one event loop.

    The work for a request and the memory grow with the number of objectives, of which settings have at most 200.

    Args:
        gateway_id: Id of this process.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        gateway_id: str,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._clock = clock
        self.objectives: Sequence[Objective] = ()
        self._counters: list[_Counter] = []
        self._matching: dict[tuple[str, int, str], tuple[list[_Counter], list[_Counter]]] = {}
        """Objectives about requests, and those about tokens, by model, tier and tenant."""
        self._hours: dict[tuple[str, int], _HourRecord] = {}
        """By objective and start of the hour; without an objective the times of the reports."""
        self._marked_until = 0
        self._is_failing = False
        self._pruned_at = float("-inf")

    def apply(self, config: ObjectivesConfig) -> None:
        """Follow other objectives. Their counters are exposed from now on, also at 0."""
        self.objectives = config.build_objectives()
        self._counters = [_Counter(each) for each in self.objectives]
        self._matching.clear()
        for objective in self.objectives:
            self._metrics.objective_requests.add((objective.name,), 0)
            causes = MISS_CAUSES if objective.sli == "availability" else (SLOW,)
            for cause in causes:
                self._metrics.objective_misses.add((objective.name, cause), 0)

    def record_request(self, context: RequestContext, ended_at: float) -> None:
        """Count a request that ended at a monotonic time. A replay for its idempotency key does not count."""
        if context.replayed_request_id or context.is_copy:
            return
        counters = self._find(context)[0]
        if not counters:
            return
        trace, fields = context.trace, context.fields
        first_token_s = None
        if trace.first_token_at is not None:
            first_token_s = trace.first_token_at - trace.arrived_at
        ended = EndedRequest(
            context.status,
            trace.error_code,
            context.deadline >= context.exchange.arrived_at + fields.timeout_s,
            fields.stream,
            first_token_s,
            ended_at - trace.arrived_at,
        )
        for counter in counters:
            cause = judge_request(counter.objective, ended)
            if cause is not None:
                self._count(counter, 1, 1 if cause else 0, cause, context)

    def record_intervals(self, context: RequestContext, intervals_s: Sequence[float]) -> None:
        """Count times between tokens, which are sorted."""
        if context.is_copy:
            return
        for counter in self._find(context)[1]:
            slow = len(intervals_s) - bisect_right(intervals_s, counter.objective.below_s or 0.0)
            self._count(counter, len(intervals_s), slow, SLOW, context)

    def _find(self, context: RequestContext) -> tuple[list[_Counter], list[_Counter]]:
        principal = context.principal
        model = context.failed_models[0] if context.failed_models else context.model
        key = model, principal.tier, principal.tenant
        found = self._matching.get(key)
        if found is None:
            tier = TIERS[principal.tier]
            matching = [
                each
                for each in self._counters
                if each.objective.matches(model, tier, principal.tenant)
            ]
            found = (
                [each for each in matching if each.objective.sli != "itl"],
                [each for each in matching if each.objective.sli == "itl"],
            )
            if len(self._matching) >= 10_000:  # tenants come and go
                self._matching.clear()
            self._matching[key] = found
        return found

    def _count(
        self, counter: _Counter, requests: int, misses: int, cause: str, context: RequestContext
    ) -> None:
        now = int(self._clock())
        if not 0 <= now - counter.slot_start < SLOT_S or counter.hour.is_written:
            counter.hour = self._hour(counter.id, now)
            counter.slot_start = now - now % SLOT_S
            counter.counts = counter.hour.slot(now)
        counter.counts[0] += requests
        self._metrics.objective_requests.add(counter.labels, requests)
        if not misses:
            return
        counter.counts[1] += misses
        self._metrics.objective_misses.add((counter.objective.name, cause), misses)
        details = MissDetails(causes={cause: misses}, requests=[context.response_id])
        for counts, value in (
            (details.replicas, context.replica_name),
            (details.versions, context.trace.version),
            (details.tenants, context.principal.tenant),
        ):
            if value:
                counts[value] = misses
        counter.hour.details.add(details)

    def _hour(self, objective: str, now: int) -> _HourRecord:
        return self._hours.setdefault((objective, now - now % HOUR_S), _HourRecord())

    def _count_report(self, now: int, *, is_last: bool = False) -> None:
        """Count that this process has reported in the slot of a second."""
        counts = self._hour("", now).slot(now)
        counts[0] += 1
        counts[1] += STOPPED * is_last

    async def run(self, store: ObjectiveHours, fleet: str) -> None:
        """Write the counts at the end of each slot until cancelled."""
        while True:
            await asyncio.sleep(SLOT_S - self._clock() % SLOT_S)
            self._mark_reported()
            await self._write(store, fleet)

    async def close(self, store: ObjectiveHours, fleet: str) -> None:
        """Write what is left, and that this process reports no more."""
        now = int(self._clock())
        self._count_report(now, is_last=True)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write(store, fleet)
        except TimeoutError:
            log.warning("objectives_not_saved", reason="the store does not respond")

    def _mark_reported(self) -> None:
        """Mark the slots since the last round as reported."""
        end = int(self._clock()) // SLOT_S * SLOT_S
        start = max(self._marked_until, end - MAX_MARKED_SLOTS * SLOT_S)
        if not self._marked_until or self._marked_until < start:
            start = end - SLOT_S
        for slot in range(start, end, SLOT_S):
            self._count_report(slot)
        self._marked_until = end

    async def _write(self, store: ObjectiveHours, fleet: str) -> None:
        """Write the hours that have changed, and forget those that are over. A failure is logged once."""
        now = self._clock()
        waiting = {key: each for key, each in self._hours.items() if not each.is_written}
        hours = [
            ObjectiveHour(
                hour=start,
                objective=objective,
                gateway=self._gateway_id,
                counts=each.to_counts(),
                details=each.details,
            )
            for (objective, start), each in waiting.items()
        ]
        for each in waiting.values():
            each.is_written = True
        try:
            if hours:
                await run_in_daemon_thread(store.write, fleet, hours)
            if now - self._pruned_at >= HOUR_S:
                rows_before, slots_before = int(now - ROW_RETENTION_S), int(now - SLOT_RETENTION_S)
                prune = partial(store.prune, rows_before=rows_before, slots_before=slots_before)
                await run_in_daemon_thread(prune)
                self._pruned_at = now
        except StoreError as error:
            for each in waiting.values():
                each.is_written = False
            if not self._is_failing:
                log.warning("objectives_not_saved", reason=str(error))
            self._is_failing = True
        else:
            self._is_failing = False
        for key, each in list(self._hours.items()):
            age_s = now - key[1]
            if age_s > 2 * HOUR_S and (each.is_written or age_s > MAX_WAITING_HOURS * HOUR_S):
                del self._hours[key]
