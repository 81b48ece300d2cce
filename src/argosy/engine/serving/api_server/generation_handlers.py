"""Chat and completions from body to answer: checked at the door, generated, streamed or sent whole."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec

from argosy.engine.serving.api_server.event_writers import ChatEvents, CompletionEvents, EventWriter
from argosy.engine.serving.api_server.generation import Generation
from argosy.engine.serving.api_server.replica_state import Replica, Service
from argosy.engine.serving.api_server.request_metrics import Recorder, reason_of
from argosy.engine.serving.api_server.response_spec import Frame, new_id
from argosy.engine.serving.api_server.responses import chat_completion, completion
from argosy.engine.serving.api_server.resume_metadata import Journal
from argosy.engine.serving.preprocessing.request_processor import Context, Door, Job
from argosy.http_server import Exchange, SlowReaderError
from argosy.protocol import (
    SSE_DONE,
    ApiError,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    GenerationRequest,
    comment,
    event,
    invalid,
    parse,
)

LARGE_BODY_BYTES = 32 * 1024
"""Bodies from this size are parsed and tokenized in a thread, so that streams do not wait for them."""

DIGEST = b"x-argosy-model-digest"
JOURNAL = b"x-argosy-journal"
CACHED = b"x-argosy-cached"
GIVEN = b"x-argosy-given"
KEEP_ALIVE = comment(b"keep-alive")
_COUNT = re.compile(r"[0-9]{1,9}")
_COUNTS = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_ANSWER = re.compile(r"([\x21-\x7e]{1,128}) (\d{1,11})")
MAX_WEIGHT = 1e6
MAX_TIER = 100

Body = TypeVar("Body", bound=GenerationRequest)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Api(Generic[Body]):
    """What tells one generation API from another."""

    body: type[Body]
    id_prefix: str
    lower: Callable[[Door, Body, Context], Job]
    whole: Callable[[Frame], ChatCompletion | Completion]
    events: Callable[[Frame], EventWriter]


CHAT = Api(ChatCompletionRequest, "chatcmpl", Door.chat, chat_completion, ChatEvents)
COMPLETION = Api(CompletionRequest, "cmpl", Door.completion, completion, CompletionEvents)


class Answering:
    """The handlers of the two generation APIs."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def chat(self, exchange: Exchange) -> None:
        """`POST /v1/chat/completions`."""
        with self._replica.working():
            await self._answer(exchange, CHAT)

    async def completion(self, exchange: Exchange) -> None:
        """`POST /v1/completions`."""
        with self._replica.working():
            await self._answer(exchange, COMPLETION)

    async def _answer(self, exchange: Exchange, api: Api[Body]) -> None:
        try:
            self._replica.service()  # refuse before reading
            self._check_digest(exchange)
            raw = await exchange.body()
            body, frame = await self._admit(exchange, api, raw)
        except ApiError as error:
            self._replica.metrics.rejected(error.status)
            raise
        if body.request_id is not None:
            exchange.rename(body.request_id)
        recorder = Recorder(self._replica, frame.choices, exchange.arrived)
        reason: str | None = "internal_error"
        try:
            await self._generate(exchange, api, body, frame, recorder)
            reason = None
        except SlowReaderError:
            reason = "slow_reader"
            raise
        except (Exception, asyncio.CancelledError) as error:
            reason = reason_of(error)
            raise
        finally:
            recorder.ended(reason)

    def _check_digest(self, exchange: Exchange) -> None:
        """Refuse to go on with what another model began, whatever it is called."""
        digest, wanted = self._replica.engine.info.digest, exchange.header(DIGEST)
        if wanted not in {"", digest}:
            message = "The answer was begun by another model of this name. Ask a replica that has it, or begin anew."
            raise ApiError(409, "other_model", message)
        if digest and exchange.header(JOURNAL) == "1":
            exchange.extra.append((DIGEST, digest.encode()))

    async def _admit(self, exchange: Exchange, api: Api[Body], raw: bytes) -> tuple[Body, Frame]:
        """Check everything and prepare the answer."""
        service = self._replica.service()
        context = trusted_context(exchange, new_id(api.id_prefix))
        work = partial(self._lower, api, service, raw, context)
        admitted = work() if len(raw) < LARGE_BODY_BYTES else await asyncio.to_thread(work)
        self._replica.service()  # it may have begun to drain meanwhile
        return admitted

    def _lower(
        self, api: Api[Body], service: Service, raw: bytes, context: Context
    ) -> tuple[Body, Frame]:
        body = parse(api.body, raw)
        self._replica.check_model(body.model)
        job = api.lower(service.door, body, context)
        return body, Frame.of(body, job, service.tokenizer, context)

    async def _generate(
        self,
        exchange: Exchange,
        api: Api[Body],
        body: Body,
        frame: Frame,
        recorder: Recorder,
    ) -> None:
        replica = self._replica
        with Generation(replica.engine, frame.choices, recorder.progress) as generation:
            replica.generation_begins(generation, exchange.header(b"x-argosy-gateway"))
            watch = exchange.on_disconnect(partial(_leave, generation))
            try:
                if body.stream:
                    writer = api.events(frame)
                    writer = Journal(frame, writer) if frame.journal else writer
                    await self._stream(exchange, generation, frame, writer)
                else:
                    await generation.complete()
                    _refuse_nothing(frame)
                    await exchange.answer(200, _encode(api.whole(frame)))
            finally:
                watch.cancel()
                replica.generation_ends(generation)

    async def _stream(
        self, exchange: Exchange, generation: Generation, frame: Frame, writer: EventWriter
    ) -> None:
        try:
            await self._send_events(exchange, generation, frame, writer)
        except ApiError as error:
            if exchange.status is not None:  # the wire has said 200: the error is an event
                await exchange.write(event(error.body(exchange.request_id)))
                await exchange.end_stream()
            raise

    async def _send_events(
        self, exchange: Exchange, generation: Generation, frame: Frame, writer: EventWriter
    ) -> None:
        done = False
        while not done:
            news = await generation.news(self._replica.config.keep_alive_s)
            done = generation.done
            if done:
                _refuse_nothing(frame)
            data = b"".join(map(writer.events, news))
            if not news and not done:
                data = KEEP_ALIVE
            if done:
                data += writer.usage() + SSE_DONE
            if not data:
                continue
            if exchange.status is None:
                await exchange.start_stream()
            await exchange.write(data)
        await exchange.end_stream()


