"""One answer from one replica after another, until it is whole or has been tried enough."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from argosy.gateway.backends import (
    Carrier,
    Dialect,
    Leg,
    is_object,
    message_of,
    status_meant,
    status_within,
    whole_request,
)
from argosy.gateway.config import Timeouts
from argosy.gateway.pool import Picked, Replica
from argosy.gateway.proxy.attempts import Begun, Race, RefusedError, Turn, Whole
from argosy.gateway.proxy.dispatcher import RETRY_AFTER_S, Dispatcher, full, unavailable
from argosy.gateway.proxy.response_relay import ClientStream
from argosy.gateway.proxy.response_writers import Out
from argosy.gateway.proxy.upstream_headers import model_digest, request_headers
from argosy.gateway.request_context import REFUSED_BY_REPLICA, TOO_LARGE, Journey
from argosy.gateway.request_fields import Ask
from argosy.gateway.upstream import Attempt, TooLargeError, UpstreamError
from argosy.http_server import Deadlines
from argosy.policy import Outcome, backoff_s, classify
from argosy.protocol import ApiError

CREATED = 201
"""What some frameworks answer every POST with."""
MOST_OBJECTS = 1 << 21
"""And lists, in a whole answer: more take long to read, and log-probabilities of what is kept are fewer."""
OTHER_MODEL = 409
"""What a replica of ours answers that has another model than the one that began the answer."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


@dataclass(frozen=True, slots=True)
class Ways:
    """What goes for all requests."""

    timeouts: Timeouts
    attempts: int
    """Failures that living replicas answer with, or replicas lost without getting on, before a request is given up."""
    clock: Callable[[], float]
    heads: Deadlines[Attempt]
    """Attempts whose answer is to begin."""
    wholes: Deadlines[Attempt]
    """Attempts whose answer is to come in one piece."""


