"""Asks each replica how it is: its load, whether it takes requests and, once it failed, whether it is back."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from argosy.gateway.backends import CHAT_PATH, Found, LoadSource, find
from argosy.gateway.pool.replica_endpoint import Replica
from argosy.gateway.upstream import UpstreamError, answer_to, get
from argosy.policy import BLOCK_TOKENS, Outcome, classify, due_at
from argosy.protocol import Load

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

OURS_EACH_S = 0.5
SHARED_EACH_S = 0.25
"""One of ours that other gateways use too: what they have there changes."""
LOADS_EACH_S = 1.0
OTHERS_EACH_S = 5.0
PROBE_TIMEOUT_S = 2.0
TOKEN_S = 10.0
"""For the token that a replica has to give before it gets requests again."""
WAITING_TOKENS = 512
"""A request that waits somewhere else counts as so many prompt tokens: others do not say how long theirs are."""
LONGEST_LOAD = 1024 * 1024
"""Bytes. While more is read, which is done each second, all others wait."""
NOT_THERE = frozenset({401, 403, 404, 405, 501})
"""A server that answers this when asked for its load does not tell it that way."""

_HEADERS = [(b"content-type", b"application/json")]

WRONG = (UpstreamError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What comes of asking a server that is not well, or none; what it answers may be no text, or nested too deeply."""