def _leave(generation: Generation) -> None:
    """The client has gone. An error of its own: what is raised holds on to all that its request held."""
    generation.fail(ApiError(499, "client_closed_request", "The client closed the connection."))


def _refuse_nothing(frame: Frame) -> None:
    """Raise ApiError 408 when the time ran out before the first token."""
    if frame.nothing_in_time:
        message = (
            "The request's time ran out before its first token. Allow more, or try again later."
        )
        raise ApiError(408, "timeout", message)


def trusted_context(exchange: Exchange, answer_id: str) -> Context:
    """What the gateway says of the request in `x-argosy-*` headers. Raises ApiError 400 for nonsense."""
    tier = _number(exchange, "x-argosy-tier")
    weight = _number(exchange, "x-argosy-weight")
    if not 0 <= tier <= MAX_TIER or tier != int(tier):
        message = f"The header x-argosy-tier must be a whole number from 0 to {MAX_TIER}."
        raise invalid(message, "x-argosy-tier")
    if not 0 < weight <= MAX_WEIGHT:
        message = f"The header x-argosy-weight must be above 0 and at most {MAX_WEIGHT:g}."
        raise invalid(message, "x-argosy-weight")
    answer_id, created = _identity(exchange, answer_id)
    return Context(
        request_id=answer_id,
        created=created,
        journal=exchange.header(JOURNAL) == "1",
        cached=_cached(exchange),
        given=_given(exchange),
        tenant=exchange.header(b"x-argosy-tenant"),
        domain=exchange.header(b"x-argosy-domain"),
        tier=int(tier),
        weight=weight,
    )


def _identity(exchange: Exchange, answer_id: str) -> tuple[str, int | None]:
    """Id and time of an answer that was begun elsewhere; else the new id and None."""
    told = exchange.header(b"x-argosy-answer")
    if not told:
        return answer_id, None
    found = _ANSWER.fullmatch(told)
    if found is None:
        raise invalid(
            "The header x-argosy-answer must be an id and a Unix time.", "x-argosy-answer"
        )
    return found[1], int(found[2])


def _cached(exchange: Exchange) -> int | None:
    """Cached tokens that were told of an answer that was begun elsewhere; None: it was not."""
    told = exchange.header(CACHED)
    if not told:
        return None
    if _COUNT.fullmatch(told) is None:
        raise invalid("The header x-argosy-cached must be a count of tokens.", "x-argosy-cached")
    return int(told)


def _given(exchange: Exchange) -> tuple[int, ...]:
    """Whole numbers with commas between them; none when they were not sent."""
    sent = exchange.header(GIVEN)
    if sent and not _COUNTS.fullmatch(sent):
        raise invalid("The header x-argosy-given must be whole numbers.", "x-argosy-given")
    return tuple(map(int, sent.split(","))) if sent else ()


def _number(exchange: Exchange, name: str) -> float:
    """The header's finite number; 1 when it was not sent."""
    try:
        value = float(exchange.header(name.encode()) or "1")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid(f"The header {name} must be a number.", name)
    return value
