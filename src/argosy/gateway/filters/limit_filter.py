"""Limits and budgets in force: held before a request is sent, held further while it streams, settled at its end."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
import structlog

from argosy.gateway.filters.limit_filter_state import (
    DegradedModePolicy,
    LimitFilterState,
    LimitSet,
    quota_demand,
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
from argosy.policy import (
    OutputLengthEstimator,
    PriceList,
    QuotaLimit,
    QuotaRejection,
    QuotaUsage,
    Reservation,
    is_permanent,
    reserve,
    running_usage,
)
from argosy.process import run_in_daemon_thread
from argosy.store import (
    AccountSnapshot,
    Clock,
    Limit,
    OwnerKind,
    QuotaBackend,
    UsageReportRow,
    create_quota_backend,
    steady_clock,
)
from argosy.telemetry import QuotaBackendGauges

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_ACQUIRE_ROUNDS = 20
"""How often more room is asked for, while there is more: others may take it first."""
MAX_CACHED_LIMIT_SETS = 10_000
"""Callers whose limits are remembered, by model; they are found again at once."""


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where several gateways share how much of their limits is used."""

    redis: str | None = None
    """URL of a Redis or Valkey (`redis://`, `rediss://`, `unix://`); by default this gateway is alone."""
    password_env: str | None = None
    """Environment variable that holds its password."""


def open_quota_backend(config: LimitsConfig) -> QuotaBackend:
    """The state that the settings ask for. Raises ValueError, saying what to change."""
    return create_quota_backend(config.redis, read_redis_password(config))


def read_redis_password(config: LimitsConfig) -> str | None:
    """The password of the Redis, if it has one. Raises ValueError, saying what to change."""
    if config.password_env is None:
        return None
    if config.redis is None:
        raise ValueError("limits: password_env is the password of a Redis; add redis: its URL")
    password = os.environ.get(config.password_env)
    if not password:
        raise ValueError(f"limits: set the environment variable {config.password_env}")
    return password


UsageQuery = Callable[[OwnerKind, Collection[str], float], Mapping[str, Sequence[UsageReportRow]]]
"""What owners used since a moment: `store.usage.spent`."""


