"""Follows what a replica of ours tells of its prefix cache, by a stream of its own.

The replica's side is `argosy.engine.serving.api_server.kv_events_handler`. Where there is no such stream, or while it is broken, what
the replica has is believed from what was sent there.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from argosy.gateway.kv_events.text_block_maps import (
    AGAIN_S,
    LATER_S,
    WRONG,
    TextsOf,
    TooMuchError,
    texts_of,
)
from argosy.gateway.pool import NOT_THERE, Replica
from argosy.gateway.upstream import Attempt, UpstreamError
from argosy.policy import MOST_HELD, ExactIndex, PrefixIndex
from argosy.protocol import EventParser, KvEvent, KvReading, unpack_names

PATH = b"/kv_events"
HEAD_S = 5.0
SILENCE_S = 45.0
"""A stream that is silent for longer than several of its keep-alive comments is broken."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_decode = msgspec.json.Decoder(KvEvent).decode


class EventFollower:
    """Follows one replica."""

    def __init__(self, replica: Replica, texts: TextsOf) -> None:
        self._replica = replica
        self._texts = texts
        self._events = EventParser()
        self._index: ExactIndex | None = None
        """The replica's, while it tells."""

    async def follow(self) -> float:
        """Follow until the stream ends. In how many seconds to try again."""
        self._events = EventParser()
        attempt, upstream = Attempt(time.monotonic), self._replica.upstream
        try:
            async with asyncio.timeout(HEAD_S):
                await attempt.send(upstream, upstream.request(b"GET", PATH, b"", []))
                status = await attempt.head
            if status == 200:
                await self._read(attempt)
        except (UpstreamError, TimeoutError) as error:
            log.debug("kv_events_ended", replica=self._replica.name, reason=str(error))
            return AGAIN_S
        except WRONG as error:
            log.warning("kv_events_not_followed", replica=self._replica.name, reason=str(error))
            return LATER_S
        else:
            return LATER_S if status in NOT_THERE else AGAIN_S
        finally:
            attempt.abandon("it is not read any more")
            if self._index is not None:
                self._index = None
                self._replica.prefixes = PrefixIndex()

    async def _read(self, attempt: Attempt) -> None:
        """Take in the stream until its end. Raises UpstreamError, or one of `WRONG`."""
        wrong: list[Exception] = []

        def take(body: bytes) -> None:
            try:
                self._take(body)
            except WRONG as error:
                wrong.append(error)
                attempt.abandon(str(error))

        attempt.deliver(take)
        while not attempt.end.done():
            await asyncio.wait({attempt.end}, timeout=SILENCE_S)
            if not attempt.end.done() and time.monotonic() - attempt.last > SILENCE_S:
                attempt.abandon(f"nothing came for {SILENCE_S:g} s")
        if wrong:
            raise wrong[0]
        await attempt.end

    def _take(self, body: bytes) -> None:
        for data in self._events.feed(body):
            told = _decode(data)
            if told.start is not None:
                self._begin(told.start)
            if self._index is None:
                raise ValueError("its first event does not start")
            self._index.stored(unpack_names(told.stored))
            self._index.removed(unpack_names(told.removed))
            if len(self._index.blocks) > MOST_HELD:
                raise TooMuchError(f"it has more than {MOST_HELD} blocks")

    def _begin(self, reading: KvReading) -> None:
        texts = texts_of(reading, self._texts)
        self._index = self._replica.prefixes = ExactIndex(texts, reading.block_size)
        log.info("kv_events_followed", replica=self._replica.name, block_size=reading.block_size)
