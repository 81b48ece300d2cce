"""The stage of requests that name a key (`Idempotency-Key`): sent again, they are given the answer that they got.

After the IETF's draft "The Idempotency-Key HTTP Header Field". What ended in an error keeps nothing: its key is free.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import msgspec
import structlog

from argosy.gateway.filters.limit_filter import LimitsConfig, redis_password
from argosy.gateway.principal import Caller
from argosy.gateway.request_context import Alone, Journey
from argosy.gateway.request_trace import KeyLine
from argosy.protocol import SSE_CONTENT_TYPE, ApiError, invalid
from argosy.store import Answer, Answers, Claim, IdempotencyConfig, open_answers

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

HEADER = b"idempotency-key"
AGAIN_S = 1.0
"""When to come back for an answer that is not whole yet."""
_KEY = re.compile(rb"[!-~]{1,255}")
_pack = msgspec.msgpack.Encoder().encode


def kept_answers(config: IdempotencyConfig, limits: LimitsConfig) -> Answers:
    """Where the settings keep them: with the limits. Raises ValueError, saying what to change."""
    return open_answers(config, limits.redis, redis_password(limits))


class Idempotency:
    """A `Stage`. A request that is answered here counts against no limit, and has no row in the ledger."""

    def __init__(self, answers: Answers, answer_bytes: int) -> None:
        """Answers of more bytes are not kept."""
        self._answers = answers
        self._answer_bytes = answer_bytes

    async def enter(self, journey: Journey) -> First | None:
        """Let in the first request with its key, and answer those that are the same.

        Raises ApiError 400 when the key is none, 409 while the first is being answered, 422 when that was another.
        """
        key = journey.exchange.headers.get(HEADER)
        if key is None:
            return None
        if not _KEY.fullmatch(key):
            message = "'Idempotency-Key' has 1 to 255 visible ASCII characters, such as a UUID. Send one, or none."
            raise invalid(message, "Idempotency-Key", "invalid_idempotency_key")
        name, claim = _name(journey.caller, key), Claim(journey.id, _digest(journey))
        held = await self._answers.claim(name, claim)
        first = journey.id if held is None else held.request
        line = KeyLine(key.decode(), first, kept=isinstance(held, Answer))
        journey.trace.idempotency = line
        if held is None:
            copy = First(self._answers, self._answer_bytes, journey, name, claim, line)
            journey.exchange.copy_to(copy)
            return copy
        if held.digest != claim.digest:
            message = "This Idempotency-Key was sent with another request. Take a new one for each."
            raise ApiError(422, "idempotency_key_reused", message, param="Idempotency-Key")
        if isinstance(held, Claim):
            message = "The request with this Idempotency-Key is still being answered. Try again in a moment."
            raise ApiError(409, "idempotency_key_in_use", message, retry_after_s=AGAIN_S)
        await _answer(journey, held)
        return None


class First:
    """A `Visit`, and the copy of the answer: that of the first request with its key."""

    __slots__ = ("_answers", "_body", "_claim", "_journey", "_kind", "_line", "_most", "_name")

    def __init__(
        self,
        answers: Answers,
        most: int,
        journey: Journey,
        name: str,
        claim: Claim,
        line: KeyLine,
    ) -> None:
        self._answers = answers
        self._most = most
        self._journey = journey
        self._name = name
        self._claim = claim
        self._line = line
        self._kind = b""
        self._body: bytearray | None = bytearray()
        """What was sent of it; None: it is not kept."""

    def begin(self, kind: bytes) -> None:
        """See `Copy`."""
        self._kind = kind

    def add(self, data: bytes) -> None:
        """See `Copy`."""
        body = self._body
        if body is None:
            return
        if len(body) + len(data) <= self._most and self._answers.hold(len(data)):
            body += data
        else:
            self._forget()

    def alone(self) -> Alone:
        """Not at all: every byte has to come by."""
        return Alone(0)

    def counted(self, times: Sequence[float]) -> None:
        """See `Visit`."""

    def leave(self) -> None:
        """Keep what was sent, if it was an answer to the end."""
        self._journey.exchange.copy_to(None)
        body, kind = self._forget(), self._kind
        answer = None
        if body is not None and _ended_well(self._journey):
            answer = Answer(self._claim.request, self._claim.digest, kind, bytes(body))
            self._journey.trace.idempotency = msgspec.structs.replace(self._line, kept=True)
        self._answers.settle(self._name, self._claim, answer)

    def _forget(self) -> bytearray | None:
        body, self._body = self._body, None
        if body is not None:
            self._answers.release(len(body))
        return body


def _ended_well(journey: Journey) -> bool:
    """Whether the client was given all of an answer, one that a limit ended too."""
    ended = journey.status in {"completed", "stopped"} and journey.error is None
    return ended and journey.exchange.complete


def _name(caller: Caller, key: bytes) -> str:
    """The key's, as it is the caller's project's, or theirs where they have none."""
    own = "" if caller.project else caller.user or caller.key
    return hashlib.sha256(_pack((caller.organisation, caller.project, own, key))).hexdigest()


def _digest(journey: Journey) -> bytes:
    """Of what is asked: the path and the fields, whatever their order."""
    ask = journey.ask
    asked = [
        (name, bytes(value))
        for name, value in sorted(ask.fields.items())
        if not (name == "seed" and ask.drew_seed)
    ]
    return hashlib.sha256(_pack((journey.api.path, asked))).digest()


async def _answer(journey: Journey, kept: Answer) -> None:
    """Send an answer again."""
    exchange = journey.exchange
    exchange.extra.append((b"idempotent-replayed", b"true"))
    log.info("answer_replayed", request=journey.id, first=kept.request)
    if kept.kind != SSE_CONTENT_TYPE:
        await exchange.answer(200, kept.body, kept.kind)
    else:
        await exchange.start_stream()
        await exchange.write(kept.body)
        await exchange.end_stream()
    journey.status, journey.replays = "completed", kept.request