class LimitFilter:
    """The stage that lets in what the caller's limits have room for, and ends what they have no more room for.

    In one gateway a limit is passed by at most the last piece of each stream that it ends. For several gateways,
    see `argosy.policy.window_lease`: besides, by what streams get while Redis is asked for more.
    """

    def __init__(self, backend: QuotaBackend, clock: Clock = steady_clock) -> None:
        """`clock` tells seconds since the epoch, and must be the state's."""
        self._backend = backend
        self._degraded_mode = DegradedModePolicy(backend)
        self._clock = clock
        self._prices = PriceList()
        self._output_lengths = OutputLengthEstimator()
        self._meters: dict[str, tuple[Limit, QuotaLimit]] = {}
        self._meters_by_owner: dict[tuple[str, str], list[QuotaLimit]] = {}
        self._key_successors: dict[str, str] = {}
        """Keys that were rotated, and which took their places, limits included."""
        self._fail_closed_projects: frozenset[str] = frozenset()
        """Projects that refuse while nobody can say how much is used."""
        self._limit_sets: dict[tuple[str, ...], LimitSet] = {}

    def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Take over limits and prices. What is in use stays in use; requests that run keep theirs."""
        self.prepare_snapshot(snapshot)()

    def prepare_snapshot(self, snapshot: AccountSnapshot) -> Callable[[], object]:
        """What does as `update` does, at once: all work is done by then, in any thread.

        It is good until the next `update`, and gives what was in force: in any thread that may be let go of.
        """
        meters: dict[str, tuple[Limit, QuotaLimit]] = {}
        owners: defaultdict[tuple[str, str], list[QuotaLimit]] = defaultdict(list)
        amounts: list[tuple[QuotaLimit, int]] = []
        for limit in snapshot.limits:
            try:
                meter = self._meter_for(limit)
            except ValueError as error:
                log.error("limit_not_enforced", limit=limit.id, reason=str(error))  # noqa: TRY400 - no bug of ours
                continue
            meters[limit.id] = limit, meter
            owners[limit.owner_kind, limit.owner].append(meter)
            if meter.meter.limit != limit.amount:
                amounts.append((meter, limit.amount))
        prices = PriceList(snapshot.prices)
        closed = frozenset(p.id for p in snapshot.projects if p.when_unsure == "closed")

        def take() -> object:
            before = self._meters, self._meters_by_owner
            for meter, amount in amounts:
                meter.meter.limit = amount
            self._meters, self._meters_by_owner = meters, owners
            self._prices, self._key_successors, self._fail_closed_projects = (
                prices,
                snapshot.successors,
                closed,
            )
            self._limit_sets.clear()
            return before

        return take

    async def seed_usage(self, query_usage: UsageQuery) -> None:
        """Count what the ledger has of limits that do not know it yet: call it after each `update`, and each second.

        `spent` runs in a worker thread; what it raises is raised, and the next call asks again. Rows that end while
        it is asked count twice, those not yet in the ledger not at all.
        """
        unknown = await run_in_daemon_thread(_unseeded_limits, self._meters)
        if unknown:
            now = self._clock()
            new = [(limit, meter, meter.meter.seed_points(now)) for limit, meter in unknown]
            told = await run_in_daemon_thread(_query_past_usage, query_usage, new, now)
            for (_, meter, _), used in zip(new, told, strict=True):
                meter.meter.seed(used, self._clock())

    async def start(self) -> None:
        """Be ready to share; within seconds, whether or not the shared state can be reached."""
        await self._backend.start()

    async def close(self) -> None:
        """Give back what is held for later."""
        await self._backend.close()

    def read_quota_status(self) -> QuotaBackendGauges | None:
        """How it stands with the shared state; None where this gateway is alone."""
        up, unsure = self._backend.is_connected, self._degraded_mode
        return None if up is None else QuotaBackendGauges(up, unsure.allowed, unsure.rejected)

    # --- the stage -------------------------------------------------------------------------------

    async def on_request(self, context: RequestContext) -> LimitFilterState | None:
        """Hold what the request will likely use. Raises ApiError 413, 429 or 503 when that cannot be."""
        ask, principal = context.fields, context.principal
        party = self._limit_set_for(principal, context.pool.model)
        if not party.meters:
            return None
        now = self._clock()
        rates = self._prices.rates_at(context.pool.model, TIERS[principal.tier], now)
        context.rates = rates
        prompt = ask.estimated_prompt_tokens
        expected = self._output_lengths.estimate(
            party.caller_key, ask.max_output_tokens, DEFAULT_OUTPUT_TOKENS
        )
        output = expected * ask.choice_count
        likely = running_usage(rates, prompt, 0, output)
        found, answered = reserve(party.meters, likely, likely, now), True
        if isinstance(found, list):
            least = running_usage(rates, prompt, 0, 1)
            found, answered = await self._acquire(party, likely, least, now)
        context.response_headers += party.rate_limit_headers(now)
        if isinstance(found, list):
            context.trace.limits = explain_rejected(found)
            raise (
                rate_limit_error(found)
                if answered or party.fails_open
                else limits_unavailable_error()
            )
        context.trace.limits = explain_admitted(found)
        return LimitFilterState(
            self._backend,
            self._degraded_mode,
            self._clock,
            self._output_lengths,
            party,
            context,
            reservation=found,
            rates=rates,
            reserved_prompt_tokens=prompt,
            reserved_output_tokens=output if found.covers_estimate else 0,
        )

    # --- what generates nothing --------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def reserve_request(
        self, principal: Principal, model: str, headers: list[tuple[bytes, bytes]]
    ) -> AsyncIterator[None]:
        """Count a request that generates nothing as one, if it succeeds, and as one at a time meanwhile.

        `headers` of its answer get what is left. Raises ApiError 429 or 503 when there is no room for it.
        """
        party, now = self._limit_set_for(principal, model), self._clock()
        one = QuotaUsage(requests=1, concurrency=1)
        found, answered = reserve(party.meters, one, one, now), True
        if isinstance(found, list):
            found, answered = await self._acquire(party, one, one, now)
        headers += party.rate_limit_headers(now)
        if isinstance(found, list):
            raise (
                rate_limit_error(found)
                if answered or party.fails_open
                else limits_unavailable_error()
            )
        used = QuotaUsage()
        try:
            yield
            used = QuotaUsage(requests=1)
        finally:
            found.settle(used, self._clock())

    # --- in parts --------------------------------------------------------------------------------

    async def _acquire(
        self, limit_set: LimitSet, likely: QuotaUsage, minimum: QuotaUsage, now: float
    ) -> tuple[Reservation | list[QuotaRejection], bool]:
        """Hold what there is room for, asked for if that may help; whether anybody could say how much there is."""
        found = reserve(limit_set.meters, likely, minimum, now)
        if not isinstance(found, list) or any(map(is_permanent, found)):
            return found, True
        for _ in range(MAX_ACQUIRE_ROUNDS):
            answered = await self._backend.acquire(
                quota_demand((r.quota_limit, r.requested) for r in found)
            )
            now = self._clock()
            found = reserve(limit_set.meters, likely, minimum, now)
            if not isinstance(found, list):
                return found, True
            if not answered:
                break
            if self._backend.is_short(
                quota_demand((r.quota_limit, r.requested) for r in found), now
            ):
                return found, True
        else:
            return found, True
        wants = quota_demand((r.quota_limit, r.requested) for r in found)
        if self._degraded_mode.decide(limit_set, wants, now):
            return reserve(limit_set.meters, likely, minimum, now), False
        return found, False

    def _meter_for(self, limit: Limit) -> QuotaLimit:
        """The limit's meter: the one that it has, of whatever amount, unless something else is to be counted.

        A key that is rotated is none: its limits go to another owner, and what is used of them stays.
        """
        if limit.id in self._meters:
            known, meter = self._meters[limit.id]
            if known is limit or known == msgspec.structs.replace(
                limit, amount=known.amount, owner=known.owner
            ):
                return meter
        counter = self._backend.create_meter(limit)
        return QuotaLimit(limit.owner_kind, limit.unit, limit.window or "", limit.model, counter)

    def _limit_set_for(self, principal: Principal, model: str) -> LimitSet:
        name = (principal.key, principal.user, principal.project, principal.organisation, model)
        party = self._limit_sets.get(name)
        if party is None:
            if len(self._limit_sets) >= MAX_CACHED_LIMIT_SETS:
                self._limit_sets.clear()
            owners = (
                ("key", self._current_key(principal.key)),
                ("user", principal.user),
                ("project", principal.project),
                ("organisation", principal.organisation),
            )
            meters = tuple(
                meter
                for owner in owners
                for meter in self._meters_by_owner.get(owner, ())
                if meter.model in {None, model}
            )
            asker = (principal.key or principal.user or principal.project, model)
            party = LimitSet(
                meters,
                principal.project not in self._fail_closed_projects,
                asker,
                RateLimitHeaders(meters),
            )
            self._limit_sets[name] = party
        return party

    def _current_key(self, key: str) -> str:
        """The key that took this one's place at last: both are under its limits."""
        while key in self._key_successors:
            key = self._key_successors[key]
        return key


