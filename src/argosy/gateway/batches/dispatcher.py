"""Dispatcher of batches: runs their lines in the slots that online requests leave free, and writes their results."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
import structlog

from argosy.gateway.batches.batch_line import derive_line_id, prepare_line
from argosy.gateway.http_route import HttpRoute
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import Pool
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.gateway.proxy import CompletionHandlers, ResponseReceiver
from argosy.gateway.request_context import BatchLine
from argosy.http_server import ExchangeLimits, HttpExchange, HttpRequest, run_handler
from argosy.policy import (
    BATCH_TIER,
    LOWEST_TIER,
    MAX_RAISED_DIVISOR,
    BackfillWindow,
    Backlog,
    BatchPace,
    LineShares,
)
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import Batch, ClaimedLine, LineResult, Store, StoreError
from argosy.telemetry import GatewayMetrics

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

TICK_S = 0.2
"""Interval at which windows are computed and lines start. A line that ends lets others start at once."""
RECONCILE_INTERVAL_S = 30.0
"""Interval at which claims are released that this gateway holds in the store and does not know of."""
REFRESH_INTERVAL_S = 1.0
"""Interval at which batches are read, so that lines of a cancelled one stop."""
COMMIT_INTERVAL_S = 0.1
MAX_COMMITTED_LINES = 64
"""Lines that one transaction ends."""
MAX_CLAIMED_LINES = 64
"""Lines that a pool claims at once."""
MAX_UNCOMMITTED_LINES = 1000
"""Results in memory beyond which no line starts, because the store does not take them."""
MAX_ATTEMPTS = 5
"""Attempts of a line that reach a replica. The error of the last one is the line's result."""
MAX_BACKOFF_S = 30.0
BUDGET_BACKOFF_S = 10.0
"""Pause of a batch whose owner has used up a budget."""
CLOSE_TIMEOUT_S = 5.0
EXPECTED_OUTPUT_TOKENS = 256
"""Tokens of a response while no line of its batch has ended."""
BYTES_PER_TOKEN = 4
_RETRIED_STATUSES = frozenset({408, 409, 425, 429})


class _RunningLine(msgspec.Struct, eq=False):
    """Line that runs."""

    pool: Pool
    line: BatchLine
    receiver: ResponseReceiver
    task: asyncio.Task[None] | None = None


class _Backoff(msgspec.Struct):
    """Pause of a batch after failures that are not the fault of its lines."""

    until: float = 0.0
    delay_s: float = 0.0


class _PoolState(msgspec.Struct, eq=False):
    """Window and shares of one pool."""

    window: BackfillWindow = msgspec.field(default_factory=BackfillWindow)
    shares: LineShares = msgspec.field(default_factory=LineShares)