class Relay:
    """One request's."""

    def __init__(
        self,
        ways: Ways,
        dispatcher: Dispatcher,
        journey: Journey,
        carrier: Carrier,
        stream: ClientStream,
        out: Out,
    ) -> None:
        self._ways = ways
        self._dispatcher = dispatcher
        self._journey = journey
        self._carrier = carrier
        self._stream = stream
        self._out = out
        self._owes = False
        """Its next try has to wait until the retry budget allows it."""

    async def run(self) -> None:
        """Answer it, but for the end of what `out` has. Raises ApiError when that cannot be."""
        journey, suspects = self._journey, self._journey.pool.suspects
        if len(suspects):
            wait_s = suspects.wait_s(journey.digest, self._ways.clock())
            if wait_s > 0:
                raise _suspected(journey, wait_s)
        while not await self._go_on():
            pass
        if len(suspects):
            suspects.cleared(journey.digest)

    async def _go_on(self) -> bool:
        """Let one replica give what it can; whether the answer is whole."""
        await self._next()
        journey, stream, carrier = self._journey, self._stream, self._carrier
        before = journey.delivered.output_tokens
        race = Race(journey, self._ways.clock)
        outcome: Outcome | None = None
        failure: UpstreamError | RefusedError | None = None
        try:
            whole = await self._attempt(race)
            outcome = Outcome.SUCCESS
        except UnfitError:
            self._passed_over(race.turn.replica)
            return False
        except (UpstreamError, RefusedError) as error:
            if stream.stopped is not None:
                return True
            # Its frames have what was answered, and this one would have it: only the collector would find both.
            failure, outcome = error.with_traceback(None), error.outcome
            stream.let_go()
            won = journey.delivered.output_tokens - before
            if won > 0:
                journey.got_on(won)
        finally:
            race.turn.end(outcome, "" if failure is None else str(failure))
        if failure is not None:
            replica, model = race.turn.replica.name, journey.pool.model
            said = failure.said if isinstance(failure, RefusedError) else ""
            more = {"said": said} if said else {}
            log.warning("attempt_failed", replica=replica, model=model, reason=str(failure), **more)
            lost = isinstance(failure, UpstreamError)
            if lost and self._ended():
                return True
            self._failed(race.turn, failure)
            if not carrier.can_go_on:
                raise _cut_off() if lost else _upstream_failed(journey, self._ways.clock())
            return False
        if whole is not None:
            await self._pass_on(whole, race.turn)
        return True

    async def _attempt(self, race: Race) -> Whole | None:
        """Ask one replica, or two. The whole answer; None when it was a stream, which has been passed on.

        Raises UpstreamError when there was none, RefusedError when it is of no use, UnfitError when it cannot go on.
        """
        journey, stream, carrier = self._journey, self._stream, self._carrier
        hedging = journey.pool.hedging
        if (
            hedging is None
            or _has_begun(journey)
            or not _flows(journey.ask, race.turn.replica.dialect)
        ):
            begun = await self._ask(race.turn)
        else:
            within_s = self._ways.timeouts.first_token_s
            begun = await race.run(self._ask, hedging.after_s, within_s, self._second)
        if isinstance(begun, Whole):
            return begun
        turn = race.turn
        await self._out.begin()
        leg = begun
        if race.hedged:  # the carrier goes by the last leg that it gave
            leg = _leg(carrier, turn.replica) or begun
        if not journey.delivered.output_tokens:
            journey.delivered.digest = model_digest(turn.attempt.headers)
        stream.feed_from(turn.attempt, turn.replica, leg.reader)
        try:
            await turn.attempt.end
        finally:
            stream.slow_down()
        stream.finish()
        return None

    async def _ask(self, turn: Turn) -> Begun:
        """Ask one replica, until it answers.

        Raises UpstreamError, RefusedError when that is of no use, UnfitError when it cannot go on.
        """
        journey, replica, attempt = self._journey, turn.replica, turn.attempt
        ask, path, dialect = journey.ask, journey.api.path, replica.dialect
        flows = _flows(ask, dialect)
        leg = _leg(self._carrier, replica) if flows else None
        if flows and leg is None:
            raise UnfitError
        if journey.delivered.output_tokens and leg is None:
            self._stream.start_over()  # what does not flow is sent whole
            turn.tried.told = 0
        outgoing = leg.outgoing if leg else whole_request(ask, path, dialect, replica.model)
        if dialect.urgency:
            outgoing = outgoing.with_priority(journey.priority(dialect))
        headers = request_headers(journey, replica, journaled=flows)
        request = replica.upstream.request(b"POST", outgoing.path, outgoing.body, headers)
        turn.tried.sent = self._ways.clock()
        deadlines = self._ways.heads if flows else self._ways.wholes
        deadlines.add(attempt)
        try:
            await attempt.send(replica.upstream, request)
            status = await attempt.head
            if status == CREATED:
                status = 200
            outcome = classify(status)
            if outcome is Outcome.SUCCESS:
                replica.answers()
            if leg is not None and status == 200:
                return leg
            if status == OTHER_MODEL and journey.delivered.digest:
                raise UnfitError
            content = await attempt.whole()
        finally:
            deadlines.remove(attempt)
        if content.count(b"{") + content.count(b"[") > MOST_OBJECTS:
            raise RefusedError(502, f"what came has more than {MOST_OBJECTS} objects and lists")
        came, status = status, status_meant(status, content, dialect.misread)
        outcome = classify(status)
        if outcome is not Outcome.SUCCESS or _has_begun(journey):
            raise RefusedError(status, f"status {came}", message_of(content))
        if status == 200 and not is_object(content):
            raise RefusedError(502, "what came is no JSON, and so no answer")
        if status == 200 and not dialect.journal:
            status = status_within(content, dialect.broken_off)
            if classify(status) is not Outcome.SUCCESS:
                raise UpstreamError("it broke the answer off")
        return Whole(status, content, attempt.kind)

    async def _pass_on(self, whole: Whole, turn: Turn) -> None:
        """Give the client a replica's whole answer, a refusal too that is the request's own fault."""
        journey = self._journey
        if whole.status == 200:
            self._stream.count_whole(whole.content, turn.attempt.last, turn.replica.dialect)
            journey.status = journey.ending
        else:
            message = f"The replica refused the request with status {whole.status}."
            error = ApiError(whole.status, REFUSED_BY_REPLICA, message)
            journey.fails(error)
            journey.exchange.failure = error.code
        await journey.exchange.answer(whole.status, whole.content, whole.kind)

    # --- replicas --------------------------------------------------------------------------------

    async def _next(self) -> None:
        """Wait for the replica to try next. Raises ApiError when the request was tried enough."""
        journey = self._journey
        if journey.failing_since is None:
            await self._dispatcher.place(journey)
            return
        until = journey.failing_since + self._ways.timeouts.recovery_s
        while not await self._moved():
            now = self._ways.clock()
            late = now + journey.pool.full_s(now) > until
            if late or not (_was_reached(journey) or journey.pool.worth_waiting(now)):
                raise _upstream_failed(journey, now)
            journey.tried.clear()

    async def _moved(self) -> bool:
        """Whether it got another replica within some moments."""
        journey = self._journey
        now = self._ways.clock()
        within_s = backoff_s(journey.failures, random.random())  # noqa: S311 - jitter
        if self._owes and not (
            journey.pool.has_well(journey.tier, now) or journey.pool.retries.take(now)
        ):
            await asyncio.sleep(within_s)
            return False
        self._owes = False
        return await self._dispatcher.move(journey, within_s)

    def _passed_over(self, replica: Replica) -> None:
        """It cannot go on: perhaps another can. Raises ApiError 502 when none is left."""
        journey = self._journey
        if journey.delivered.digest and self._out.retract():
            self._stream.start_over()  # the client has nothing of it yet, so any model may answer
            return
        journey.unfit.add(replica.name)
        if all(one.name in journey.unfit for one in journey.pool.alive()):
            raise _cut_off()

    def _second(self) -> Picked | None:
        """Another replica, beside the one that is silent, if there is room to spare."""
        journey = self._journey
        replicas = journey.pool.replicas.values()
        whole = {replica.name for replica in replicas if not _flows(journey.ask, replica.dialect)}
        others = {journey.replica} | journey.tried | whole
        return self._dispatcher.hedge(journey, others)

    def _failed(self, turn: Turn, failure: UpstreamError | RefusedError) -> None:
        """Note that a replica failed the request. Raises ApiError when it was tried enough, or is itself at fault.

        What was carried on from a replica that died has to go somewhere: the time that recovery may take bounds it,
        and how many may be lost with it without getting on. What a full one refused waits as long for room. Of what
        has nothing yet the rest draws on the retry budget, since that is what overloaded pools do: what a living
        replica failed needs it at once, what one lost that had failed before waits for it, or for one that is well.
        """
        journey, now, replica = self._journey, self._ways.clock(), turn.replica
        journey.tried.add(replica.name)
        journey.failures += 1
        journey.failing_since = journey.failing_since or now
        begun = journey.delivered.output_tokens > 0
        if failure.outcome is Outcome.SUCCESS and isinstance(failure, RefusedError) and not begun:
            message = f"The replica refused the request: {str(failure).rstrip('.')}."
            raise ApiError(failure.status, REFUSED_BY_REPLICA, message)
        free = begun or failure.outcome is Outcome.BACKPRESSURE
        if isinstance(failure, UpstreamError):
            journey.losses += turn.attempt.sent
            if isinstance(failure, TooLargeError) and journey.losses > 1:
                raise _too_large(failure)
            self._owes = not (free or turn.trusted) and turn.attempt.sent
            free = True
        elif failure.outcome is Outcome.FAILURE:
            journey.refusals += 1
        suspects, digest = journey.pool.suspects, journey.digest
        suspected = suspects.knows(digest, now) and not begun
        if journey.losses >= (1 if suspected else max(2, self._ways.attempts)):
            suspects.given_up(digest, now)
            raise _suspected(journey, suspects.wait_s(digest, now))
        tried_enough = max(journey.losses, journey.refusals) >= self._ways.attempts
        if tried_enough or not (free or journey.pool.retries.take(now)):
            raise _upstream_failed(journey, now)

    def _ended(self) -> bool:
        """A replica was lost: had it told all but the end?"""
        ending = self._stream.ending()
        if ending is not None:
            self._stream.end_with(ending)
        return ending is not None


