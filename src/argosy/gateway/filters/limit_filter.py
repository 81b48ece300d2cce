"""Enforcement of limits and budgets by reservations, extended while a request streams and settled at its end."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
import structlog

from argosy.deployment import LimitsConfig
from argosy.gateway.backends import find_max_usage
from argosy.gateway.filters.limit_filter_state import (
    DegradedModePolicy,
    LimitFilterState,
    LimitSet,
)
from argosy.gateway.filters.limit_responses import (
    RateLimitHeaders,
    explain_admitted,
    explain_rejected,
    limits_unavailable_error,
    rate_limit_error,
)
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_fields import DEFAULT_OUTPUT_TOKENS
from argosy.http_server import DisconnectedError
from argosy.policy import (
    BATCH_PERCENT,
    OutputLengthEstimator,
    QuotaLimit,
    QuotaMeter,
    QuotaRejection,
    QuotaUsage,
    Reservation,
    is_exceeded,
    is_permanent,
    reserve,
    running_usage,
)
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, EarlyStopReason, TokenUsage
from argosy.store import (
    AccountSnapshot,
    Adapter,
    Clock,
    Limit,
    OwnerKind,
    PriceList,
    QuotaBackend,
    QuotaDemand,
    UsageReportRow,
    steady_clock,
)
from argosy.telemetry import QuotaBackendGauges

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_ACQUIRE_ROUNDS = 20
"""Maximum number of attempts to acquire quota for one request, since concurrent requests may take it first."""
MAX_CACHED_LIMIT_SETS = 10_000
"""Maximum number of cached limit sets by caller and model. The cache is cleared beyond it and fills again cheaply."""


def read_redis_password(config: LimitsConfig) -> str | None:
    """Return the Redis password, or None if none is configured.

    Raises:
        ValueError: The settings are invalid; the message contains the remedy.
    """
    if config.password_env is None:
        return None
    if config.redis is None:
        raise ValueError("limits: password_env is set without redis; add redis with its URL")
    password = os.environ.get(config.password_env)
    if not password:
        raise ValueError(f"limits: set the environment variable {config.password_env}")
    return password


UsageQuery = Callable[[OwnerKind, Collection[str], float], Mapping[str, Sequence[UsageReportRow]]]
"""Returns usage rows by owner since a time, for owners of one kind, as `store.usage.spent` does."""


class LimitFilter:
    """Filter that admits requests that fit the caller's limits, and stops streams that exceed them.

    With one gateway a limit is exceeded by at most the last chunk of each stopped stream. With several gateways, it is
    also exceeded by the tokens delivered while Redis is asked for more quota (see `argosy.policy.window_lease`).
    Budgets are exceeded by less than what one request may cost, by all gateways together (`argosy.policy.reservation`).
    """

    def __init__(self, backend: QuotaBackend, clock: Clock = steady_clock) -> None:
        self._backend = backend
        self._degraded_mode = DegradedModePolicy(backend)
        self._clock = clock
        self._prices = PriceList()
        self._output_lengths = OutputLengthEstimator()
        self._meters: dict[str, tuple[Limit, QuotaLimit]] = {}
        self._meters_by_owner: dict[tuple[str, str], list[QuotaLimit]] = {}
        self._key_successors: dict[str, str] = {}
        """Successor of each rotated key. The successor has its limits."""
        self._fail_closed_projects: frozenset[str] = frozenset()
        """Projects whose requests are rejected while the quota backend is unreachable."""
        self._limit_sets: dict[tuple[str, ...], LimitSet] = {}
        self._running: dict[RequestContext, LimitFilterState] = {}
        """Reservations of the requests that have been admitted and have not ended."""

    def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Use the snapshot's limits and prices. Meters keep their usage, and running requests keep their prices."""
        self.prepare_snapshot(snapshot)()

    def prepare_snapshot(self, snapshot: AccountSnapshot) -> Callable[[], object]:
        """Prepare a snapshot and return a function that applies it, also to running requests. Thread-safe.

        The returned function is valid until the next snapshot is applied. It returns the replaced tables, so that the
        caller decides in which thread they are freed.
        """
        meters: dict[str, tuple[Limit, QuotaLimit]] = {}
        meters_by_owner: defaultdict[tuple[str, str], list[QuotaLimit]] = defaultdict(list)
        changed_amounts: list[tuple[QuotaLimit, int]] = []
        for limit in snapshot.limits:
            if limit.unit == "stored_bytes":  # enforced by the store
                continue
            try:
                meter = self._get_or_create_meter(limit)
            except ValueError as error:
                log.error("limit_not_enforced", limit=limit.id, reason=str(error))  # noqa: TRY400 - a wrong limit is no bug
                continue
            meters[limit.id] = limit, meter
            meters_by_owner[limit.owner_kind, limit.owner].append(meter)
            if meter.meter.limit != limit.amount:
                changed_amounts.append((meter, limit.amount))
        prices = PriceList(snapshot.prices)
        fail_closed_projects = frozenset(
            project.id for project in snapshot.projects if project.quota_failure_mode == "closed"
        )

        def apply() -> object:
            previous = self._meters, self._meters_by_owner
            for meter, amount in changed_amounts:
                meter.meter.limit = amount
            self._meters, self._meters_by_owner = meters, meters_by_owner
            self._prices, self._key_successors, self._fail_closed_projects = (
                prices,
                snapshot.successors,
                fail_closed_projects,
            )
            self._limit_sets.clear()
            self._update_running([meter.meter for meter, _ in changed_amounts])
            return previous

        return apply

    async def seed_usage(self, query_usage: UsageQuery) -> None:
        """Initialise new limits with past usage from the usage table. Call it after each snapshot and every second.

        Requests that end during the query are counted twice. Usage that is not yet in the table is not counted.

        Args:
            query_usage: Query that runs in a worker thread. Its exceptions propagate, and the next call repeats it.
        """
        unseeded = await run_in_daemon_thread(_unseeded_limits, self._meters)
        if unseeded:
            now = self._clock()
            seed_requests = [
                (limit, meter, meter.meter.seed_points(now)) for limit, meter in unseeded
            ]
            past_usage = await run_in_daemon_thread(
                _query_past_usage, query_usage, seed_requests, now
            )
            for (_, meter, _), usage in zip(seed_requests, past_usage, strict=True):
                meter.meter.seed(usage, self._clock())
            self._update_running([meter.meter for _, meter in unseeded])

    async def start(self) -> None:
        """Connect to the quota backend. Returns within seconds, whether or not the backend is reachable."""
        await self._backend.start()

    async def close(self) -> None:
        """Return unused quota to the backend and disconnect."""
        await self._backend.close()

    def read_quota_status(self) -> QuotaBackendGauges | None:
        """Return the backend's state for metrics, or None if no backend is shared."""
        is_connected, degraded_mode = self._backend.is_connected, self._degraded_mode
        return (
            None
            if is_connected is None
            else QuotaBackendGauges(is_connected, degraded_mode.allowed, degraded_mode.rejected)
        )

    def read_budget_used(self, principal: Principal, model: str) -> float:
        """Return the largest used or reserved part of the budgets that apply to a request; 0 without budgets."""
        now, used = self._clock(), 0.0
        for limit in self._get_limit_set(principal, model).meters:
            if limit.unit == "nano_dollars":
                total = max(1, limit.meter.limit)
                used = max(used, 1.0 - max(0, limit.meter.remaining(now)) / total)
        return used

    # --- Generation requests ---------------------------------------------------------------------

    async def on_request(self, context: RequestContext) -> bool:
        """Reserve the request's expected usage. A request without limits may get some while it runs.

        Raises:
            ApiError: 413 if a limit can never admit the request. 429 if it does not fit now. 503 if the usage is
                unknown and the project fails closed.
        """
        fields, principal = context.fields, context.principal
        model, is_line = context.pool.model, context.batch_line is not None
        limit_set = self._get_limit_set(principal, model, context.adapter, has_only_budgets=is_line)
        now = self._clock()
        wall_time = now - steady_clock.offset_s
        rates = self._prices.rates_at(model, TIERS[principal.tier], wall_time)
        context.rates = rates
        if is_line:
            rates = rates.scale(BATCH_PERCENT)
        prompt_tokens = fields.estimated_prompt_tokens
        expected_tokens = self._output_lengths.estimate(
            limit_set.caller_key, fields.max_output_tokens, DEFAULT_OUTPUT_TOKENS
        )
        output_tokens = expected_tokens * fields.choice_count
        expected_usage = running_usage(rates, TokenUsage(prompt_tokens, 0, output_tokens))
        max_nano_dollars = 0
        if limit_set.has_budget:
            most = find_max_usage(fields, lambda: context.pool.max_model_len)
            max_nano_dollars = rates.max_nano_dollars(most)
        outcome = reserve(limit_set.meters, expected_usage, expected_usage, now, max_nano_dollars)
        error: ApiError | None = None
        has_waited = isinstance(outcome, list)
        if has_waited:
            minimum_tokens = TokenUsage(prompt_tokens, 0, min(1, output_tokens))
            minimum_usage = running_usage(rates, minimum_tokens)
            outcome, error = await self._acquire(
                limit_set, expected_usage, minimum_usage, now, max_nano_dollars
            )
        context.response_headers += limit_set.rate_limit_headers(now)
        if isinstance(outcome, list):
            context.trace.limits = explain_rejected(outcome)
            raise error or rate_limit_error(outcome, fields, rates)
        context.trace.limits = explain_admitted(outcome)
        state = LimitFilterState(
            self._backend,
            self._degraded_mode,
            self._clock,
            self._output_lengths,
            limit_set,
            context,
            reservation=outcome,
            rates=rates,
            expected_output_tokens=output_tokens,
        )
        self._running[context] = state
        if has_waited:  # the limits may have changed while units were acquired
            current_limit_set = self._find_limit_set(context)
            if current_limit_set.meters != limit_set.meters:
                state.change_limits(current_limit_set)
        return True

    def on_tokens(
        self,
        context: RequestContext,
        chunk_times: Sequence[float],  # noqa: ARG002 - limits use the wall clock
    ) -> EarlyStopReason | None:
        """Extend the reservation if the delivered tokens exceed it, and return the reason to stop if that fails."""
        delivered = context.delivered
        if (
            delivered.output_tokens <= context.covered_output_tokens
            and delivered.prompt_tokens <= context.covered_prompt_tokens
        ):
            return None
        return self._running[context].extend()

    async def on_fallback(self, context: RequestContext) -> None:
        """Settle the reservation, and reserve by the limits and prices of the model that answers now.

        Only the answer of a cascade's smaller model is used up, without counting as a request of its own.

        Raises:
            ApiError: As `on_request`.
        """
        state, now = self._running.pop(context), self._clock()
        state.reservation.settle(msgspec.structs.replace(context.bill.quota, requests=0), now)
        names = {name for name, _ in state.limit_set.rate_limit_headers(now)}
        headers = context.response_headers
        headers[:] = [header for header in headers if header[0] not in names]
        await self.on_request(context)

    def on_complete(self, context: RequestContext) -> None:
        """Settle the reservation. There is none if the limits rejected a fallback."""
        if context in self._running:
            self._running.pop(context).settle()

    # --- Other requests --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def reserve_request(
        self,
        principal: Principal,
        model: str,
        headers: list[tuple[bytes, bytes]],
        *,
        concurrency: int = 1,
        requests: int = 1,
    ) -> AsyncIterator[None]:
        """Reserve one request, and by default a concurrency slot, for a request without generation.

        Failures of the gateway and the fleet do not count. Errors of the request do, and so does a request whose client
        disconnects. The rate limit headers are appended to `headers`.

        Args:
            principal: Sender of the request.
            model: Model of the request, or an empty name.
            headers: Headers of the response.
            concurrency: Concurrency slots that the request takes.
            requests: Requests that it counts. 0 if it is part of one that is counted later.

        Raises:
            ApiError: 429 if the request does not fit. 503 if the usage is unknown and the project fails closed.
        """
        limit_set, now = self._get_limit_set(principal, model), self._clock()
        single_request = QuotaUsage(requests=1, concurrency=concurrency)
        outcome, error = await self._acquire(limit_set, single_request, single_request, now)
        headers += limit_set.rate_limit_headers(now)
        if isinstance(outcome, list):
            raise error or rate_limit_error(outcome)
        used = QuotaUsage(requests=requests)
        try:
            yield
        except DisconnectedError:
            raise
        except Exception as failure:
            if not isinstance(failure, ApiError) or failure.status >= 500:
                used = QuotaUsage()
            raise
        finally:
            outcome.settle(used, self._clock())

    # --- Internal --------------------------------------------------------------------------------

    async def _acquire(
        self,
        limit_set: LimitSet,
        expected: QuotaUsage,
        minimum: QuotaUsage,
        now: float,
        max_nano_dollars: int = 0,
    ) -> tuple[Reservation | list[QuotaRejection], ApiError | None]:
        """Reserve usage, at least the minimum, acquiring quota from the backend where that may help.

        Returns:
            The reservation or the rejections, and the error for a project that fails closed without an answer.
        """
        outcome = reserve(limit_set.meters, expected, minimum, now, max_nano_dollars)
        if not isinstance(outcome, list) or any(map(is_permanent, outcome)):
            return outcome, None
        for _ in range(MAX_ACQUIRE_ROUNDS):
            has_answered = await self._backend.acquire(_rejected_demand(outcome))
            now = self._clock()
            outcome = reserve(limit_set.meters, expected, minimum, now, max_nano_dollars)
            if not isinstance(outcome, list):
                return outcome, None
            demand = _rejected_demand(outcome)
            if not has_answered:
                if self._degraded_mode.decide(limit_set, demand, now):
                    outcome = reserve(limit_set.meters, expected, minimum, now, max_nano_dollars)
                return outcome, None if limit_set.fails_open else limits_unavailable_error()
            if self._backend.is_short(demand, now):
                break
        return outcome, None

    def _update_running(self, changed: Sequence[QuotaMeter]) -> None:
        """Apply limits that have changed to the running requests.

        Nothing changes for a request whose limits were raised, or lowered to no less than what is in use.

        Args:
            changed: Meters with another amount, or whose past usage has become known.
        """
        now = self._clock()
        exceeded = {meter for meter in changed if is_exceeded(meter, now)}
        # By limits, because the same ones apply to all requests of a caller for a model, and there may be thousands.
        has_exceeded_by_set: dict[int, bool] = {}
        for context, state in tuple(self._running.items()):
            limit_set = self._find_limit_set(context)
            has_exceeded = has_exceeded_by_set.get(id(limit_set))
            if has_exceeded is None:
                has_exceeded = any(limit.meter in exceeded for limit in limit_set.meters)
                has_exceeded_by_set[id(limit_set)] = has_exceeded
            if has_exceeded or state.limit_set.meters != limit_set.meters:
                state.change_limits(limit_set, exceeded)
            else:
                state.limit_set = limit_set

    def _get_or_create_meter(self, limit: Limit) -> QuotaLimit:
        """Return the limit's existing meter unless the new limit counts something else than the old one.

        A changed amount keeps the meter. A key rotation does too, since the limit moves to the new key with its usage.
        """
        if limit.id in self._meters:
            known_limit, meter = self._meters[limit.id]
            if known_limit is limit or known_limit == msgspec.structs.replace(
                limit, amount=known_limit.amount, owner=known_limit.owner
            ):
                return meter
        counter = self._backend.create_meter(limit)
        return QuotaLimit(limit.owner_kind, limit.unit, limit.window or "", limit.model, counter)

    def _find_limit_set(self, context: RequestContext) -> LimitSet:
        """Return the limits that apply to a request: only budgets for a line of a batch, which has no rate."""
        return self._get_limit_set(
            *(context.principal, context.pool.model, context.adapter),
            has_only_budgets=context.batch_line is not None,
        )

    def _get_limit_set(
        self,
        principal: Principal,
        model: str,
        adapter: Adapter | None = None,
        *,
        has_only_budgets: bool = False,
    ) -> LimitSet:
        """Return the limits for a model, or for an adapter, which those for its base model limit too."""
        organisation, project = principal.organisation, principal.project
        name = model if adapter is None else adapter.name
        kind = "budgets" if has_only_budgets else ""
        cache_key = (principal.key, principal.user, project, organisation, model, name, kind)
        limit_set = self._limit_sets.get(cache_key)
        if limit_set is None:
            if len(self._limit_sets) >= MAX_CACHED_LIMIT_SETS:
                self._limit_sets.clear()
            owners = (
                ("key", self.find_current_key(principal.key)),
                ("user", principal.user),
                ("project", project),
                ("organisation", organisation),
            )
            meters = tuple(
                meter
                for owner in owners
                for meter in self._meters_by_owner.get(owner, ())
                if meter.model in {None, model, name}
                and (meter.unit == "nano_dollars" or not has_only_budgets)
            )
            limit_set = LimitSet(
                meters,
                project not in self._fail_closed_projects,
                (principal.key or principal.user or project, name),
                any(meter.unit == "nano_dollars" for meter in meters),
                RateLimitHeaders(meters),
            )
            self._limit_sets[cache_key] = limit_set
        return limit_set

    def find_current_key(self, key: str) -> str:
        """Return the last successor of a key. All of them share its limits."""
        while key in self._key_successors:
            key = self._key_successors[key]
        return key


