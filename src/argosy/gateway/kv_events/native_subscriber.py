"""Subscriber to the KV events of a native replica, which it sends in an HTTP stream.

The replica's side is `argosy.engine.serving.api_server.kv_events_handler`. Without a working stream, the gateway
estimates the contents of the replica's prefix cache from the prompts sent to it.
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
)
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.policy import (
    MAX_INDEXED_BLOCKS,
    UNSUPPORTED_STATUSES,
    EstimatedPrefixIndex,
    EventPrefixIndex,
    TextBlockMap,
)
from argosy.protocol import EventParser, KvEvent, TokenizationKey, unpack_block_names

KV_EVENTS_PATH = b"/kv_events"
RESPONSE_HEAD_TIMEOUT_S = 5.0
STREAM_IDLE_TIMEOUT_S = 45.0
"""Silence after which a stream counts as broken. Keep-alive comments arrive several times in this period."""
MAX_BYTES_PER_TURN = 16 * 1024
"""Bytes of a stream that are read before other work of the event loop goes on."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_decode = msgspec.json.Decoder(KvEvent).decode


class NativeKvEventSubscriber:
    """Subscriber to the KV events of one native replica."""

    def __init__(self, replica: ReplicaEndpoint, text_block_maps: TextBlockMaps) -> None:
        self._replica = replica
        self._text_block_maps = text_block_maps
        self._event_parser = EventParser()
        self._index: EventPrefixIndex | None = None
        """Index of the replica while the subscription is active."""

    async def run_once(self) -> float:
        """Subscribe until the stream ends and return the time in seconds to wait before the next try."""
        self._event_parser = EventParser()
        response, upstream = UpstreamResponse(time.monotonic), self._replica.upstream
        try:
            async with asyncio.timeout(RESPONSE_HEAD_TIMEOUT_S):
                await response.send(
                    upstream, upstream.build_request(b"GET", KV_EVENTS_PATH, b"", [])
                )
                status = await response.status
            if status == 200:
                await self._read_stream(response)
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
            response.abort("the subscription ended")
            if self._index is not None:
                self._index = None
                self._replica.prefix_index = EstimatedPrefixIndex()

    async def _read_stream(self, response: UpstreamResponse) -> None:
        """Apply the events of the stream until its end, a few at a time, so that none of them holds up other requests.

        Raises UpstreamError, TimeoutError if the stream is silent, or one of `KV_EVENT_ERRORS`.
        """
        pieces = asyncio.Queue[bytes]()

        def on_piece(body: bytes) -> None:
            response.pause_reading()
            pieces.put_nowait(body)

        response.stream_body(on_piece)
        response.end_of_body.add_done_callback(lambda _: pieces.put_nowait(b""))
        while True:
            async with asyncio.timeout(STREAM_IDLE_TIMEOUT_S):
                body = await pieces.get()
            if not body:
                await response.end_of_body
                return
            for start in range(0, len(body), MAX_BYTES_PER_TURN):
                self._apply_events(body[start : start + MAX_BYTES_PER_TURN])
                await asyncio.sleep(0)
            if pieces.empty():
                response.resume_reading()

    def _apply_events(self, body: bytes) -> None:
        for data in self._event_parser.feed(body):
            event = _decode(data)
            if event.reset is not None:
                self._create_index(event.reset)
            if self._index is None:
                raise ValueError("the first event has no `reset`")
            self._index.on_blocks_stored(unpack_block_names(event.stored))
            self._index.on_blocks_removed(unpack_block_names(event.removed))
            if len(self._index.blocks) > MAX_INDEXED_BLOCKS:
                raise ValueError(f"the replica has more than {MAX_INDEXED_BLOCKS} blocks")

    def _create_index(self, tokenization_key: TokenizationKey) -> None:
        text_block_map = self._text_block_maps.setdefault(tokenization_key, TextBlockMap())
        is_first = self._index is None
        self._index = self._replica.prefix_index = EventPrefixIndex(
            text_block_map, tokenization_key.block_size
        )
        if is_first:  # a replica decides how often it resets
            log.info(
                "kv_events_subscribed",
                replica=self._replica.name,
                block_size=tokenization_key.block_size,
            )
