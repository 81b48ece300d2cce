"""KV event publisher as in vLLM and SGLang: ZeroMQ, numbered batches and a replay of the last ones.

Never compared with theirs; `tests/integration/test_vllm_kv_events.py` runs with vLLM's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

Event = dict[str, Any]
STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
STORED_TOO = ("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind")
REMOVED = ("block_hashes", "medium", "group_idx")
CLEARED: Event = {"type": "AllBlocksCleared"}


def blocks_stored(
    hashes: Sequence[int | bytes],
    ids: Sequence[int],
    parent: int | bytes | None = None,
    /,
    **more: object,
) -> Event:
    """Build an event for stored blocks, with the tokens divided evenly among them."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(ids),
        "block_size": len(ids) // max(1, len(hashes)),
        "lora_id": None,
        "medium": "GPU",
    } | more


def blocks_removed(*hashes: int | bytes, **more: object) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | more


def to_array(event: Event) -> list[Any]:
    """Convert an event to the array format of older versions. Unset fields at the end are left out."""
    names = (*STORED, *STORED_TOO) if event["type"] == "BlockStored" else REMOVED
    values = [event.get(name) for name in (names if len(event) > 1 else ())]
    if "cache_salt" in event:
        values = [*values[: len(STORED)], {"cache_salt": event["cache_salt"]}]
    while values and values[-1] is None:
        values.pop()
    return [event["type"], *values]


def encode_batch(*events: Event | list[Any]) -> bytes:
    """Encode a batch as a payload."""
    return msgspec.msgpack.encode([1795311090.5, events, 0])


class KvEventPublisher:
    """Publisher of one server.

    Args:
        endpoint: ZeroMQ address to publish at.
        topics: Whether the replay sends the topic before the number.
    """

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", *, topics: bool = True) -> None:
        context = zmq.asyncio.Context.instance()
        self._publishing = context.socket(zmq.XPUB)
        self._publishing.setsockopt(zmq.XPUB_VERBOSE, 1)  # reports a second subscriber too
        self._replaying = context.socket(zmq.ROUTER)
        for socket, address in (
            (self._publishing, endpoint),
            (self._replaying, "tcp://127.0.0.1:*"),
        ):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self.endpoint = self._publishing.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._replaying.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replayable: deque[tuple[int, bytes]] = deque(maxlen=100)
        """Batches that can be replayed."""
        self._topics = [b""] if topics else []
        self._next = 0

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    async def wait_for_subscriber(self) -> None:
        """Wait for a subscriber."""
        while not (await self._publishing.recv()).startswith(b"\x01"):
            pass

    async def publish(self, *events: Event | list[Any]) -> None:
        await self.send_payload(encode_batch(*events))

    async def send_payload(self, payload: bytes) -> None:
        number = self.lose_batch(payload)
        await self._publishing.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    def lose_batch(self, payload: bytes) -> int:
        """Number a batch without publishing it, so that only a replay has it, and return the number."""
        number, self._next = self._next, self._next + 1
        self.replayable.append((number, payload))
        return number

    async def send_frames(self, *frames: bytes) -> None:
        await self._publishing.send_multipart(frames)

    async def serve(self) -> None:
        """Serve replay requests."""
        while True:
            client, delimiter, start = await self._replaying.recv_multipart()
            for number, payload in [*self.replayable, (-1, b"")]:
                if number < 0 or number >= int.from_bytes(start, "big"):
                    frames = [number.to_bytes(8, "big", signed=True), payload]
                    await self._replaying.send_multipart(
                        [client, delimiter, *self._topics, *frames]
                    )

    def close(self) -> None:
        self._publishing.close(linger=0)
        self._replaying.close(linger=0)


@contextlib.asynccontextmanager
async def kv_event_publisher(
    endpoint: str = "tcp://127.0.0.1:*", *, topics: bool = True
) -> AsyncIterator[KvEventPublisher]:
    """Run a publisher that replays."""
    publisher = KvEventPublisher(endpoint, topics=topics)
    task = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.wait({task})
        publisher.close()
