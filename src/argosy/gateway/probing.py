"""Asks each replica how it is: its load, whether it takes requests and, once it failed, whether it is back."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from argosy.gateway.attempt import Attempt
from argosy.gateway.replicas import Replica
from argosy.gateway.upstream import UpstreamError
from argosy.policy import BLOCK_TOKENS, Outcome
from argosy.protocol import Load

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

OURS_EACH_S = 0.5
OTHERS_EACH_S = 5.0
TIMEOUT_S = 2.0


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    """What is read of `/v1/models`; vLLM and SGLang tell how long a prompt may be."""

    data: list[_Card]


class Prober:
    """Probes one replica for as long as the gateway runs."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._path = b"/load" if replica.kind == "argosy" else b"/v1/models"
        self._each_s = OURS_EACH_S if replica.kind == "argosy" else OTHERS_EACH_S
        self._step = 0
        """The engine's, when it told last."""

    async def run(self) -> None:
        """Probe again and again."""
        while True:
            await self.probe()
            await asyncio.sleep(self._each_s)

    async def probe(self) -> None:
        """Ask once and take in the answer."""
        replica, breaker = self._replica, self._replica.breaker
        probing = breaker.wants_probe(time.monotonic())
        if not breaker.closed and not probing:
            return
        if probing:
            breaker.probe_sent()
        outcome = Outcome.FAILURE
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await self._ask()
            outcome = Outcome.SUCCESS if status < 500 else Outcome.FAILURE
            if status == 200:
                self._learn(body)
        except (UpstreamError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("probe_failed", replica=replica.name, reason=str(error))
        finally:
            if probing or outcome is Outcome.FAILURE:
                breaker.record(outcome, time.monotonic())

    async def _ask(self) -> tuple[int, bytes]:
        attempt = Attempt(time.monotonic)
        upstream = self._replica.upstream
        try:
            await attempt.send(upstream, upstream.request(b"GET", self._path, b"", []))
            return await attempt.head, await attempt.whole()
        except BaseException:
            attempt.abandon("the probe took too long")
            raise

    def _learn(self, body: bytes) -> None:
        """Take in what it said. Raises msgspec.DecodeError."""
        if self._replica.kind == "argosy":
            self._learn_load(msgspec.json.decode(body, type=Load))
        else:
            cards = msgspec.json.decode(body, type=_Cards).data
            known = {card.id: card.max_model_len for card in cards}
            self._replica.max_model_len = known.get(self._replica.model)

    def _learn_load(self, told: Load) -> None:
        replica, load = self._replica, self._replica.load
        replica.taking = told.state == "ready"
        replica.max_model_len = told.max_model_len or None
        replica.tells_speed = told.prefill_tokens_per_s > 0
        if told.step < self._step:
            replica.prefixes.clear()  # the engine was started anew
        self._step = told.step
        replica.prefixes.resize(told.kv_blocks_total * told.block_size // BLOCK_TOKENS)
        load.queued_tokens = told.queued_tokens
        load.running, load.waiting = told.running, told.waiting
        load.capacity = told.max_seqs
        load.kv_used = told.kv_blocks_used / max(1, told.kv_blocks_total)
        load.prefill_rate = told.prefill_tokens_per_s or load.prefill_rate
        load.decode_s = told.decode_s or load.decode_s
        load.reported_at = time.monotonic()
        load.sent_tokens = 0
        replica.on_change()
