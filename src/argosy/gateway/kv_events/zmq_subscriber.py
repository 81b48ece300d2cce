"""Subscriber to the KV cache events of vLLM and SGLang, which they publish over ZeroMQ.

These engines publish changes and no snapshot. Blocks stored before the subscription are reported only in a replay, if
at all. For unreported blocks the gateway relies on its estimate from the prompts that it sent, as it does for replicas
without events.
"""

from __future__ import annotations

import asyncio

import structlog

from argosy.deployment import KvEventAddress
from argosy.gateway.backends import KvEventPorts, ReportSource
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
)
from argosy.gateway.kv_events.zmq_subscription import (
    SubscribeError,
    SubscriptionLostError,
    ZmqSubscription,
)
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, fetch_path
from argosy.policy import (
    MAX_NAMED_BLOCKS,
    PROBE_TIMEOUT_S,
    EngineBlockNames,
    EstimatedPrefixIndex,
    EventPrefixIndex,
    TextBlockMap,
)
from argosy.protocol import TokenizationKey

MIN_BLOCK_TOKENS = 8
"""Minimum block size in tokens. Smaller blocks cost too much, because every prompt reports each of its blocks."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ZmqKvEventSubscriber:
    """Subscriber to the KV cache events of one vLLM or SGLang replica."""

    def __init__(
        self,
        replica: ReplicaEndpoint,
        source: ReportSource[KvEventPorts | None],
        text_block_maps: TextBlockMaps,
    ) -> None:
        """Create a subscriber. `source` reports the address if the setting `kv_events` does not."""
        self._replica = replica
        self._source = source
        self._text_block_maps = text_block_maps
        self._decoder = KvEventDecoder(replica.upstream_model)
        self._index: EventPrefixIndex | None = None
        """Index of the replica, created when the first event reports the block size."""
        self._engine_blocks: EngineBlockNames | None = None
        self._last_batch: int | None = None
        """Number of the last applied batch."""
        self._replayed_until = -1
        """Number of the last replayed batch. Batches up to it were queued before the replay and are duplicates."""

    async def run_once(self) -> float:
        """Subscribe until the connection is lost and return the time in seconds to wait before the next try."""
        try:
            address = self._replica.kv_events or await self._discover_address()
            if address is None:
                return UNSUPPORTED_RETRY_INTERVAL_S
            async with ZmqSubscription(address) as subscription:
                await self._apply_replay(subscription, 0)
                await subscription.receive_batches(
                    lambda number, payload: self._on_batch(subscription, number, payload)
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
        """Fetch the address at which the server publishes; None if it reports none.

        Raises:
            UpstreamError, TimeoutError: The server did not answer.
            ValueError, msgspec.DecodeError: The report is malformed.
        """
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
        """Apply the batches that the server replays from number `start`."""
        async for number, payload in subscription.replay_batches(start):
            self._apply_batch(number, payload)
            self._replayed_until = number
            await asyncio.sleep(0)

    def _apply_batch(self, number: int, payload: bytes) -> None:
        if self._last_batch is not None and number != self._last_batch + 1:
            log.info(
                "kv_event_batches_missed",
                replica=self._replica.name,
                last_batch=self._last_batch,
                batch=number,
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
            return  # an incomplete block, which only the identical prompt can hit
        self._index.on_blocks_stored(
            self._engine_blocks.add_blocks(
                stored.block_hashes, stored.parent_block_hash, stored.token_ids, stored.cache_salt
            )
        )
        if len(self._engine_blocks) > MAX_NAMED_BLOCKS:
            raise ValueError(
                f"the replica has more than {MAX_NAMED_BLOCKS} blocks. Start it with larger blocks."
            )

    def _create_index(self, block_size: int) -> EventPrefixIndex:
        if block_size < MIN_BLOCK_TOKENS:
            raise ValueError(
                f"the replica's blocks have {block_size} tokens. "
                f"Start it with a block size of at least {MIN_BLOCK_TOKENS}."
            )
        replica = self._replica
        # Assume that replicas of one kind with the same model name tokenize alike.
        tokenization_key = TokenizationKey(
            tokenizer=f"{replica.kind} {replica.upstream_model}", block_size=block_size
        )
        index = replica.prefix_index = EventPrefixIndex(
            self._text_block_maps.setdefault(tokenization_key, TextBlockMap()), block_size
        )
        log.info("kv_events_subscribed", replica=replica.name, block_size=block_size)
        return index

    def _clear_index(self) -> None:
        """Forget all blocks, because the replica removed them or events about them were missed."""
        if self._index is not None and self._engine_blocks is not None:
            self._index.blocks.clear()
            self._engine_blocks = EngineBlockNames(self._engine_blocks.block_size)
        self._replica.prefix_index.clear()