def _unseeded_limits(
    meters: Mapping[str, tuple[Limit, QuotaLimit]],
) -> list[tuple[Limit, QuotaLimit]]:
    """Those that the ledger is still to be asked about. There may be thousands, so this is for a thread."""
    return [(limit, meter) for limit, meter in meters.values() if meter.meter.needs_seed]


def _query_past_usage(
    query_usage: UsageQuery,
    unseeded: Sequence[tuple[Limit, QuotaLimit, tuple[float, ...]]],
    now: float,
) -> list[list[tuple[float, int]]]:
    """What was used of each limit between each of its moments and the next, as of the next.

    It is asked for all that have the same moments at once: there may be thousands.
    """
    owners: defaultdict[tuple[OwnerKind, tuple[float, ...]], set[str]] = defaultdict(set)
    for limit, _, since in unseeded:
        owners[limit.owner_kind, since].add(limit.owner)
    told = {
        (kind, since): [query_usage(kind, those, moment) for moment in since]
        for (kind, since), those in owners.items()
    }
    used = []
    for limit, meter, since in unseeded:
        rows = (each.get(limit.owner, ()) for each in told[limit.owner_kind, since])
        sums = [
            sum(meter.units_of(_row_usage(row)) for row in each if _limit_applies(limit, row))
            for each in rows
        ]
        parts = [max(0, more - less) for more, less in pairwise([*sums, 0])]
        used.append(list(zip([*since[1:], now], parts, strict=True)))
    return used


def _limit_applies(limit: Limit, row: UsageReportRow) -> bool:
    return limit.model is None or limit.model == row.model


def _row_usage(row: UsageReportRow) -> QuotaUsage:
    tokens = row.input_tokens + row.output_tokens
    return QuotaUsage(row.requests, tokens, row.input_tokens, row.output_tokens, row.nano_dollars)
