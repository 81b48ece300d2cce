"""Limits and budgets in force: held before a request is sent, held further while it streams, settled at its end."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
import structlog

from argosy.gateway.filters.limit_filter_state import Held, Party, Unsure, wants_of
from argosy.gateway.filters.limit_responses import Headers, kept_out, let_in, refused, unavailable
from argosy.gateway.principal import TIERS, Caller
from argosy.gateway.request_context import Journey
from argosy.gateway.request_fields import DEFAULT_OUTPUT
from argosy.policy import (
    Meter,
    OutputEstimates,
    PriceList,
    Refusal,
    Reservation,
    Use,
    never,
    reserve,
    running,
)
from argosy.process import aside
from argosy.store import (
    Clock,
    Directory,
    Limit,
    OwnerKind,
    ReportRow,
    SharedState,
    open_shared,
    steady,
)
from argosy.telemetry import SharedLimitsReading

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

ROUNDS = 20
"""How often more room is asked for, while there is more: others may take it first."""
MOST_PARTIES = 10_000
"""Callers whose limits are remembered, by model; they are found again at once."""


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where several gateways share how much of their limits is used."""

    redis: str | None = None
    """URL of a Redis or Valkey (`redis://`, `rediss://`, `unix://`); by default this gateway is alone."""
    password_env: str | None = None
    """Environment variable that holds its password."""


def shared_state(config: LimitsConfig) -> SharedState:
    """The state that the settings ask for. Raises ValueError, saying what to change."""
    return open_shared(config.redis, redis_password(config))


def redis_password(config: LimitsConfig) -> str | None:
    """The password of the Redis, if it has one. Raises ValueError, saying what to change."""
    if config.password_env is None:
        return None
    if config.redis is None:
        raise ValueError("limits: password_env is the password of a Redis; add redis: its URL")
    password = os.environ.get(config.password_env)
    if not password:
        raise ValueError(f"limits: set the environment variable {config.password_env}")
    return password


Spent = Callable[[OwnerKind, Collection[str], float], Mapping[str, Sequence[ReportRow]]]
"""What owners used since a moment: `store.usage.spent`."""


