"""Chat and completions through the gateway: read, let in, tried until a replica answers, passed on."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial

from argosy.gateway.backends import Carrier, Kind, resumed_tokens
from argosy.gateway.config import GatewayConfig
from argosy.gateway.model_registry import Models
from argosy.gateway.pool import Pool
from argosy.gateway.principal import TIERS, Caller
from argosy.gateway.proxy.dispatcher import RETRY_AFTER_S, Dispatcher
from argosy.gateway.proxy.failover import Relay, Ways
from argosy.gateway.proxy.fast_path import FastPath
from argosy.gateway.proxy.fast_path_switch import Shortcut
from argosy.gateway.proxy.response_relay import ClientStream, StreamLimits
from argosy.gateway.proxy.response_writers import Gathered, Out, Streamed
from argosy.gateway.request_context import (
    CHAT,
    COMPLETION,
    UNANSWERED,
    Api,
    Journey,
    Stage,
    Visit,
    enter,
    leave,
)
from argosy.gateway.request_fields import Ask, read
from argosy.gateway.request_trace import Trace
from argosy.gateway.upstream import Attempt
from argosy.http_server import Deadlines, DisconnectedError, Exchange, SlowReaderError
from argosy.protocol import ApiError, event, invalid

RESUMING = frozenset[Kind]({"argosy", "auto"})
"""Kinds of servers that may know `resume`: ours, and those that have not said yet what they are."""


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
        self._longest_s = config.timeouts.request_s or math.inf
        self._clock = time.monotonic
        self._limits = StreamLimits(
            config.timeouts.first_token_s,
            config.timeouts.between_tokens_s,
            config.keep_alive_s,
            config.slow_reader_timeout_s,
        )
        self._dispatchers: dict[Pool, Dispatcher] = {}
        """Of each pool that was asked for something."""
        self._streams: set[ClientStream] = set()
        self._ways = Ways(
            config.timeouts,
            config.attempts,
            self._clock,
            heads=Deadlines(config.timeouts.first_token_s, _too_late),
            wholes=Deadlines(config.timeouts.total_s, _too_late),
        )

    @property
    def queued(self) -> Mapping[str, int]:
        """Requests that wait for a replica, by model."""
        queued = {pool.model: 0 for pool in self._models.pools}
        for pool, dispatcher in self._dispatchers.items():
            if pool.model in queued:
                queued[pool.model] += len(dispatcher)
        return queued

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
        """Look after running streams and all that wait, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(1.0)
            self._tend()  # a function, as its names would keep the last stream until there is another

    def _tend(self) -> None:
        for pool, dispatcher in tuple(self._dispatchers.items()):
            dispatcher.pump()
            if not (pool.requests or pool in self._models.pools):
                del self._dispatchers[pool]
        now = self._clock()
        for stream in tuple(self._streams):
            stream.tend(now, self._limits)

    # --- one request ---------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange, caller: Caller, api: Api) -> None:
        session = exchange.header(b"x-session-affinity")
        ask = read(await exchange.body(), api.prompt_field, caller.domain, session)
        exchange.rename(ask.request_id)
        journey = self._journey(exchange, ask, api, caller)
        visits: list[Visit] = []
        out: Out = Streamed(exchange) if ask.stream else Gathered(journey)
        try:
            await self._pass(journey, visits, out)
        except (DisconnectedError, SlowReaderError):
            journey.status = "cancelled"
            raise
        except ApiError as error:
            journey.fails(error)
            if exchange.status is not None and not exchange.complete:
                exchange.push(event(error.body(exchange.request_id)))
                await exchange.end_stream()
            raise
        except Exception:
            journey.trace.error = "internal_error"  # as it will be answered
            raise
        finally:
            delivered = journey.delivered
            unsent = journey.status in UNANSWERED and out.retract()
            if unsent or exchange.status is None:
                delivered.forget()  # nothing reached the client, so nothing is billed
            elif journey.status != "completed" and not delivered.output_tokens:
                delivered.prompt_tokens = delivered.cached_tokens = 0  # nor is a prompt alone
            leave(visits, journey)
            journey.error = None  # which has this frame, and so all that was answered

    def _journey(self, exchange: Exchange, ask: Ask, api: Api, caller: Caller) -> Journey:
        """Raises ApiError when nothing here serves the model, to this caller, or ever could."""
        pool, route = self._models.target(ask.model, caller, exchange.headers)
        most = pool.max_model_len
        if most is not None and ask.exceeds(most):
            # OpenAI's status and words: clients know by them that it is the prompt.
            message = (
                f"This model's maximum context length is {most} tokens, and the prompt is longer. "
                "Send less, or have it cut (truncate_prompt_tokens)."
            )
            raise invalid(message, api.prompt_field, "context_length_exceeded")
        if resumed_tokens(ask) and not _may_resume(pool):
            message = (
                "Only replicas of Argosy go on after tokens ('resume'), and none has this model. "
                "Send what is there as text."
            )
            raise invalid(message, "resume")
        now = self._clock()
        return Journey(
            exchange,
            ask,
            api,
            pool,
            f"{api.id_prefix}-{random.getrandbits(128):032x}",
            caller,
            tier=min(caller.tier + ask.priority, len(TIERS) - 1),  # it may ask for a lower one
            route=route,
            deadline=exchange.arrived + min(ask.timeout_s, self._longest_s),
            headers=exchange.extra,
            trace=Trace(arrived=exchange.arrived, read=now),
            started_at=time.time() - (now - exchange.arrived),
        )

    async def _pass(self, journey: Journey, visits: list[Visit], out: Out) -> None:
        """Let the request in and answer it, unless the client or the gateway goes away, or its deadline passes."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        pool = journey.pool
        dispatcher = self._dispatcher(pool)
        carrier = Carrier(journey.ask, journey.api.path, journey.delivered)
        stream = ClientStream(
            journey,
            out,
            carrier,
            visits=visits,
            charge=partial(dispatcher.charge, journey),
            leave=task.cancel,
            shortcut=self._shortcut(journey.ask, out, visits),
        )
        alarm = None
        if journey.deadline < math.inf:
            left_s = max(0.0, journey.deadline - self._clock())
            alarm = asyncio.get_running_loop().call_later(left_s, stream.expire)
        journey.exchange.watch(stream)
        self._streams.add(stream)
        pool.requests += 1
        try:
            if await enter(self._stages, visits, journey):
                journey.trace.admitted = self._clock()
                await Relay(self._ways, dispatcher, journey, carrier, stream, out).run()
        except asyncio.CancelledError:
            task.uncancel()
            if stream.gone:
                raise (SlowReaderError if stream.cut_off else DisconnectedError) from None
            if not stream.left:
                message = "The gateway is going away. Send the request again."
                raise ApiError(503, "draining", message, retry_after_s=RETRY_AFTER_S) from None
            if stream.stopped is None:
                raise _out_of_time(journey) from None
        finally:
            if alarm is not None:
                alarm.cancel()
            self._streams.discard(stream)
            pool.requests -= 1
            stream.settle()
            dispatcher.ended(journey)
            journey.exchange.watch(None)
        if journey.exchange.complete:
            return  # passed on as it came, or answered by a stage
        await out.end()
        journey.status = "stopped" if stream.stopped is not None else journey.ending

    def _dispatcher(self, pool: Pool) -> Dispatcher:
        """The queue in front of a pool."""
        dispatcher = self._dispatchers.get(pool)
        if dispatcher is None:
            dispatcher = self._dispatchers[pool] = Dispatcher(pool, self._config.queue, self._clock)
        return dispatcher

    def _shortcut(self, ask: Ask, out: Out, visits: Sequence[Visit]) -> Shortcut | None:
        """The way by the fast path, for a stream that may go there: it knows one choice."""
        if self._fast_path is None or ask.choices > 1 or not isinstance(out, Streamed):
            return None
        return Shortcut(self._fast_path, out, visits)


def _may_resume(pool: Pool) -> bool:
    """Whether some server knows `resume`, or may come that does."""
    kinds = {replica.kind for replica in pool.replicas.values()}
    return not kinds or not kinds.isdisjoint(RESUMING)


def _out_of_time(journey: Journey) -> ApiError:
    """The deadline of a request has ended it before anything came."""
    journey.status = "stopped"
    journey.headers.append((b"x-should-retry", b"false"))  # or SDKs would, with as little time
    allowed_s = journey.deadline - journey.exchange.arrived
    message = (
        f"No answer had begun in the {allowed_s:g} s that its timeout_s, or the server, allows."
    )
    return ApiError(504, "deadline_exceeded", f"{message} Allow more, or try again later.")


def _too_late(attempt: Attempt) -> None:
    attempt.abandon("too late")
