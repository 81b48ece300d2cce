"""Follows what vLLM and SGLang publish of their KV blocks.

They tell what changes, not what there is: what was stored before is told again by their replay, or not at all. What
they have not told of is believed from what was sent there, as it is everywhere while nothing is told.
"""

from __future__ import annotations

import asyncio

import structlog

from argosy.gateway.backends import KvAddress, KvSource
from argosy.gateway.kv_events.event_decoder import Batches, Cleared, Removed, Stored
from argosy.gateway.kv_events.text_block_maps import (
    AGAIN_S,
    LATER_S,
    WRONG,
    TextsOf,
    TooMuchError,
    texts_of,
)
from argosy.gateway.kv_events.zmq_subscription import Feed, LostError, UnmetError
from argosy.gateway.pool import PROBE_TIMEOUT_S, Replica
from argosy.gateway.upstream import UpstreamError, get
from argosy.policy import MOST_TOLD, EngineBlocks, ExactIndex, PrefixIndex
from argosy.protocol import KvReading

SMALLEST_BLOCK = 8
"""Tokens. Smaller ones cost more to follow than they are worth: each is named for each prompt that is answered."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class EngineFollower:
    """Follows one replica."""

    def __init__(self, replica: Replica, source: KvSource, texts: TextsOf) -> None:
        """`source` is where it says that it publishes, unless `kv_events` does."""
        self._replica = replica
        self._source = source
        self._texts = texts
        self._batches = Batches(replica.model)
        self._index: ExactIndex | None = None
        """The replica's, once it has told how large its blocks are."""
        self._blocks: EngineBlocks | None = None
        self._last: int | None = None
        """Number of the batch that was taken in last."""
        self._replayed = -1
        """Number up to which batches may come again, from before the replay."""

    async def follow(self) -> float:
        """Follow until the connection is lost. In how many seconds to try again."""
        try:
            address = self._replica.kv_events or await self._find()
            if address is None:
                return LATER_S
            async with Feed(address) as feed:
                await self._catch_up(feed, 0)
                await feed.read(lambda number, payload: self._receive(feed, number, payload))
        except (LostError, UpstreamError, TimeoutError) as error:
            log.debug("kv_events_ended", replica=self._replica.name, reason=str(error))
        except (*WRONG, UnmetError) as error:
            log.warning("kv_events_not_followed", replica=self._replica.name, reason=str(error))
            return LATER_S
        finally:
            if self._index is not None:
                self._index = self._blocks = None
                self._replica.prefixes = PrefixIndex()
            self._last, self._replayed = None, -1
            self._batches = Batches(self._replica.model)
        return AGAIN_S

    async def _find(self) -> KvAddress | None:
        """Ask the server where it publishes. Raises UpstreamError, TimeoutError, or one of `WRONG`."""
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            status, body = await get(self._replica.upstream, self._source.path)
        ports = self._source.read(body) if status == 200 else None
        return None if ports is None else ports.at(self._replica.upstream.endpoint)

    async def _receive(self, feed: Feed, number: int, payload: bytes) -> None:
        if self._last is not None and number > self._last + 1:
            await self._catch_up(feed, self._last + 1)
        if number > self._replayed:
            self._replayed = -1
            self._take(number, payload)

    async def _catch_up(self, feed: Feed, start: int) -> None:
        """Take in what the server gives again."""
        async for number, payload in feed.replay(start):
            self._take(number, payload)
            self._replayed = number
            await asyncio.sleep(0)

    def _take(self, number: int, payload: bytes) -> None:
        if self._last is not None and number != self._last + 1:
            log.info("kv_events_missed", replica=self._replica.name, since=self._last, now=number)
            self._forget()
        self._last = number
        for event in self._batches.read(payload):
            match event:
                case Stored():
                    self._store(event)
                case Removed(hashes):
                    if self._index is not None and self._blocks is not None:
                        self._index.removed(self._blocks.removed(hashes))
                case Cleared():
                    self._forget()

    def _store(self, told: Stored) -> None:
        if self._index is None or self._blocks is None:
            self._index, self._blocks = self._begin(told.block_size), EngineBlocks(told.block_size)
        if told.block_size != self._blocks.block_size:
            return  # a part of a block, which no prompt but one finds
        self._index.stored(self._blocks.stored(told.hashes, told.parent, told.ids, told.salt))
        if len(self._blocks) > MOST_TOLD:
            raise TooMuchError(f"it has more than {MOST_TOLD} blocks; start it with larger ones")

    def _begin(self, block_size: int) -> ExactIndex:
        if block_size < SMALLEST_BLOCK:
            raise TooMuchError(
                f"its blocks have {block_size} tokens; start it with {SMALLEST_BLOCK} at least"
            )
        replica = self._replica
        # Those of one kind that call the model the same are taken to read alike.
        reading = KvReading(text=f"{replica.kind} {replica.model}", block_size=block_size)
        index = replica.prefixes = ExactIndex(texts_of(reading, self._texts), block_size)
        log.info("kv_events_followed", replica=replica.name, block_size=block_size)
        return index

    def _forget(self) -> None:
        """What it held is gone, or may be."""
        if self._index is not None and self._blocks is not None:
            self._index.blocks.clear()
            self._blocks = EngineBlocks(self._blocks.block_size)
        self._replica.prefixes.clear()
