"""Usage of every request that was let in: a row in the local journal from its beginning, in the store after its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from argosy.gateway.principal import TIERS
from argosy.gateway.request_context import Alone, Journey
from argosy.gateway.request_trace import LedgerLine
from argosy.policy import PriceList, Rates
from argosy.process import aside
from argosy.protocol import ApiError
from argosy.store import Directory, Slot, Spool, SpoolFullError, UsageRow

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

SETTLE_EACH_S = 0.5
SETTLE_AT_LEAST_EACH_S = 15.0
"""While the store takes nothing, it is tried ever more rarely, down to this."""
RETRY_AFTER_S = 5.0

Store = Callable[[list[UsageRow]], object]
"""Keeps rows; one that it has already, by its request, it passes over. Runs in a worker thread."""


class Ledger:
    """The stage that counts what was delivered, and what it costs."""

    def __init__(self, spool: Spool, clock: Callable[[], float] = time.time) -> None:
        """`clock` tells seconds since the epoch."""
        self._spool = spool
        self._clock = clock
        self._prices = PriceList()

    def update(self, directory: Directory) -> None:
        """Take over prices; requests that run keep those that they began with."""
        self.prepare(directory)()

    def prepare(self, directory: Directory) -> Callable[[], None]:
        """What does as `update` does, at once: all work is done by then, in any thread."""
        prices = PriceList(directory.prices)

        def take() -> None:
            self._prices = prices

        return take

    async def enter(self, journey: Journey) -> Entry:
        """Begin its row. Raises ApiError 503 when there is no room for one more."""
        caller, model = journey.caller, journey.pool.model
        rates = journey.rates
        if rates is None:
            rates = self._prices.rates(model, TIERS[caller.tier], self._clock())
        row = UsageRow(
            request=journey.id,
            organisation=caller.organisation,
            project=caller.project,
            key=caller.key,
            user=caller.user,
            model=model,
            asked=journey.ask.model,
            route=journey.route,
            started_at=journey.started_at,
            ended_at=journey.started_at,
            status="interrupted",
        )
        try:
            slot = self._spool.begin(row, rates)
        except SpoolFullError:
            message = (
                "Usage cannot be recorded at the moment, so nothing is answered. Try again later."
            )
            raise ApiError(503, "ledger_full", message, retry_after_s=RETRY_AFTER_S) from None
        return Entry(journey, slot, rates, self._clock)


class Entry(msgspec.Struct, eq=False):
    """A `Visit`: the row of one request."""

    journey: Journey
    slot: Slot
    rates: Rates
    clock: Callable[[], float]

    def alone(self) -> Alone:
        """As far as it likes: its tokens are counted in the slot."""
        return Alone(counter=self.slot.counter)

    def counted(self, times: Sequence[float]) -> None:  # noqa: ARG002 - see `Visit`
        """Count what was delivered so far: nothing of an answer that is sent whole, should this gateway die before."""
        if self.journey.ask.stream:
            told = self.journey.delivered
            self.slot.count(told.prompt_tokens, told.cached_tokens, told.output_tokens)

    def leave(self) -> None:
        """End the row."""
        journey, slot, rates, told = self.journey, self.slot, self.rates, self.journey.delivered
        counts = told.prompt_tokens, told.cached_tokens, told.output_tokens
        slot.count(*counts)
        slot.end(journey.status, journey.replica, self.clock())
        journey.nano_dollars = rates.cost(*counts)
        journey.trace.ledger = LedgerLine(*counts, journey.nano_dollars, rates)


async def settle_forever(spool: Spool, store: Store, leaving: asyncio.Event) -> None:
    """Bring what has ended to the store, each half second until `leaving` is set, and once more after that."""
    pause, failing, last = SETTLE_EACH_S, False, False
    while not last:
        last = leaving.is_set()
        try:
            await aside(_settle, spool, store)
        except Exception as error:  # noqa: BLE001 - whatever the store has, the rows are kept
            if not failing:
                log.warning("usage_not_settled", waiting=spool.waiting, reason=str(error))
            failing, pause = True, min(pause * 2, SETTLE_AT_LEAST_EACH_S)
        else:
            if failing:
                log.info("usage_settled_again")
            failing, pause = False, SETTLE_EACH_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if last else pause):
                await leaving.wait()


def _settle(spool: Spool, store: Store) -> None:
    """Everything that has ended; what other gateways of the folder left when they died is next."""
    spool.drain(store)
    spool.recover()
