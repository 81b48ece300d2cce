"""Recording of each admitted request's usage, first in the local usage log, and in the store after the request ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_trace import CostTrace
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import UsageLog, UsageLogFullError, UsageRecord

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

FLUSH_INTERVAL_S = 0.5
MAX_FLUSH_INTERVAL_S = 15.0
"""Longest pause between flushes. The pause doubles after each failed flush."""
RETRY_AFTER_S = 5.0

UsageWriter = Callable[[list[UsageRecord]], object]
"""Writes rows to the store and skips rows whose request id is already stored. Called in a worker thread."""


class UsageRecorder:
    """Filter that records delivered tokens and their cost, at the prices that the `LimitFilter` has found."""

    def __init__(self, usage_log: UsageLog, clock: Callable[[], float] = time.time) -> None:
        self._usage_log = usage_log
        self._clock = clock

    async def on_request(self, context: RequestContext) -> bool:
        """Allocate the request's row in the usage log. The row of a line of a batch is written with its result.

        Raises:
            ApiError: 503 if the usage log is full.
        """
        if context.batch_line is not None:
            return True
        try:
            context.usage_slot = self._usage_log.allocate_slot(
                begin_usage_row(context), context.rates
            )
        except UsageLogFullError:
            raise _ledger_full_error() from None
        return True

    def on_tokens(self, context: RequestContext, chunk_times: Sequence[float]) -> None:
        """Do nothing, since the relay or native code counts the tokens in the row."""

    async def on_fallback(self, context: RequestContext) -> None:
        """Write the row for the model that answers now, and one for the answer of a cascade's smaller model.

        Raises:
            ApiError: 503 if the usage log is full.
        """
        if context.batch_line is not None:
            return
        assert context.usage_slot is not None  # noqa: S101 - set by `on_request`
        if context.draft is not None:
            record, rates = context.draft
            try:
                slot = self._usage_log.allocate_slot(record, rates)
            except UsageLogFullError:
                raise _ledger_full_error() from None
            slot.set_counts(context.bill.usage)
            slot.finish("completed", record.replica, self._clock(), record.digest)
        context.usage_slot.begin(begin_usage_row(context), context.rates)

    def on_complete(self, context: RequestContext) -> None:
        """Complete the row with the billed tokens."""
        bill, slot = context.bill, context.usage_slot
        findings = "" if context.content is None else context.content.summarise()
        context.trace.cost = CostTrace(bill.nano_dollars, context.rates)
        line = context.batch_line
        if line is not None:
            line.has_reached_replica = (
                context.placement is not None and context.placement.has_reached_replica
            )
            line.record = msgspec.structs.replace(
                begin_usage_row(context),
                ended_at=self._clock(),
                status=context.status,
                replica=context.replica_name,
                digest=context.model_digest,
                input_tokens=bill.usage.prompt_tokens,
                cached_tokens=bill.usage.cached_tokens,
                output_tokens=bill.usage.output_tokens,
                nano_dollars=bill.nano_dollars,
                is_capped=bill.is_capped,
                findings=findings,
                service_tier="batch",
            )
            return
        assert slot is not None  # noqa: S101 - set by `on_request`
        slot.set_counts(bill.usage)
        slot.finish(
            context.status,
            context.replica_name,
            self._clock(),
            context.model_digest,
            is_capped=bill.is_capped,
            findings=findings,
        )


def _ledger_full_error() -> ApiError:
    message = "Usage cannot be recorded at the moment, so requests are rejected. Try again later."
    return ApiError(503, "ledger_full", message, retry_after_s=RETRY_AFTER_S)


def begin_usage_row(context: RequestContext) -> UsageRecord:
    """Return the row of a request that runs, for what answers now."""
    principal = context.principal
    return UsageRecord(
        request=context.response_id,
        organisation=principal.organisation,
        project=principal.project,
        key=principal.key,
        user=principal.user,
        model=context.model,
        asked=context.fields.model,
        route=context.route_name,
        started_at=context.started_at,
        ended_at=context.started_at,
        status="interrupted",
    )


async def flush_usage_forever(
    usage_log: UsageLog, write_usage: UsageWriter, stopping: asyncio.Event
) -> None:
    """Write finished rows to the store every `FLUSH_INTERVAL_S`, and once more after `stopping` is set."""
    pause_s, is_failing, is_last_flush = FLUSH_INTERVAL_S, False, False
    while not is_last_flush:
        is_last_flush = stopping.is_set()
        try:
            await run_in_daemon_thread(_flush_usage, usage_log, write_usage)
        except Exception as error:  # noqa: BLE001 - rows stay in the usage log on any error of the store
            if not is_failing:
                log.warning(
                    "usage_flush_failed", waiting=usage_log.pending_records, reason=str(error)
                )
            is_failing, pause_s = True, min(pause_s * 2, MAX_FLUSH_INTERVAL_S)
        else:
            if is_failing:
                log.info("usage_flush_recovered")
            is_failing, pause_s = False, FLUSH_INTERVAL_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if is_last_flush else pause_s):
                await stopping.wait()


def _flush_usage(usage_log: UsageLog, write_usage: UsageWriter) -> None:
    """Write finished rows, then those of gateways in the same folder that have crashed."""
    usage_log.drain(write_usage)
    usage_log.recover()