class Limits:
    """The stage that lets in what the caller's limits have room for, and ends what they have no more room for.

    In one gateway a limit is passed by at most the last piece of each stream that it ends. For several gateways,
    see `argosy.policy.window_lease`: besides, by what streams get while Redis is asked for more.
    """

    def __init__(self, state: SharedState, clock: Clock = steady) -> None:
        """`clock` tells seconds since the epoch, and must be the state's."""
        self._state = state
        self._unsure = Unsure(state)
        self._clock = clock
        self._prices = PriceList()
        self._estimates = OutputEstimates()
        self._meters: dict[str, tuple[Limit, Meter]] = {}
        self._owners: dict[tuple[str, str], list[Meter]] = {}
        self._heirs: dict[str, str] = {}
        """Keys that were rotated, and which took their places, limits included."""
        self._closed: frozenset[str] = frozenset()
        """Projects that refuse while nobody can say how much is used."""
        self._parties: dict[tuple[str, ...], Party] = {}

    def update(self, directory: Directory) -> None:
        """Take over limits and prices. What is in use stays in use; requests that run keep theirs."""
        self.prepare(directory)()

    def prepare(self, directory: Directory) -> Callable[[], object]:
        """What does as `update` does, at once: all work is done by then, in any thread.

        It is good until the next `update`, and gives what was in force: in any thread that may be let go of.
        """
        meters: dict[str, tuple[Limit, Meter]] = {}
        owners: defaultdict[tuple[str, str], list[Meter]] = defaultdict(list)
        amounts: list[tuple[Meter, int]] = []
        for limit in directory.limits:
            try:
                meter = self._meter(limit)
            except ValueError as error:
                log.error("limit_not_in_force", limit=limit.id, reason=str(error))  # noqa: TRY400 - no bug of ours
                continue
            meters[limit.id] = limit, meter
            owners[limit.owner_kind, limit.owner].append(meter)
            if meter.counter.limit != limit.amount:
                amounts.append((meter, limit.amount))
        prices = PriceList(directory.prices)
        closed = frozenset(p.id for p in directory.projects if p.when_unsure == "closed")

        def take() -> object:
            before = self._meters, self._owners
            for meter, amount in amounts:
                meter.counter.limit = amount
            self._meters, self._owners = meters, owners
            self._prices, self._heirs, self._closed = prices, directory.heirs, closed
            self._parties.clear()
            return before

        return take

    async def seed(self, spent: Spent) -> None:
        """Count what the ledger has of limits that do not know it yet: call it after each `update`, and each second.

        `spent` runs in a worker thread; what it raises is raised, and the next call asks again. Rows that end while
        it is asked count twice, those not yet in the ledger not at all.
        """
        unknown = await aside(_unknown, self._meters)
        if unknown:
            now = self._clock()
            new = [(limit, meter, meter.counter.since(now)) for limit, meter in unknown]
            told = await aside(_used, spent, new, now)
            for (_, meter, _), used in zip(new, told, strict=True):
                meter.counter.recall(used, self._clock())

    async def start(self) -> None:
        """Be ready to share; within seconds, whether or not the shared state can be reached."""
        await self._state.start()

    async def close(self) -> None:
        """Give back what is held for later."""
        await self._state.close()

    def read(self) -> SharedLimitsReading | None:
        """How it stands with the shared state; None where this gateway is alone."""
        up, unsure = self._state.up, self._unsure
        return None if up is None else SharedLimitsReading(up, unsure.allowed, unsure.refused)

    # --- the stage -------------------------------------------------------------------------------

    async def enter(self, journey: Journey) -> Held | None:
        """Hold what the request will likely use. Raises ApiError 413, 429 or 503 when that cannot be."""
        ask, caller = journey.ask, journey.caller
        party = self._party(caller, journey.pool.model)
        if not party.meters:
            return None
        now = self._clock()
        rates = self._prices.rates(journey.pool.model, TIERS[caller.tier], now)
        journey.rates = rates
        prompt = ask.prompt_tokens
        expected = self._estimates.expected(party.asker, ask.max_output, DEFAULT_OUTPUT)
        output = expected * ask.choices
        likely = running(rates, prompt, 0, output)
        found, answered = reserve(party.meters, likely, likely, now), True
        if isinstance(found, list):
            least = running(rates, prompt, 0, 1)
            found, answered = await self._ask_for_room(party, likely, least, now)
        journey.headers += party.headers(now)
        if isinstance(found, list):
            journey.trace.limits = kept_out(found)
            raise refused(found) if answered or party.trusted else unavailable()
        journey.trace.limits = let_in(found)
        return Held(
            self._state,
            self._unsure,
            self._clock,
            self._estimates,
            party,
            journey,
            reservation=found,
            rates=rates,
            prompt=prompt,
            output=output if found.whole else 0,
        )

    # --- what generates nothing --------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def passing(
        self, caller: Caller, model: str, headers: list[tuple[bytes, bytes]]
    ) -> AsyncIterator[None]:
        """Count a request that generates nothing as one, if it succeeds, and as one at a time meanwhile.

        `headers` of its answer get what is left. Raises ApiError 429 or 503 when there is no room for it.
        """
        party, now = self._party(caller, model), self._clock()
        one = Use(requests=1, concurrency=1)
        found, answered = reserve(party.meters, one, one, now), True
        if isinstance(found, list):
            found, answered = await self._ask_for_room(party, one, one, now)
        headers += party.headers(now)
        if isinstance(found, list):
            raise refused(found) if answered or party.trusted else unavailable()
        used = Use()
        try:
            yield
            used = Use(requests=1)
        finally:
            found.settle(used, self._clock())

    # --- in parts --------------------------------------------------------------------------------

    async def _ask_for_room(
        self, party: Party, likely: Use, least: Use, now: float
    ) -> tuple[Reservation | list[Refusal], bool]:
        """Hold what there is room for, asked for if that may help; whether anybody could say how much there is."""
        found = reserve(party.meters, likely, least, now)
        if not isinstance(found, list) or any(map(never, found)):
            return found, True
        for _ in range(ROUNDS):
            answered = await self._state.obtain(wants_of((r.meter, r.asked) for r in found))
            now = self._clock()
            found = reserve(party.meters, likely, least, now)
            if not isinstance(found, list):
                return found, True
            if not answered:
                break
            if self._state.short(wants_of((r.meter, r.asked) for r in found), now):
                return found, True
        else:
            return found, True
        wants = wants_of((r.meter, r.asked) for r in found)
        if self._unsure.decide(party, wants, now):
            return reserve(party.meters, likely, least, now), False
        return found, False

    def _meter(self, limit: Limit) -> Meter:
        """The limit's meter: the one that it has, of whatever amount, unless something else is to be counted.

        A key that is rotated is none: its limits go to another owner, and what is used of them stays.
        """
        if limit.id in self._meters:
            known, meter = self._meters[limit.id]
            if known is limit or known == msgspec.structs.replace(
                limit, amount=known.amount, owner=known.owner
            ):
                return meter
        counter = self._state.counter(limit)
        return Meter(limit.owner_kind, limit.unit, limit.window or "", limit.model, counter)

    def _party(self, caller: Caller, model: str) -> Party:
        name = (caller.key, caller.user, caller.project, caller.organisation, model)
        party = self._parties.get(name)
        if party is None:
            if len(self._parties) >= MOST_PARTIES:
                self._parties.clear()
            owners = (
                ("key", self._heir(caller.key)),
                ("user", caller.user),
                ("project", caller.project),
                ("organisation", caller.organisation),
            )
            meters = tuple(
                meter
                for owner in owners
                for meter in self._owners.get(owner, ())
                if meter.model in {None, model}
            )
            asker = (caller.key or caller.user or caller.project, model)
            party = Party(meters, caller.project not in self._closed, asker, Headers(meters))
            self._parties[name] = party
        return party

    def _heir(self, key: str) -> str:
        """The key that took this one's place at last: both are under its limits."""
        while key in self._heirs:
            key = self._heirs[key]
        return key


