"""Usage of every request that was let in: a row in the local journal from its beginning, in the store after its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from argosy.gateway.principal import TIERS
from argosy.gateway.request_context import FastPathBudget, RequestContext
from argosy.gateway.request_trace import UsageTrace
from argosy.policy import PriceList, Rates
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, UsageLog, UsageLogFullError, UsageRecord, UsageSlot

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

FLUSH_INTERVAL_S = 0.5
MAX_FLUSH_INTERVAL_S = 15.0
"""While the store takes nothing, it is tried ever more rarely, down to this."""
RETRY_AFTER_S = 5.0

UsageWriter = Callable[[list[UsageRecord]], object]
"""Keeps rows; one that it has already, by its request, it passes over. Runs in a worker thread."""


class UsageRecorder:
    """The stage that counts what was delivered, and what it costs."""

    def __init__(self, usage_log: UsageLog, clock: Callable[[], float] = time.time) -> None:
        """`clock` tells seconds since the epoch."""
        self._usage_log = usage_log
        self._clock = clock
        self._prices = PriceList()

    def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Take over prices; requests that run keep those that they began with."""
        self.prepare_snapshot(snapshot)()

    def prepare_snapshot(self, snapshot: AccountSnapshot) -> Callable[[], None]:
        """What does as `update` does, at once: all work is done by then, in any thread."""
        prices = PriceList(snapshot.prices)

        def take() -> None:
            self._prices = prices

        return take

    async def on_request(self, context: RequestContext) -> UsageFilterState:
        """Begin its row. Raises ApiError 503 when there is no room for one more."""
        principal, model = context.principal, context.pool.model
        rates = context.rates
        if rates is None:
            rates = self._prices.rates_at(model, TIERS[principal.tier], self._clock())
        row = UsageRecord(
            request=context.response_id,
            organisation=principal.organisation,
            project=principal.project,
            key=principal.key,
            user=principal.user,
            model=model,
            asked=context.fields.model,
            route=context.route_name,
            started_at=context.started_at,
            ended_at=context.started_at,
            status="interrupted",
        )
        try:
            slot = self._usage_log.allocate_slot(row, rates)
        except UsageLogFullError:
            message = (
                "Usage cannot be recorded at the moment, so nothing is answered. Try again later."
            )
            raise ApiError(503, "ledger_full", message, retry_after_s=RETRY_AFTER_S) from None
        return UsageFilterState(context, slot, rates, self._clock)


class UsageFilterState(msgspec.Struct, eq=False):
    """A `Visit`: the row of one request."""

    context: RequestContext
    slot: UsageSlot
    rates: Rates
    clock: Callable[[], float]

    def fast_path_budget(self) -> FastPathBudget:
        """As far as it likes: its tokens are counted in the slot."""
        return FastPathBudget(token_counter_address=self.slot.output_counter_address)

    def on_tokens(self, chunk_times: Sequence[float]) -> None:  # noqa: ARG002 - see `Visit`
        """Count what was delivered so far: nothing of an answer that is sent whole, should this gateway die before."""
        if self.context.fields.stream:
            told = self.context.delivered
            self.slot.set_counts(told.prompt_tokens, told.cached_tokens, told.output_tokens)

    def on_complete(self) -> None:
        """End the row."""
        context, slot, rates, told = self.context, self.slot, self.rates, self.context.delivered
        counts = told.prompt_tokens, told.cached_tokens, told.output_tokens
        slot.set_counts(*counts)
        slot.finish(context.status, context.replica_name, self.clock())
        context.cost_nano_dollars = rates.cost_nano_dollars(*counts)
        context.trace.usage = UsageTrace(*counts, context.cost_nano_dollars, rates)


async def flush_usage_forever(
    usage_log: UsageLog, write_usage: UsageWriter, stopping: asyncio.Event
) -> None:
    """Bring what has ended to the store, each half second until `leaving` is set, and once more after that."""
    pause, failing, last = FLUSH_INTERVAL_S, False, False
    while not last:
        last = stopping.is_set()
        try:
            await run_in_daemon_thread(_flush_usage, usage_log, write_usage)
        except Exception as error:  # noqa: BLE001 - whatever the store has, the rows are kept
            if not failing:
                log.warning(
                    "usage_flush_failed", waiting=usage_log.pending_records, reason=str(error)
                )
            failing, pause = True, min(pause * 2, MAX_FLUSH_INTERVAL_S)
        else:
            if failing:
                log.info("usage_flush_recovered")
            failing, pause = False, FLUSH_INTERVAL_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if last else pause):
                await stopping.wait()


def _flush_usage(usage_log: UsageLog, write_usage: UsageWriter) -> None:
    """Everything that has ended; what other gateways of the folder left when they died is next."""
    usage_log.drain(write_usage)
    usage_log.recover()
