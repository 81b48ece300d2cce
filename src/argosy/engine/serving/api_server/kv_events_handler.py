"""`GET /kv_events`: a stream of what requests would find in this replica's prefix cache, kept up to date.

Each event is a `KvEvent` as JSON. The first one starts over, and what follows until the next such event is the
difference to what was told before. A router that loses the stream asks again and is told everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from argosy.engine.serving.api_server.generation_handlers import KEEP_ALIVE_COMMENT
from argosy.engine.serving.api_server.replica_state import ReplicaState
from argosy.engine.serving.engine_core.kv_cache_view import KvUpdate
from argosy.http_server import HttpExchange
from argosy.protocol import (
    BLOCK_NAME_BYTES,
    KvEvent,
    TokenizationKey,
    format_event,
    pack_block_names,
)

MAX_NAMES_PER_EVENT = 8192
"""Names of one event: no event keeps its writer or its reader busy for long."""

_encode = msgspec.json.Encoder().encode


class KvEventsHandler:
    """The handler."""

    def __init__(self, replica: ReplicaState) -> None:
        self._replica = replica

    async def stream_events(self, exchange: HttpExchange) -> None:
        """Tell until the client leaves or the replica drains."""
        service = self._replica.require_ready()
        reading = TokenizationKey(
            tokenizer=service.processor.tokenization_digest, block_size=service.ready.block_size
        )
        with self._replica.engine.kv_cache_view.subscribe() as reader:
            watch = exchange.listen_for_disconnect(reader.close)
            try:
                await exchange.start_stream()
                while (
                    not reader.is_closed and exchange.method != "HEAD"
                ):  # which gets no body to wait for
                    news = await reader.next_update(self._replica.config.sse_keepalive_interval_s)
                    if news is None:
                        await exchange.write(KEEP_ALIVE_COMMENT)
                        continue
                    for told in _to_events(news, reading):
                        await exchange.write(format_event(_encode(told)))
                        await asyncio.sleep(0)  # other streams go on between the pieces
                await exchange.end_stream()
            finally:
                watch.cancel()


def _to_events(news: KvUpdate, reading: TokenizationKey) -> Iterator[KvEvent]:
    if news.is_snapshot:
        yield KvEvent(reset=reading)
    for packed in _split_names(news.stored):
        yield KvEvent(stored=packed)
    for packed in _split_names(news.removed):
        yield KvEvent(removed=packed)


def _split_names(names: set[int]) -> Iterator[bytes]:
    packed, most = pack_block_names(names), MAX_NAMES_PER_EVENT * BLOCK_NAME_BYTES
    return (packed[start : start + most] for start in range(0, len(packed), most))