class UnfitError(Exception):
    """A replica cannot go on where the answer stopped."""


def _flows(ask: Ask, dialect: Dialect) -> bool:
    """Whether the replica's answer is a stream, which the client gets as one or whole."""
    return ask.stream or (dialect.journal and ask.gathers)


def _leg(carrier: Carrier, replica: Replica) -> Leg | None:
    return carrier.leg(replica.dialect, replica.model, replica.max_model_len or 0)


def _has_begun(journey: Journey) -> bool:
    """Whether a part of the answer is there."""
    return journey.exchange.status is not None or journey.delivered.output_tokens > 0


def _cut_off() -> ApiError:
    message = "The replica failed in the middle of the answer, and it cannot be carried on."
    return ApiError(502, "upstream_failed", message)


def _too_large(failure: TooLargeError) -> ApiError:
    message = f"The answer cannot be sent: {failure}. Ask for less of it, or have it streamed."
    return ApiError(413, TOO_LARGE, message)


def _suspected(journey: Journey, wait_s: float) -> ApiError:
    message = (
        f"Replicas for {journey.pool.model!r} were lost with this request. "
        f"Change it, or try again in {math.ceil(wait_s)} s."
    )
    return ApiError(502, "upstream_failed", message, retry_after_s=wait_s)


def _was_reached(journey: Journey) -> bool:
    """Whether a replica got the request, as far as it counts: see `Journey.got_on`."""
    return bool(journey.refusals or journey.losses or journey.delivered.output_tokens)


def _upstream_failed(journey: Journey, now: float) -> ApiError:
    model = journey.pool.model
    tried = journey.current
    refused = tried is not None and tried.outcome == Outcome.BACKPRESSURE.value
    if refused and journey.pool.serves():
        return full(journey.pool, journey.pool.full_s(now))
    if not _was_reached(journey):
        return unavailable(journey.pool, now)
    message = f"No replica could answer for {model!r}. Try again shortly."
    return ApiError(502, "upstream_failed", message, retry_after_s=RETRY_AFTER_S)