class BatchDispatcher:
    """Runs lines of batches on this gateway. Not thread-safe: use it from one event loop.

    Args:
        store: The store.
        holder: Id of this gateway, which holds its claims.
        models: The models.
        generation: Handlers of requests to models, which know the slots.
        routes: Routes of the APIs, by path, that lines may name.
        limits: Limits of the exchanges of lines.
        find_principal: Returns the principal of a key or a project by its id; None if there is none.
        find_current_key: Returns the last successor of a rotated key.
        metrics: Counts lines.
    """

    def __init__(
        self,
        store: Store,
        holder: str,
        models: ModelRouter,
        generation: CompletionHandlers,
        routes: Mapping[str, HttpRoute],
        limits: ExchangeLimits,
        *,
        find_principal: Callable[..., Principal | None],
        find_current_key: Callable[[str], str],
        metrics: GatewayMetrics,
    ) -> None:
        self._store = store.batches
        self._holder = holder
        self._models = models
        self._generation = generation
        self._routes = routes
        self._limits = limits
        self._find_principal = find_principal
        self._find_current_key = find_current_key
        self._metrics = metrics
        self._work: list[tuple[Batch, dict[str, int]]] = []
        """Batches in progress as of the last reading, with the waiting lines by model."""
        self._pools: defaultdict[Pool, _PoolState] = defaultdict(_PoolState)
        self._paces: defaultdict[str, BatchPace] = defaultdict(BatchPace)
        self._backoffs: defaultdict[str, _Backoff] = defaultdict(_Backoff)
        self._running: dict[ClaimedLine, _RunningLine] = {}
        self._results: list[LineResult] = []
        self._releases: list[tuple[ClaimedLine, bool]] = []
        """Lines that shall wait again, each with whether it has reached a replica."""
        self._at_risk: set[str] = set()
        self._changed = asyncio.Event()
        self._is_draining = False

    def read_gauges(self) -> dict[str, Any]:
        """Return the fields of `GatewayGauges` about batches."""
        return {
            "batch_windows": {pool.model: state.window.size for pool, state in self._pools.items()},
            "batch_lines_running": len(self._running),
            "batches_at_risk": len(self._at_risk),
        }

    def drain(self) -> None:
        """Start no more lines, and stop those that run. Other gateways run them again."""
        self._is_draining = True
        for running in self._running.values():
            running.receiver.disconnect()

    async def run(self) -> None:
        """Run lines until it is cancelled, and release the claims then."""
        committer = asyncio.create_task(self._commit_forever())
        read_at = reconciled_at = -math.inf
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
                self._changed.clear()
                if committer.done():
                    committer.result()  # raises what ended it, so that both tasks are started again
                try:
                    if time.monotonic() - read_at >= REFRESH_INTERVAL_S:
                        self._apply_work(await run_in_daemon_thread(self._store.list_work))
                        read_at = time.monotonic()
                    if time.monotonic() - reconciled_at >= RECONCILE_INTERVAL_S:
                        await run_in_daemon_thread(
                            self._store.release_unknown, self._holder, self._list_known()
                        )
                        reconciled_at = time.monotonic()
                    if not self._is_draining and len(self._results) < MAX_UNCOMMITTED_LINES:
                        await self._start_lines()
                except StoreError as error:
                    log.warning("batch_store_failed", reason=str(error))
                    await asyncio.sleep(REFRESH_INTERVAL_S)
        finally:
            committer.cancel()
            await self._close()

    def _list_known(self) -> set[ClaimedLine]:
        """Return the claims that this gateway knows of."""
        ended = {result.claimed for result in self._results}
        return ended | self._running.keys() | {claimed for claimed, _ in self._releases}

    async def _close(self) -> None:
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._commit()
                await run_in_daemon_thread(self._store.release_holder, self._holder)
        except (StoreError, TimeoutError) as error:
            log.info("batch_claims_left", reason=str(error) or "the store does not respond")

    # --- choice ----------------------------------------------------------------------------------

    def _apply_work(self, work: list[tuple[Batch, dict[str, int]]]) -> None:
        """Use the batches as they are now, and stop lines of those that are not in progress any more."""
        now, wall_time = time.monotonic(), time.time()
        self._work = work
        known = {batch.id for batch, _ in work}
        for claimed, running in self._running.items():
            if claimed.batch not in known:
                running.receiver.disconnect()
        for facts in (self._paces, self._backoffs):
            for gone in facts.keys() - known:
                del facts[gone]
        self._at_risk.clear()
        for batch, _ in work:
            pace = self._paces[batch.id]
            pace.record(batch.num_open, now)
            if pace.is_at_risk(batch.expires_at - wall_time):
                self._at_risk.add(batch.id)

    async def _start_lines(self) -> None:
        """Claim and start as many lines as the windows of the pools permit."""
        by_pool: defaultdict[tuple[Pool, str], list[tuple[Batch, Principal, int]]]
        by_pool = defaultdict(list)
        now = time.monotonic()
        for batch, queued in self._work:
            if self._backoffs[batch.id].until > now or not queued:
                continue
            principal = self.find_sender(batch)
            if principal is None:
                continue
            for model, count in queued.items():
                with suppress(ApiError):  # the model is gone, or its access was withdrawn
                    pool = self._models.find_target(model, principal, {}).pool
                    by_pool[pool, model].append((batch, principal, count))
        running = defaultdict[Pool, int](int)
        for each in self._running.values():
            running[each.pool] += 1
        for pool in {pool for pool, _ in by_pool} | self._pools.keys():
            state = self._pools[pool]
            window = state.window.update(self._generation.read_pool_load(pool), now)
            free = min(window - running[pool], MAX_CLAIMED_LINES)
            for (target, model), waiting in by_pool.items():
                if target is pool and free > 0:
                    free -= await self._claim(pool, model, state.shares, waiting, free)

    async def _claim(
        self,
        pool: Pool,
        model: str,
        shares: LineShares,
        waiting: list[tuple[Batch, Principal, int]],
        free: int,
    ) -> int:
        """Start up to `free` lines of a pool. Returns their number."""
        by_id = {batch.id: (batch, principal) for batch, principal, _ in waiting}
        chosen = shares.choose(
            [
                Backlog(
                    f"{batch.organisation}/{batch.owner}",
                    batch.id,
                    batch.expires_at,
                    count,
                    _expected_tokens(batch),
                )
                for batch, _, count in waiting
            ],
            free,
        )
        started = 0
        for batch_id, count in chosen.items():
            lines = await run_in_daemon_thread(
                self._store.claim_lines, self._holder, batch_id, model, count
            )
            batch, principal = by_id[batch_id]
            for _, queued in (each for each in self._work if each[0].id == batch_id):
                queued[model] = max(0, queued.get(model, 0) - count)
            for claimed in lines:
                self._start(batch, principal, pool, claimed)
            started += len(lines)
        return started

    def find_sender(self, batch: Batch) -> Principal | None:
        """Return the principal that created a batch, as it is now; None if it may not send requests any more."""
        if not (batch.organisation or batch.owner):
            return ANONYMOUS
        details = batch.details
        try:
            if details.key:
                key = self._find_current_key(details.key)
                return self._find_principal(key=key, project=None)
            project = self._find_principal(key=None, project=batch.owner)
        except ApiError:
            return None
        organisation = batch.organisation
        return project or Principal(
            organisation=organisation, user=details.user, cache_domain=organisation
        )

    def find_model_error(self, batch: Batch, model: str) -> str:
        """Return why the sender of a batch may not use a model; empty if it may."""
        principal = self.find_sender(batch)
        if principal is None:
            return "The key of the batch is not valid any more."
        try:
            self._models.find_target(model, principal, {})
        except ApiError as error:
            return error.message
        return ""

    # --- lines -----------------------------------------------------------------------------------

    def _start(self, batch: Batch, principal: Principal, pool: Pool, claimed: ClaimedLine) -> None:
        raised = sum(
            each.pool is pool and each.line.tier == LOWEST_TIER for each in self._running.values()
        )
        slots = self._generation.read_pool_load(pool).total_slots
        is_raised = batch.id in self._at_risk and raised < slots // MAX_RAISED_DIVISOR
        line = BatchLine(
            derive_line_id(batch.id, claimed.line), LOWEST_TIER if is_raised else BATCH_TIER
        )
        receiver = ResponseReceiver(prepare_line(batch, claimed))
        running = self._running[claimed] = _RunningLine(pool, line, receiver)
        running.task = asyncio.create_task(self._run_line(batch, principal, claimed, running))

    async def _run_line(
        self, batch: Batch, principal: Principal, claimed: ClaimedLine, running: _RunningLine
    ) -> None:
        route = self._routes[batch.details.path]
        request = HttpRequest("POST", route.path, b"", [], "", running.receiver)
        exchange = HttpExchange(request, self._limits, self._holder)
        exchange.batch_line, exchange.request_id = running.line, running.line.request_id
        if route.dialect is not None:
            exchange.set_dialect(route.dialect)
        try:
            await run_handler(exchange, route.handler(exchange, principal))
            status, body = running.receiver.status, running.receiver.body
            if status == HTTPStatus.OK and exchange.filter_stored is not None:
                body = msgspec.json.encode(await exchange.filter_stored(msgspec.json.decode(body)))
            self._end_line(batch, claimed, running.line, exchange.error_code, status, body)
        finally:
            del self._running[claimed]
            self._changed.set()

    def _end_line(
        self,
        batch: Batch,
        claimed: ClaimedLine,
        line: BatchLine,
        error_code: str | None,
        status: int,
        body: bytes,
    ) -> None:
        """Keep the result of a line, or let it run again later if the line is not to blame."""
        backoff, is_out_of_budget = self._backoffs[batch.id], error_code == "insufficient_quota"
        is_failure = status == 0 or status in _RETRIED_STATUSES or status >= 500
        is_last = line.has_reached_replica and claimed.attempts >= MAX_ATTEMPTS
        if not is_failure or (is_last and status):
            backoff.delay_s = 0.0 if status == HTTPStatus.OK else backoff.delay_s
            self._results.append(LineResult(claimed, status, body, line.record))
            self._metrics.batch_lines.add(("completed" if status < 300 else "failed",))
            return
        self._metrics.batch_lines.add(("retried",))
        if status:
            delay_s = min(MAX_BACKOFF_S, max(1.0, 2 * backoff.delay_s))
            backoff.delay_s = BUDGET_BACKOFF_S if is_out_of_budget else delay_s
            backoff.until = time.monotonic() + backoff.delay_s
        is_attempt = line.has_reached_replica and bool(status)
        self._releases.append((claimed, is_attempt))

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            try:
                await self._commit()
            except StoreError as error:
                log.warning("batch_store_failed", reason=str(error))
                await asyncio.sleep(REFRESH_INTERVAL_S)

    async def _commit(self) -> None:
        """Write the results, and release the lines that run again. Both stay in memory if the store fails."""
        while self._results:
            results = self._results[:MAX_COMMITTED_LINES]
            await run_in_daemon_thread(self._store.commit, results)
            del self._results[: len(results)]
        if self._releases:
            releases = self._releases[:]
            await run_in_daemon_thread(self._store.release_lines, releases)
            del self._releases[: len(releases)]


def _expected_tokens(batch: Batch) -> float:
    """Return the tokens that a line of the batch is expected to cost."""
    ended = batch.completed + batch.failed
    prompt_tokens = batch.bytes / max(1, batch.total) / BYTES_PER_TOKEN
    output = batch.output_tokens / ended if ended else EXPECTED_OUTPUT_TOKENS
    return 1.0 + prompt_tokens + output
