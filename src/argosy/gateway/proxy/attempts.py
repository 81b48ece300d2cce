"""A replica's turn at a request: asked until its answer begins, and against another while it is silent (a hedge)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime

import msgspec

from argosy.gateway.backends import Leg, Opening
from argosy.gateway.pool import Picked, Replica
from argosy.gateway.request_context import Journey
from argosy.gateway.request_trace import Try
from argosy.gateway.upstream import Attempt, UpstreamError
from argosy.policy import Outcome, classify


class Whole(msgspec.Struct, frozen=True):
    """An answer that came in one piece."""

    status: int
    content: bytes
    kind: bytes
    """Its content type."""


class RefusedError(Exception):
    """A replica answered, with what is no answer to the request."""

    def __init__(self, status: int, reason: str, said: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.said = said
        """What it said of that, for those who run it: it may be of our account there."""
        self.outcome = classify(status)


Begun = Whole | Leg
"""How an answer begins: it is whole at once, or its stream is there."""


class Turn(msgspec.Struct, frozen=True):
    """One replica's."""

    picked: Picked
    tried: Try
    attempt: Attempt
    clock: Callable[[], float]
    trusted: bool
    """Its breaker was closed when it got the request."""

    @property
    def replica(self) -> Replica:
        """Whose it is."""
        return self.picked.replica

    def end(self, outcome: Outcome | None, reason: str) -> None:
        """It is over; None: for a reason that says nothing about the replica. Call it once."""
        attempt, tried = self.attempt, self.tried
        if outcome is not Outcome.SUCCESS:  # else its answer has come to its end
            attempt.abandon("nobody waits for it")
        tried.ended, tried.reason = self.clock(), reason
        tried.outcome = "ended" if outcome is None else outcome.value
        if outcome is Outcome.FAILURE and not attempt.sent:
            self.replica.lost(tried.ended)
        if tried.first is None:
            self.replica.computed(self.picked.uncached, tried.at)
        self.replica.ended(outcome, tried.ended, _retry_after(attempt))


class Race:
    """One turn, or two until one of them has begun to answer: then `turn` is that one, and the other has ended."""

    def __init__(self, journey: Journey, clock: Callable[[], float]) -> None:
        """For the replica that the request was placed on."""
        picked, tried = journey.picked, journey.current
        assert picked is not None  # noqa: S101 - it was placed
        assert tried is not None  # noqa: S101 - it was placed
        self.hedged = False
        self._journey = journey
        self._clock = clock
        self.turn = self._turn(picked, tried)

    async def run(
        self,
        ask: Callable[[Turn], Awaitable[Begun]],
        after_s: float,
        within_s: float,
        second: Callable[[], Picked | None],
    ) -> Begun:
        """How the answer begins. If it has not after `after_s`, `second` may name one more replica to ask.

        Each has `within_s`. Raises UpstreamError or RefusedError once no turn is left.
        """
        running = {asyncio.create_task(_try(ask, self.turn, within_s)): self.turn}
        try:
            done, _ = await asyncio.wait(running, timeout=after_s)
            picked = None if done else second()
            if picked is not None:
                hedge = self._hedge(picked)
                running[asyncio.create_task(_try(ask, hedge, within_s))] = hedge
            while True:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    begun, turn = task.result(), running.pop(task)
                    if not isinstance(begun, Exception):
                        self._goes_on_with(turn)
                        return begun
                    if not running:
                        raise begun
                    turn.end(begun.outcome, str(begun))
                    self._journey.tried.add(turn.replica.name)
                    if isinstance(begun, UpstreamError):
                        self._journey.losses += turn.attempt.sent
                    self._goes_on_with(*running.values())
        finally:
            for task, turn in running.items():
                task.cancel()
                if turn is not self.turn:
                    turn.end(None, "no longer needed")

    def _hedge(self, picked: Picked) -> Turn:
        self.hedged = True
        tried = self._journey.asks(picked, self._clock(), hedge=True)
        return self._turn(picked, tried)

    def _turn(self, picked: Picked, tried: Try) -> Turn:
        clock = self._clock
        return Turn(picked, tried, Attempt(clock), clock, trusted=picked.replica.breaker.closed)

    def _goes_on_with(self, turn: Turn) -> None:
        self.turn = turn
        self._journey.answered_by(turn.picked, turn.tried)


async def _try(
    ask: Callable[[Turn], Awaitable[Begun]], turn: Turn, within_s: float
) -> Begun | UpstreamError | RefusedError:
    """Ask, and wait until the answer says something: some servers send a stream's head and comments before."""
    try:
        async with asyncio.timeout(within_s):
            begun = await ask(turn)
            if not isinstance(begun, Whole):
                await turn.attempt.first(Opening().feed)
    except TimeoutError:
        return UpstreamError("too late")
    except (UpstreamError, RefusedError) as error:
        return error
    return begun


def _retry_after(attempt: Attempt) -> float | None:
    """In how many seconds the replica said that it may be asked again: as a number, or a date (RFC 9110, 10.2.3)."""
    told = attempt.headers.get(b"retry-after", b"").decode("latin-1")
    if not told:
        return None
    try:
        seconds = float(told) if told[:1].isdigit() else _date(told) - time.time()
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)


def _date(told: str) -> float:
    """Seconds since 1970. Raises ValueError or OverflowError when it is no date."""
    return parsedate_to_datetime(told).timestamp()
