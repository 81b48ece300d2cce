"""Follows what vLLM and SGLang publish of their KV blocks.

They tell what changes, not what there is: what was stored before is told again by their replay, or not at all. What
they have not told of is believed from what was sent there, as it is everywhere while nothing is told.
"""

from __future__ import annotations

import asyncio

import structlog

from argosy.gateway.backends import KvEventAddress, KvEventSource
from argosy.gateway.kv_events.event_decoder import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventDecoder,
)
from argosy.gateway.kv_events.text_block_maps import (
    KV_EVENT_ERRORS,
    RETRY_INTERVAL_S,
    UNSUPPORTED_RETRY_INTERVAL_S,
    TextBlockMaps,
    TooManyBlocksError,
    get_text_block_map,
)
from argosy.gateway.kv_events.zmq_subscription import (
    SubscribeError,
    SubscriptionLostError,
    ZmqSubscription,
)
from argosy.gateway.pool import PROBE_TIMEOUT_S, ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, fetch_path
from argosy.policy import MAX_NAMED_BLOCKS, EngineBlockNames, EstimatedPrefixIndex, EventPrefixIndex
from argosy.protocol import TokenizationKey

MIN_BLOCK_TOKENS = 8
"""Tokens. Smaller ones cost more to follow than they are worth: each is named for each prompt that is answered."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ZmqKvEventSubscriber:
    """Follows one replica."""

    def __init__(
        self, replica: ReplicaEndpoint, source: KvEventSource, text_block_maps: TextBlockMaps
    ) -> None:
        """`source` is where it says that it publishes, unless `kv_events` does."""
        self._replica = replica
        self._source = source
        self._text_block_maps = text_block_maps
        self._decoder = KvEventDecoder(replica.upstream_model)
        self._index: EventPrefixIndex | None = None
        """The replica's, once it has told how large its blocks are."""
        self._engine_blocks: EngineBlockNames | None = None
        self._last_batch: int | None = None
        """Number of the batch that was taken in last."""
        self._replayed_until = -1
        """Number up to which batches may come again, from before the replay."""

    async def run_once(self) -> float:
        """Follow until the connection is lost. In how many seconds to try again."""
        try:
            address = self._replica.kv_events or await self._discover_address()
            if address is None:
                return UNSUPPORTED_RETRY_INTERVAL_S
            async with ZmqSubscription(address) as feed:
                await self._apply_replay(feed, 0)
                await feed.receive_batches(
                    lambda number, payload: self._on_batch(feed, number, payload)
                )
        except (SubscriptionLostError, UpstreamError, TimeoutError) as error:
            log.debug("kv_events_disconnected", replica=self._replica.name, reason=str(error))
        except (*KV_EVENT_ERRORS, SubscribeError) as error:
            log.warning(
                "kv_events_subscription_failed", replica=self._replica.name, reason=str(error)
            )
            return UNSUPPORTED_RETRY_INTERVAL_S
        finally:
            if self._index is not None:
                self._index = self._engine_blocks = None
                self._replica.prefix_index = EstimatedPrefixIndex()
            self._last_batch, self._replayed_until = None, -1
            self._decoder = KvEventDecoder(self._replica.upstream_model)
        return RETRY_INTERVAL_S

    async def _discover_address(self) -> KvEventAddress | None:
        """Ask the server where it publishes. Raises UpstreamError, TimeoutError, or one of `WRONG`."""
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            status, body = await fetch_path(self._replica.upstream, self._source.path)
        ports = self._source.parse(body) if status == 200 else None
        return None if ports is None else ports.to_address(self._replica.upstream.endpoint)

    async def _on_batch(self, subscription: ZmqSubscription, number: int, payload: bytes) -> None:
        if self._last_batch is not None and number > self._last_batch + 1:
            await self._apply_replay(subscription, self._last_batch + 1)
        if number > self._replayed_until:
            self._replayed_until = -1
            self._apply_batch(number, payload)

    async def _apply_replay(self, subscription: ZmqSubscription, start: int) -> None:
        """Take in what the server gives again."""
        async for number, payload in subscription.replay_batches(start):
            self._apply_batch(number, payload)
            self._replayed_until = number
            await asyncio.sleep(0)

    def _apply_batch(self, number: int, payload: bytes) -> None:
        if self._last_batch is not None and number != self._last_batch + 1:
            log.info(
                "kv_event_batches_missed",
                replica=self._replica.name,
                since=self._last_batch,
                now=number,
            )
            self._clear_index()
        self._last_batch = number
        for event in self._decoder.decode_batch(payload):
            match event:
                case BlockStored():
                    self._apply_stored(event)
                case BlockRemoved(hashes):
                    if self._index is not None and self._engine_blocks is not None:
                        self._index.on_blocks_removed(self._engine_blocks.remove_blocks(hashes))
                case AllBlocksCleared():
                    self._clear_index()

    def _apply_stored(self, stored: BlockStored) -> None:
        if self._index is None or self._engine_blocks is None:
            self._index, self._engine_blocks = (
                self._create_index(stored.block_size),
                EngineBlockNames(stored.block_size),
            )
        if stored.block_size != self._engine_blocks.block_size:
            return  # a part of a block, which no prompt but one finds
        self._index.on_blocks_stored(
            self._engine_blocks.add_blocks(
                stored.block_hashes, stored.parent_block_hash, stored.token_ids, stored.cache_salt
            )
        )
        if len(self._engine_blocks) > MAX_NAMED_BLOCKS:
            raise TooManyBlocksError(
                f"it has more than {MAX_NAMED_BLOCKS} blocks; start it with larger ones"
            )

    def _create_index(self, block_size: int) -> EventPrefixIndex:
        if block_size < MIN_BLOCK_TOKENS:
            raise TooManyBlocksError(
                f"its blocks have {block_size} tokens; start it with {MIN_BLOCK_TOKENS} at least"
            )
        replica = self._replica
        # Those of one kind that call the model the same are taken to read alike.
        reading = TokenizationKey(
            tokenizer=f"{replica.kind} {replica.upstream_model}", block_size=block_size
        )
        index = replica.prefix_index = EventPrefixIndex(
            get_text_block_map(reading, self._text_block_maps), block_size
        )
        log.info("kv_events_subscribed", replica=replica.name, block_size=block_size)
        return index

    def _clear_index(self) -> None:
        """What it held is gone, or may be."""
        if self._index is not None and self._engine_blocks is not None:
            self._index.blocks.clear()
            self._engine_blocks = EngineBlockNames(self._engine_blocks.block_size)
        self._replica.prefix_index.clear()
