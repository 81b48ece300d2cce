"""`GET /kv_events`: a stream of what requests would find in this replica's prefix cache, kept up to date.

Each event is a `KvEvent` as JSON. The first one starts over, and what follows until the next such event is the
difference to what was told before. A router that loses the stream asks again and is told everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from argosy.engine.serving.api_server.generation_handlers import KEEP_ALIVE
from argosy.engine.serving.api_server.replica_state import Replica
from argosy.engine.serving.engine_core.kv_cache_view import KvNews
from argosy.http_server import Exchange
from argosy.protocol import NAME_BYTES, KvEvent, KvReading, event, pack_names

MOST_NAMES = 8192
"""Names of one event: no event keeps its writer or its reader busy for long."""

_encode = msgspec.json.Encoder().encode


class KvEvents:
    """The handler."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def follow(self, exchange: Exchange) -> None:
        """Tell until the client leaves or the replica drains."""
        service = self._replica.service()
        reading = KvReading(text=service.door.digest, block_size=service.ready.block_size)
        with self._replica.engine.kv.read() as reader:
            watch = exchange.on_disconnect(reader.end)
            try:
                await exchange.start_stream()
                while (
                    not reader.over and exchange.method != "HEAD"
                ):  # which gets no body to wait for
                    news = await reader.news(self._replica.config.keep_alive_s)
                    if news is None:
                        await exchange.write(KEEP_ALIVE)
                        continue
                    for told in _events(news, reading):
                        await exchange.write(event(_encode(told)))
                        await asyncio.sleep(0)  # other streams go on between the pieces
                await exchange.end_stream()
            finally:
                watch.cancel()


def _events(news: KvNews, reading: KvReading) -> Iterator[KvEvent]:
    if news.whole:
        yield KvEvent(start=reading)
    for packed in _pieces(news.stored):
        yield KvEvent(stored=packed)
    for packed in _pieces(news.removed):
        yield KvEvent(removed=packed)


def _pieces(names: set[int]) -> Iterator[bytes]:
    packed, most = pack_names(names), MOST_NAMES * NAME_BYTES
    return (packed[start : start + most] for start in range(0, len(packed), most))