def _unknown(meters: Mapping[str, tuple[Limit, Meter]]) -> list[tuple[Limit, Meter]]:
    """Those that the ledger is still to be asked about. There may be thousands, so this is for a thread."""
    return [(limit, meter) for limit, meter in meters.values() if meter.counter.unknown]


def _used(
    spent: Spent, new: Sequence[tuple[Limit, Meter, tuple[float, ...]]], now: float
) -> list[list[tuple[float, int]]]:
    """What was used of each limit between each of its moments and the next, as of the next.

    It is asked for all that have the same moments at once: there may be thousands.
    """
    owners: defaultdict[tuple[OwnerKind, tuple[float, ...]], set[str]] = defaultdict(set)
    for limit, _, since in new:
        owners[limit.owner_kind, since].add(limit.owner)
    told = {
        (kind, since): [spent(kind, those, moment) for moment in since]
        for (kind, since), those in owners.items()
    }
    used = []
    for limit, meter, since in new:
        rows = (each.get(limit.owner, ()) for each in told[limit.owner_kind, since])
        sums = [sum(meter.of(_use(row)) for row in each if _counts(limit, row)) for each in rows]
        parts = [max(0, more - less) for more, less in pairwise([*sums, 0])]
        used.append(list(zip([*since[1:], now], parts, strict=True)))
    return used


def _counts(limit: Limit, row: ReportRow) -> bool:
    return limit.model is None or limit.model == row.model


def _use(row: ReportRow) -> Use:
    tokens = row.input_tokens + row.output_tokens
    return Use(row.requests, tokens, row.input_tokens, row.output_tokens, row.nano_dollars)