class Prober:
    """Probes one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._loads = list(replica.dialect.loads)
        """Where it may tell its load; what it has not is dropped."""
        self._unread: set[LoadSource] = set()
        """Those that could not be read yet, as the log was told: the gauges of some are there once they were set."""
        self._met = False
        """It has been asked what it is."""
        self._found: Found | None = None
        """What it told then."""
        self._missed = False
        """It gave no answer when it was asked last, as the log was told."""
        self._step = 0
        """The engine's, when it told last."""
        self.asked = asyncio.Event()
        """Set once it has been probed, whatever came of it."""

    async def run(self) -> None:
        """Probe again and again, from a while after now on."""
        while True:
            await asyncio.sleep(self._pause_s())
            await self.probe()

    def _pause_s(self) -> float:
        if self._replica.parts is not None:
            return SHARED_EACH_S
        if self._replica.kind in {"argosy", "auto"}:
            return OURS_EACH_S
        return LOADS_EACH_S if self._loads else OTHERS_EACH_S

    async def probe(self) -> None:
        """Ask once and take in the answer."""
        replica, breaker = self._replica, self._replica.breaker
        probing = breaker.wants_probe(time.monotonic())
        if not (breaker.closed or probing or replica.absence.away):
            return
        if probing:
            breaker.probe_sent()
            self._met = False  # what comes back may have been changed
            self._loads = list(replica.dialect.loads)
        outcome, well = Outcome.FAILURE, False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                well = (self._met or await self._meet()) and await self._look()
            self._reach()
            if well:
                outcome = await self._try_out() if probing else Outcome.SUCCESS
                self._welcome()
        except WRONG as error:
            if isinstance(error, UpstreamError) and not probing:
                outcome = error.outcome or outcome
            self._miss(str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s")
        finally:
            self.asked.set()
            now = time.monotonic()
            if probing:
                breaker.probed(outcome, now)
                if breaker.closed:
                    replica.forget_speed()
                if outcome is Outcome.BACKPRESSURE:
                    replica.backpressure.refused(replica.load.in_flight, now)
                replica.on_change()
            elif outcome is Outcome.FAILURE:
                breaker.record(outcome, now)
            if not well:
                replica.lost(now)
            replica.look_after(now)

    async def _meet(self) -> bool:
        """Find out what it is and which models it has; whether it may be sent requests."""
        replica = self._replica
        found = await find(self._ask)
        if found is None:
            return replica.kind != "auto"
        if found != self._found:
            self._found = found
            self._tell(found)
        if found.kind == "argosy" and not self._has(found):
            replica.taking = False  # ours tell of all that they serve, and refuse the rest
            return False
        self._met = True
        if replica.kind == "auto":
            replica.kind = found.kind
            self._loads = list(replica.dialect.loads)
            replica.taking = True
        replica.max_model_len = found.models.get(replica.model)
        replica.on_change()
        return True

    def _has(self, found: Found) -> bool:
        """Whether the model is among those that it tells, if it tells any."""
        return not found.models or self._replica.model in found.models

    def _tell(self, found: Found) -> None:
        """Say what was found, and whether it has the model."""
        name, wanted, models = self._replica.name, self._replica.model, list(found.models)[:10]
        log.info("replica_found", replica=name, kind=found.kind, models=models)
        if not self._has(found):
            remedy = "write `model: ITS NAME` beside its url, or start it with --served-model-name"
            log.warning("replica_has_other_models", replica=name, wanted=wanted, remedy=remedy)

    def _miss(self, reason: str) -> None:
        """Say why it cannot be asked, once until it can: nothing else tells of a wrong URL or certificate."""
        if not self._missed:
            log.info("replica_not_reached", replica=self._replica.name, reason=reason)
        self._missed = True

    def _reach(self) -> None:
        if self._missed:
            log.info("replica_reached_again", replica=self._replica.name)
        self._missed = False

    def _welcome(self) -> None:
        """It is well: one that came while others served gets requests from now on. Ours say so themselves."""
        replica = self._replica
        if replica.kind != "argosy":
            replica.says("ready", time.monotonic())
            replica.on_change()

    async def _look(self) -> bool:
        """Ask for its load, or else its health; whether it is well."""
        replica = self._replica
        if replica.kind == "argosy":
            status, body = await get(replica.upstream, b"/load", replica.sender)
            if status == 200:
                self._learn(msgspec.json.decode(body, type=Load))
            return status < 500
        for source in tuple(self._loads):
            status, body = await self._ask(source.path)
            if status in NOT_THERE:
                self._loads.remove(source)
                log.info("load_not_told", replica=replica.name, path=source.path.decode())
            elif status != 200:
                break
            elif self._take_in(source, body):
                return True
        status, _ = await self._ask(replica.dialect.health)
        return status < 500

    async def _try_out(self) -> Outcome:
        """Have it generate a token: one that says that it is well may still answer nobody."""
        upstream, urgency = self._replica.upstream, self._replica.dialect.urgency
        message = {"role": "user", "content": "Hi"}
        asked = {"model": self._replica.model, "messages": [message], "max_tokens": 1}
        if urgency:
            asked["priority"] = urgency * int(due_at(0, time.time()))
        request = upstream.request(b"POST", CHAT_PATH, msgspec.json.encode(asked), _HEADERS)
        async with asyncio.timeout(TOKEN_S):
            status, _ = await answer_to(upstream, request)
        return classify(status)

    async def _ask(self, path: bytes) -> tuple[int, bytes]:
        return await get(self._replica.upstream, path)

    def _learn(self, told: Load) -> None:
        replica, load = self._replica, self._replica.load
        replica.says(told.state, time.monotonic())
        replica.max_model_len = told.max_model_len or None
        replica.tells_speed = told.prefill_tokens_per_s > 0
        if told.step < self._step:
            replica.prefixes.clear()  # the engine was started anew
        self._step = told.step
        replica.prefixes.resize(told.kv_blocks_total * told.block_size // BLOCK_TOKENS)
        load.queued_tokens = told.queued_tokens
        load.running, load.waiting = told.running, told.waiting
        load.capacity = told.max_seqs
        replica.shared_with(told.others)
        load.kv_used = told.kv_blocks_used / max(1, told.kv_blocks_total)
        load.prefill_rate = told.prefill_tokens_per_s or load.prefill_rate
        load.decode_s = told.decode_s or load.decode_s
        load.reported_at = time.monotonic()
        load.sent_tokens = 0
        replica.on_change()

    def _take_in(self, source: LoadSource, body: bytes) -> bool:
        """What a server of another kind says; what it does not say stays as it was. Whether it could be read."""
        try:
            if len(body) > LONGEST_LOAD:
                raise ValueError(f"it is longer than {LONGEST_LOAD} bytes")  # noqa: TRY301
            told = source.read(body)
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            if source not in self._unread:
                self._unread.add(source)
                log.warning("load_not_read", replica=self._replica.name, reason=str(error))
            return False
        load = self._replica.load
        load.running = load.running if told.running is None else told.running
        load.waiting = load.waiting if told.waiting is None else told.waiting
        load.kv_used = load.kv_used if told.kv_used is None else told.kv_used
        load.capacity = load.capacity if told.capacity is None else told.capacity
        if told.kv_tokens is not None:
            self._replica.prefixes.resize(told.kv_tokens // BLOCK_TOKENS)
        load.queued_tokens = load.waiting * WAITING_TOKENS
        load.reported_at = time.monotonic()
        load.sent_tokens = 0
        self._replica.on_change()
        return True
