"""Chat and completions through the gateway: read, let in, tried until a replica answers, passed on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from argosy.gateway.answer import Gathered, Out, Streamed
from argosy.gateway.ask import Ask, read
from argosy.gateway.attempt import Attempt
from argosy.gateway.caller import Caller
from argosy.gateway.config import GatewayConfig
from argosy.gateway.dialects import Carrier, Leg, whole_request
from argosy.gateway.dispatch import RETRY_AFTER_S, Dispatcher, QueueLimits
from argosy.gateway.explain import Trace
from argosy.gateway.fast_path import FastPath
from argosy.gateway.headers import request_headers
from argosy.gateway.journey import (
    CHAT,
    COMPLETION,
    Api,
    Journey,
    Stage,
    Visit,
    enter,
    leave,
)
from argosy.gateway.models import Models
from argosy.gateway.replicas import Picked, Replica
from argosy.gateway.stream import ClientStream
from argosy.gateway.turn import Begun, Race, RefusedError, Turn, Whole
from argosy.gateway.upstream import UpstreamError
from argosy.policy import Outcome, backoff_s, classify
from argosy.protocol import ApiError, event
from argosy.web import JSON, Deadlines, DisconnectedError, Exchange, SlowReaderError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


@dataclass(frozen=True, slots=True)
class _StreamLimits:
    first_token_s: float
    between_tokens_s: float
    keep_alive_s: float
    slow_reader_s: float


class Serving:
    """The handlers of the two generation APIs; every request passes `stages`."""

    def __init__(
        self,
        models: Models,
        config: GatewayConfig,
        stages: Sequence[Stage],
        fast_path: FastPath | None,
    ) -> None:
        self._models = models
        self._config = config
        self._stages = stages
        self._fast_path = fast_path
        self._clock = time.monotonic
        self._limits = _StreamLimits(
            config.timeouts.first_token_s,
            config.timeouts.between_tokens_s,
            config.keep_alive_s,
            config.slow_reader_timeout_s,
        )
        queue = QueueLimits(config.queue.requests, config.queue.bytes, config.queue.wait_s)
        self._dispatchers = {
            pool.model: Dispatcher(pool, queue, self._clock) for pool in models.pools
        }
        self._streams: set[ClientStream] = set()
        self._heads = Deadlines(config.timeouts.first_token_s, _too_late)
        """Attempts whose answer is to begin."""
        self._wholes = Deadlines(config.timeouts.total_s, _too_late)
        """Attempts whose answer is to come in one piece."""

    @property
    def queued(self) -> Mapping[str, int]:
        """Requests that wait for a replica, by model."""
        return {model: len(dispatcher) for model, dispatcher in self._dispatchers.items()}

    @property
    def on_fast_path(self) -> int:
        """Streams that native code passes on just now."""
        return 0 if self._fast_path is None else len(self._fast_path)

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/chat/completions`."""
        await self._answer(exchange, caller, CHAT)

    async def completion(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/completions`."""
        await self._answer(exchange, caller, COMPLETION)

    async def tend(self) -> None:
        """Look after running streams, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(1.0)
            now = self._clock()
            for stream in tuple(self._streams):
                stream.tend(now, self._limits)

    # --- one request ---------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange, caller: Caller, api: Api) -> None:
        ask = read(await exchange.body(), api.prompt_field, caller.domain)
        journey = self._journey(exchange, ask, api, caller)
        visits: list[Visit] = []
        out: Out = Streamed(exchange) if ask.stream else Gathered(journey)
        try:
            await self._pass(journey, visits, out)
        except (DisconnectedError, SlowReaderError):
            journey.status = "cancelled"
            raise
        except ApiError as error:
            journey.error = error
            if exchange.status is not None and not exchange.complete:
                exchange.push(event(error.body(exchange.request_id)))
                await exchange.end_stream()
            raise
        finally:
            if journey.status == "failed" and out.retract():
                journey.delivered.forget()  # nothing reached the client, so nothing is billed
            leave(visits, journey)

    def _journey(self, exchange: Exchange, ask: Ask, api: Api, caller: Caller) -> Journey:
        """Raises ApiError when nothing here serves the model, to this caller, or ever could."""
        pool = self._models.pool(ask.model, caller)
        most = pool.max_model_len
        if most is not None and ask.least_tokens > most:
            message = f"The prompt is longer than the {most} tokens that {ask.model!r} can take."
            raise ApiError(413, "context_length_exceeded", message, param=api.prompt_field)
        answer_id = f"{api.id_prefix}-{random.getrandbits(128):032x}"
        journey = Journey(
            exchange,
            ask,
            api,
            pool,
            f"{answer_id} {int(time.time())}".encode(),
            caller,
            headers=exchange.extra,
            trace=Trace(arrived=exchange.arrived, read=self._clock()),
        )
        pool.asked(journey.trace.read)
        return journey

    async def _pass(self, journey: Journey, visits: list[Visit], out: Out) -> None:
        """Let the request in and answer it, unless the client goes away."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        dispatcher = self._dispatchers[journey.pool.model]
        carrier = Carrier(journey.ask, journey.api.path, journey.delivered)
        stream = ClientStream(
            journey,
            out,
            carrier,
            visits=visits,
            charge=partial(dispatcher.charge, journey),
            leave=task.cancel,
            fast_path=self._fast_path,
        )
        journey.exchange.watch(stream)
        self._streams.add(stream)
        try:
            await enter(self._stages, visits, journey)
            journey.trace.admitted = self._clock()
            while not await self._answer_from(journey, stream, carrier, out):
                pass
        except asyncio.CancelledError:
            if not stream.gone:
                raise
            task.uncancel()
            raise DisconnectedError from None
        finally:
            self._streams.discard(stream)
            stream.settle()
            dispatcher.ended(journey)
            journey.exchange.watch(None)
        if journey.exchange.complete:
            return  # passed on as it came
        await out.end()
        journey.status = "completed" if stream.stopped is None else "stopped"

    async def _answer_from(
        self, journey: Journey, stream: ClientStream, carrier: Carrier, out: Out
    ) -> bool:
        """Let one replica give what it can; whether the answer is whole."""
        await self._next(journey)
        before = journey.delivered.output_tokens
        race, reason = Race(journey, self._clock), ""
        outcome: Outcome | None = None
        answered: Outcome | None = None
        try:
            whole = await self._attempt(journey, race, stream, carrier, out)
            outcome = Outcome.SUCCESS
        except UnfitError:
            return self._passed_over(journey, race.turn.replica)
        except RefusedError as error:
            outcome = answered = error.outcome
            reason = str(error)
        except UpstreamError as error:
            if stream.stopped is not None:
                return True
            outcome, reason = Outcome.FAILURE, str(error)
            stream.let_go()
            if journey.delivered.output_tokens > before:
                journey.got_on()
        finally:
            race.turn.end(outcome, reason)
        if reason:
            self._failed(journey, race.turn.replica, reason, answered)
            if answered is None:
                return _ended(stream, carrier)
            return False
        if whole is not None:
            await self._pass_on(journey, stream, whole)
        return True

    async def _attempt(
        self, journey: Journey, race: Race, stream: ClientStream, carrier: Carrier, out: Out
    ) -> Whole | None:
        """Ask one replica, or two. The whole answer; None when it was a stream, which has been passed on.

        Raises UpstreamError when there was none, RefusedError when it is of no use, UnfitError when it cannot go on.
        """
        hedging = journey.pool.hedging
        if hedging is None or _has_begun(journey) or not _flows(journey.ask, race.turn.replica):
            begun = await self._ask(journey, carrier, stream, race.turn)
        else:
            ask = partial(self._ask, journey, carrier, stream)
            second = partial(self._second, journey)
            within_s = self._config.timeouts.first_token_s
            begun = await race.run(ask, hedging.after_s, within_s, second)
        if isinstance(begun, Whole):
            return begun
        turn = race.turn
        await out.begin()
        leg = begun
        if race.hedged:  # the carrier goes by the last leg that it gave
            leg = _leg(carrier, turn.replica) or begun
        stream.feed_from(turn.attempt, turn.replica, leg.reader)
        try:
            await turn.attempt.end
        finally:
            stream.slow_down()
        stream.finish()
        return None

    async def _ask(
        self, journey: Journey, carrier: Carrier, stream: ClientStream, turn: Turn
    ) -> Begun:
        """Ask one replica, until it answers.

        Raises UpstreamError, RefusedError when that is of no use, UnfitError when it cannot go on.
        """
        ask, replica, attempt, path = journey.ask, turn.replica, turn.attempt, journey.api.path
        dialect, flows = replica.dialect, _flows(ask, replica)
        leg = _leg(carrier, replica) if flows else None
        if flows and leg is None:
            raise UnfitError
        if journey.delivered.output_tokens and leg is None:
            _start_over(stream)
        outgoing = leg.outgoing if leg else whole_request(ask, path, dialect, replica.model)
        headers = request_headers(journey, replica, journaled=flows)
        request = replica.upstream.request(b"POST", outgoing.path, outgoing.body, headers)
        turn.tried.sent = self._clock()
        deadlines = self._heads if flows else self._wholes
        deadlines.add(attempt)
        try:
            await attempt.send(replica.upstream, request)
            status = await attempt.head
            if leg is not None and status == 200:
                return leg
            content = await attempt.whole()
        finally:
            deadlines.remove(attempt)
        if classify(status) is not Outcome.SUCCESS or _has_begun(journey):
            raise RefusedError(status)
        return Whole(status, content, attempt.headers.get(b"content-type", JSON))

    async def _pass_on(self, journey: Journey, stream: ClientStream, whole: Whole) -> None:
        """Give the client a replica's whole answer, a refusal too that is the request's own fault."""
        if whole.status == 200:
            stream.count_whole(whole.content, self._clock())
            journey.status = "completed"
        else:
            message = f"The replica refused the request with status {whole.status}."
            journey.error = ApiError(whole.status, "refused_by_replica", message)
        await journey.exchange.answer(whole.status, whole.content, whole.kind)

    # --- replicas --------------------------------------------------------------------------------

    async def _next(self, journey: Journey) -> None:
        """Wait for the replica to try next. Raises ApiError when the request was tried enough."""
        pool = journey.pool
        if journey.failing_since is None:
            await self._dispatchers[pool.model].place(journey)
            return
        while True:  # what was placed once goes before all that wait
            now = self._clock()
            left_out = journey.tried | journey.unfit
            picked = pool.pick(journey.ask, journey.caller.domain, left_out, now)
            if picked is not None:
                journey.goes_to(picked, now)
                return
            if now - journey.failing_since > self._config.timeouts.recovery_s:
                raise _upstream_failed(journey)
            journey.tried.clear()
            await asyncio.sleep(backoff_s(journey.failures, random.random()))  # noqa: S311 - jitter

    def _passed_over(self, journey: Journey, replica: Replica) -> bool:
        """It cannot go on: perhaps another can. Raises ApiError 502 when none is left."""
        journey.unfit.add(replica.name)
        if all(one.name in journey.unfit for one in journey.pool.alive()):
            raise _cut_off()
        return False

    def _second(self, journey: Journey) -> Picked | None:
        """Another replica, beside the one that is silent, if there is room to spare."""
        replicas = journey.pool.replicas.values()
        whole = {replica.name for replica in replicas if not _flows(journey.ask, replica)}
        others = {journey.route} | journey.tried | whole
        return self._dispatchers[journey.pool.model].hedge(journey, others)

    def _failed(
        self, journey: Journey, replica: Replica, why: str, answered: Outcome | None
    ) -> None:
        """Note that a replica failed the request. Raises ApiError when it was tried enough.

        What was carried on from a replica that died has to go somewhere: only the time that recovery may
        take bounds it. A request that has nothing yet, and that a living replica refused, draws on the
        retry budget.
        """
        now = self._clock()
        journey.tried.add(replica.name)
        journey.failures += 1
        journey.failing_since = journey.failing_since or now
        log.warning("attempt_failed", replica=replica.name, model=journey.pool.model, reason=why)
        if answered is None:
            return
        if answered is Outcome.FAILURE:
            journey.refusals += 1
        begun = journey.delivered.output_tokens > 0
        if journey.refusals >= self._config.attempts or not (
            begun or journey.pool.retries.take(now)
        ):
            raise _upstream_failed(journey)


class UnfitError(Exception):
    """A replica cannot go on where the answer stopped."""


def _too_late(attempt: Attempt) -> None:
    attempt.abandon("too late")


def _flows(ask: Ask, replica: Replica) -> bool:
    """Whether the replica's answer is a stream, which the client gets as one or whole."""
    return ask.stream or (replica.dialect.journal and ask.gathers)


def _leg(carrier: Carrier, replica: Replica) -> Leg | None:
    return carrier.leg(replica.dialect, replica.model, replica.max_model_len or 0)


def _has_begun(journey: Journey) -> bool:
    """Whether a part of the answer is there."""
    return journey.exchange.status is not None or journey.delivered.output_tokens > 0


def _ended(stream: ClientStream, carrier: Carrier) -> bool:
    """A replica failed: had it told all but the end? Raises ApiError 502 when nobody could go on."""
    ending = carrier.ending()
    if ending is not None:
        stream.end_with(ending)
        return True
    if not carrier.can_go_on:
        raise _cut_off()
    return False


def _start_over(stream: ClientStream) -> None:
    """Forget what the replica gave. Raises ApiError 502 when the client has it already."""
    if not stream.start_over():
        raise _cut_off()


def _cut_off() -> ApiError:
    message = "The replica failed in the middle of the answer, and it cannot be carried on."
    return ApiError(502, "upstream_failed", message)


def _upstream_failed(journey: Journey) -> ApiError:
    model = journey.pool.model
    tried = journey.current
    if tried is not None and tried.outcome == Outcome.BACKPRESSURE.value:
        message = f"The replicas for {model!r} are full. Try again shortly."
        return ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)
    message = f"No replica could answer for {model!r}. Try again shortly."
    return ApiError(502, "upstream_failed", message, retry_after_s=RETRY_AFTER_S)
