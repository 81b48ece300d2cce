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
    KV_EVENT_ERRORS,
    RETRY_INTERVAL_S,
    UNSUPPORTED_RETRY_INTERVAL_S,
    TextBlockMaps,
    TooManyBlocksError,
    get_text_block_map,
)
from argosy.gateway.pool import UNSUPPORTED_STATUSES, ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.policy import MAX_INDEXED_BLOCKS, EstimatedPrefixIndex, EventPrefixIndex
from argosy.protocol import EventParser, KvEvent, TokenizationKey, unpack_block_names

KV_EVENTS_PATH = b"/kv_events"
RESPONSE_HEAD_TIMEOUT_S = 5.0
STREAM_IDLE_TIMEOUT_S = 45.0
"""A stream that is silent for longer than several of its keep-alive comments is broken."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_decode = msgspec.json.Decoder(KvEvent).decode


class NativeKvEventSubscriber:
    """Follows one replica."""

    def __init__(self, replica: ReplicaEndpoint, text_block_maps: TextBlockMaps) -> None:
        self._replica = replica
        self._text_block_maps = text_block_maps
        self._event_parser = EventParser()
        self._index: EventPrefixIndex | None = None
        """The replica's, while it tells."""

    async def run_once(self) -> float:
        """Follow until the stream ends. In how many seconds to try again."""
        self._event_parser = EventParser()
        attempt, upstream = UpstreamResponse(time.monotonic), self._replica.upstream
        try:
            async with asyncio.timeout(RESPONSE_HEAD_TIMEOUT_S):
                await attempt.send(
                    upstream, upstream.build_request(b"GET", KV_EVENTS_PATH, b"", [])
                )
                status = await attempt.status
            if status == 200:
                await self._read_stream(attempt)
        except (UpstreamError, TimeoutError) as error:
            log.debug("kv_events_disconnected", replica=self._replica.name, reason=str(error))
            return RETRY_INTERVAL_S
        except KV_EVENT_ERRORS as error:
            log.warning(
                "kv_events_subscription_failed", replica=self._replica.name, reason=str(error)
            )
            return UNSUPPORTED_RETRY_INTERVAL_S
        else:
            return (
                UNSUPPORTED_RETRY_INTERVAL_S if status in UNSUPPORTED_STATUSES else RETRY_INTERVAL_S
            )
        finally:
            attempt.abort("it is not read any more")
            if self._index is not None:
                self._index = None
                self._replica.prefix_index = EstimatedPrefixIndex()

    async def _read_stream(self, response: UpstreamResponse) -> None:
        """Take in the stream until its end. Raises UpstreamError, or one of `WRONG`."""
        wrong: list[Exception] = []

        def take(body: bytes) -> None:
            try:
                self._apply_events(body)
            except KV_EVENT_ERRORS as error:
                wrong.append(error)
                response.abort(str(error))

        response.stream_body(take)
        while not response.end_of_body.done():
            await asyncio.wait({response.end_of_body}, timeout=STREAM_IDLE_TIMEOUT_S)
            if (
                not response.end_of_body.done()
                and time.monotonic() - response.last_activity_at > STREAM_IDLE_TIMEOUT_S
            ):
                response.abort(f"nothing came for {STREAM_IDLE_TIMEOUT_S:g} s")
        if wrong:
            raise wrong[0]
        await response.end_of_body

    def _apply_events(self, body: bytes) -> None:
        for data in self._event_parser.feed(body):
            told = _decode(data)
            if told.reset is not None:
                self._create_index(told.reset)
            if self._index is None:
                raise ValueError("its first event does not start")
            self._index.on_blocks_stored(unpack_block_names(told.stored))
            self._index.on_blocks_removed(unpack_block_names(told.removed))
            if len(self._index.blocks) > MAX_INDEXED_BLOCKS:
                raise TooManyBlocksError(f"it has more than {MAX_INDEXED_BLOCKS} blocks")

    def _create_index(self, tokenization_key: TokenizationKey) -> None:
        texts = get_text_block_map(tokenization_key, self._text_block_maps)
        self._index = self._replica.prefix_index = EventPrefixIndex(
            texts, tokenization_key.block_size
        )
        log.info(
            "kv_events_subscribed",
            replica=self._replica.name,
            block_size=tokenization_key.block_size,
        )
