"""`GET /kv_events`: stream of the replica's prefix cache contents for routers.

Each event is a `KvEvent` as JSON. The first event resets the reader's state. Later events are differences to the events
since the last reset. After a disconnect the router connects again and receives a new reset.
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
"""Maximum number of block names per event, which bounds the time to encode and to process one event."""

_encode = msgspec.json.Encoder().encode


async def stream_kv_events(replica: ReplicaState, exchange: HttpExchange) -> None:
    """Handle `GET /kv_events`: stream events until the client disconnects or the replica drains."""
    model = replica.require_ready()
    tokenization_key = TokenizationKey(
        tokenizer=model.processor.tokenization_digest, block_size=model.ready.block_size
    )
    with replica.engine.kv_cache_view.subscribe() as reader:
        watch = exchange.listen_for_disconnect(reader.close)
        try:
            await exchange.start_stream()
            # a response to HEAD has no body
            while not reader.is_closed and exchange.method != "HEAD":
                update = await reader.next_update(replica.config.sse_keepalive_interval_s)
                if update is None:
                    await exchange.write(KEEP_ALIVE_COMMENT)
                    continue
                for event in _to_events(update, tokenization_key):
                    await exchange.write(format_event(_encode(event)))
                    await asyncio.sleep(0)  # let other streams run between events
            await exchange.end_stream()
        finally:
            watch.cancel()


def _to_events(update: KvUpdate, tokenization_key: TokenizationKey) -> Iterator[KvEvent]:
    if update.is_snapshot:
        yield KvEvent(reset=tokenization_key)
    for names in _split_names(update.stored):
        yield KvEvent(stored=names)
    for names in _split_names(update.removed):
        yield KvEvent(removed=names)


def _split_names(names: set[int]) -> Iterator[bytes]:
    packed, max_bytes = pack_block_names(names), MAX_NAMES_PER_EVENT * BLOCK_NAME_BYTES
    return (packed[start : start + max_bytes] for start in range(0, len(packed), max_bytes))
