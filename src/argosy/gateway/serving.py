"""Chat and completions through the gateway: read, routed, tried until a replica answers, passed on."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from argosy.gateway.ask import read
from argosy.gateway.attempt import Attempt
from argosy.gateway.caller import ANYONE
from argosy.gateway.config import GatewayConfig
from argosy.gateway.dialects import Carrier, Outgoing, whole_request
from argosy.gateway.dispatch import RETRY_AFTER_S, Dispatcher, QueueLimits
from argosy.gateway.journey import CHAT, COMPLETION, Api, Journey
from argosy.gateway.replicas import Pool, Replica
from argosy.gateway.stream import ClientStream
from argosy.gateway.upstream import UpstreamError
from argosy.policy import Outcome, backoff_s, classify
from argosy.protocol import ApiError, event
from argosy.web import DisconnectedError, Exchange

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class Serving:
    """The handlers of the two generation APIs."""

    def __init__(self, pools: Mapping[str, Pool], config: GatewayConfig) -> None:
        self._pools = pools
        self._config = config
        self._clock = time.monotonic
        limits = QueueLimits(config.queue.requests, config.queue.bytes, config.queue.wait_s)
        self._dispatchers = {
            pool.model: Dispatcher(pool, limits, self._clock) for pool in pools.values()
        }
        self._streams: set[ClientStream] = set()

    async def chat(self, exchange: Exchange) -> None:
        """`POST /v1/chat/completions`."""
        await self._answer(exchange, CHAT)

    async def completion(self, exchange: Exchange) -> None:
        """`POST /v1/completions`."""
        await self._answer(exchange, COMPLETION)

    async def tend(self) -> None:
        """Look after running streams, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(1.0)
            now = self._clock()
            for stream in tuple(self._streams):
                stream.tend(now, self._limits)

    @property
    def _limits(self) -> _Limits:
        return _Limits(self._config.timeouts.between_tokens_s, self._config.keep_alive_s)

    async def _answer(self, exchange: Exchange, api: Api) -> None:
        ask = read(await exchange.body(), api.prompt_field)
        pool = self._pools.get(ask.model)
        if pool is None:
            message = f"The model {ask.model[:200]!r} is not served here. See /v1/models."
            raise ApiError(404, "model_not_found", message, param="model")
        answer_id = f"{api.id_prefix}-{uuid.uuid4().hex}"
        identity = f"{answer_id} {int(time.time())}".encode()
        journey = Journey(exchange, ask, api, pool, identity, ANYONE)
        pool.retries.request(self._clock())
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        if ask.stream:
            await self._stream(exchange, journey, task)
        else:
            await self._whole(exchange, journey, task)

    # --- whole answers -------------------------------------------------------------------------

    async def _whole(
        self, exchange: Exchange, journey: Journey, task: asyncio.Task[object]
    ) -> None:
        watch = exchange.on_disconnect(task.cancel)
        try:
            while not await self._whole_from(exchange, journey):
                pass
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            task.uncancel()
            raise DisconnectedError from None
        finally:
            watch.cancel()

    async def _whole_from(self, exchange: Exchange, journey: Journey) -> bool:
        """Ask one replica; whether its answer was passed on."""
        replica = await self._next(journey)
        attempt, outcome = Attempt(self._clock), None
        ask, path = journey.ask, journey.api.path
        asked = whole_request(ask, path, replica.dialect, replica.model, journey.identity)
        try:
            async with asyncio.timeout(self._config.timeouts.total_s):
                await attempt.send(replica.upstream, _request(replica, asked))
                status = await attempt.head
                content = await attempt.whole()
            outcome = classify(status)
        except (UpstreamError, TimeoutError) as error:
            outcome = Outcome.FAILURE
            self._failed(journey, replica, str(error) or "too late")
            return False
        finally:
            attempt.abandon("nobody waits for it")
            replica.ended(outcome, self._clock(), _retry_after(attempt))
        if outcome is not Outcome.SUCCESS:
            self._failed(journey, replica, f"status {status}", outcome)
            return False
        kind = attempt.headers.get(b"content-type", b"application/json")
        await exchange.answer(status, content, kind)
        return True

    # --- streams ---------------------------------------------------------------------------------

    async def _stream(
        self, exchange: Exchange, journey: Journey, task: asyncio.Task[object]
    ) -> None:
        dispatcher = self._dispatchers[journey.pool.model]
        stream = ClientStream(
            exchange,
            journey.delivered,
            leave=task.cancel,
            charge=partial(dispatcher.charge, journey.caller),
        )
        carrier = Carrier(journey.ask, journey.api.path, journey.delivered, journey.identity)
        exchange.watch(stream)
        self._streams.add(stream)
        try:
            while not await self._stream_from(exchange, stream, journey, carrier):
                pass
        except asyncio.CancelledError:
            if not stream.gone:
                raise
            task.uncancel()
            raise DisconnectedError from None
        except ApiError as error:
            if exchange.status is None:
                raise
            exchange.push(event(error.body(exchange.request_id)))
            await exchange.end_stream()
            raise
        finally:
            self._streams.discard(stream)
        await exchange.end_stream()

    async def _stream_from(
        self, exchange: Exchange, stream: ClientStream, journey: Journey, carrier: Carrier
    ) -> bool:
        """Let one replica give what it can; whether the answer is whole."""
        replica = await self._next(journey)
        delivered = journey.delivered
        before = delivered.output_tokens
        attempt, outcome = Attempt(self._clock), None
        try:
            leg = carrier.leg(replica.dialect, replica.model, replica.max_model_len)
            if leg is None:
                raise _cut_off()
            async with asyncio.timeout(self._config.timeouts.first_token_s):
                await attempt.send(replica.upstream, _request(replica, leg.outgoing))
                status = await attempt.head
            if status != 200:
                outcome = classify(status)
                await self._refused(exchange, journey, replica, attempt, status)
                return exchange.complete
            if exchange.status is None:
                await exchange.start_stream()
            stream.feed_from(attempt, leg.reader)
            await attempt.end
            stream.finish()
            outcome = Outcome.SUCCESS
        except (UpstreamError, TimeoutError) as error:
            outcome = Outcome.FAILURE
            stream.let_go()
            if delivered.output_tokens > before:
                journey.got_on()
            self._failed(journey, replica, str(error) or "too late")
            ending = carrier.ending()
            if ending is None and not carrier.can_go_on:
                raise _cut_off() from error
            if ending is None:
                return False
            stream.end_with(ending)
        finally:
            attempt.abandon("nobody waits for it")
            replica.ended(outcome, self._clock(), _retry_after(attempt))
        return True

    async def _refused(
        self,
        exchange: Exchange,
        journey: Journey,
        replica: Replica,
        attempt: Attempt,
        status: int,
    ) -> None:
        """The replica gave an error instead of a stream: pass on the request's own fault, else go on."""
        content = await attempt.whole()
        if classify(status) is Outcome.SUCCESS and exchange.status is None:
            kind = attempt.headers.get(b"content-type", b"application/json")
            await exchange.answer(status, content, kind)
            return
        self._failed(journey, replica, f"status {status}", classify(status))

    # --- replicas --------------------------------------------------------------------------------

    async def _next(self, journey: Journey) -> Replica:
        """The replica to try next, waited for if need be. Raises ApiError when it was tried enough."""
        pool = journey.pool
        if journey.failing_since is None:
            return await self._dispatchers[pool.model].place(journey.ask, journey.caller)
        while True:  # what was placed once goes before all that wait
            replica = pool.pick(journey.ask, journey.caller.domain, journey.tried, self._clock())
            if replica is not None:
                replica.sent(journey.ask.prompt_tokens)
                return replica
            if self._clock() - journey.failing_since > self._config.timeouts.recovery_s:
                raise _upstream_failed(pool)
            journey.tried.clear()
            await asyncio.sleep(backoff_s(journey.failures, random.random()))  # noqa: S311 - jitter

    def _failed(
        self, journey: Journey, replica: Replica, why: str, answered: Outcome | None = None
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
            raise _upstream_failed(journey.pool)


@dataclass(frozen=True, slots=True)
class _Limits:
    between_tokens_s: float
    keep_alive_s: float


def _request(replica: Replica, asked: Outgoing) -> bytes:
    return replica.upstream.request(b"POST", asked.path, asked.body, asked.headers)


def _retry_after(attempt: Attempt) -> float | None:
    """What the replica said about coming back, in seconds."""
    told = attempt.headers.get(b"retry-after", b"")
    return float(told[:6]) if told.isdigit() else None


def _cut_off() -> ApiError:
    message = "The replica failed in the middle of the answer, and it cannot be carried on."
    return ApiError(502, "upstream_failed", message)


def _upstream_failed(pool: Pool) -> ApiError:
    message = f"No replica could answer for {pool.model!r}. Try again shortly."
    return ApiError(502, "upstream_failed", message, retry_after_s=RETRY_AFTER_S)