def _rejected_demand(rejections: Sequence[QuotaRejection]) -> QuotaDemand:
    return [(each.quota_limit.meter, each.held, each.requested) for each in rejections]


def _unseeded_limits(
    meters: Mapping[str, tuple[Limit, QuotaLimit]],
) -> list[tuple[Limit, QuotaLimit]]:
    """Return the limits whose past usage is unknown. Runs in a thread, since there may be thousands of limits."""
    return [(limit, meter) for limit, meter in meters.values() if meter.meter.needs_seed]


def _query_past_usage(
    query_usage: UsageQuery,
    unseeded: Sequence[tuple[Limit, QuotaLimit, tuple[float, ...]]],
    now: float,
) -> list[list[tuple[float, int]]]:
    """Return each limit's usage between successive points in time, as pairs of the later time and the units.

    Limits of the same owner kind with the same points share their queries, since there may be thousands of limits. The
    last interval ends `now`.
    """
    owners: defaultdict[tuple[OwnerKind, tuple[float, ...]], set[str]] = defaultdict(set)
    for limit, _, starts in unseeded:
        owners[limit.owner_kind, starts].add(limit.owner)
    reports = {
        (kind, starts): [
            query_usage(kind, owner_ids, start - steady_clock.offset_s) for start in starts
        ]
        for (kind, starts), owner_ids in owners.items()
    }
    usage = []
    for limit, meter, starts in unseeded:
        rows_per_start = (
            report.get(limit.owner, ()) for report in reports[limit.owner_kind, starts]
        )
        usage_since = [
            sum(meter.units_of(_row_usage(row)) for row in rows if limit.model in {None, row.model})
            for rows in rows_per_start
        ]
        interval_usage = [max(0, earlier - later) for earlier, later in pairwise([*usage_since, 0])]
        usage.append(list(zip([*starts[1:], now], interval_usage, strict=True)))
    return usage


def _row_usage(row: UsageReportRow) -> QuotaUsage:
    tokens = row.input_tokens + row.output_tokens
    return QuotaUsage(row.requests, tokens, row.input_tokens, row.output_tokens, row.nano_dollars)
