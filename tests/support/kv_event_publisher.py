"""A publisher of KV cache events as vLLM's and SGLang's are: ZeroMQ, numbered batches, a replay of the last ones."""

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


def stored(
    hashes: Sequence[int | bytes],
    ids: Sequence[int],
    parent: int | bytes | None = None,
    /,
    **more: object,
) -> Event:
    """Blocks of as many tokens each as there are for one."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(ids),
        "block_size": len(ids) // max(1, len(hashes)),
        "lora_id": None,
        "medium": "GPU",
    } | more


def removed(*hashes: int | bytes, **more: object) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | more


def as_array(event: Event) -> list[Any]:
    """The same in the shape that both engines had before; what is not set at the end is left out."""
    names = (*STORED, *STORED_TOO) if event["type"] == "BlockStored" else REMOVED
    values = [event.get(name) for name in (names if len(event) > 1 else ())]
    if "cache_salt" in event:
        values = [*values[: len(STORED)], {"cache_salt": event["cache_salt"]}]
    while values and values[-1] is None:
        values.pop()
    return [event["type"], *values]


def batch(*events: Event | list[Any]) -> bytes:
    """A payload."""
    return msgspec.msgpack.encode([1795311090.5, events, 0])


class Publisher:
    """One server's; `topics` says whether its replay names the topic before the number."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", *, topics: bool = True) -> None:
        context = zmq.asyncio.Context.instance()
        self._publishing = context.socket(zmq.XPUB)
        self._publishing.setsockopt(zmq.XPUB_VERBOSE, 1)  # of a second subscriber it tells, too
        self._replaying = context.socket(zmq.ROUTER)
        for socket, address in (
            (self._publishing, endpoint),
            (self._replaying, "tcp://127.0.0.1:*"),
        ):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self.endpoint = self._publishing.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._replaying.getsockopt_string(zmq.LAST_ENDPOINT)
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=100)
        """What can be replayed."""
        self._topics = [b""] if topics else []
        self._next = 0

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    async def subscribed(self) -> None:
        """Wait for a subscriber."""
        while not (await self._publishing.recv()).startswith(b"\x01"):
            pass

    async def publish(self, *events: Event | list[Any]) -> None:
        await self.send(batch(*events))

    async def send(self, payload: bytes) -> None:
        number = self.miss(payload)
        await self._publishing.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    def miss(self, payload: bytes) -> int:
        """A batch that nobody gets, except by a replay; its number."""
        number, self._next = self._next, self._next + 1
        self.kept.append((number, payload))
        return number

    async def raw(self, *frames: bytes) -> None:
        await self._publishing.send_multipart(frames)

    async def serve(self) -> None:
        """Replay to whoever asks."""
        while True:
            client, delimiter, start = await self._replaying.recv_multipart()
            for number, payload in [*self.kept, (-1, b"")]:
                if number < 0 or number >= int.from_bytes(start, "big"):
                    told = [number.to_bytes(8, "big", signed=True), payload]
                    await self._replaying.send_multipart([client, delimiter, *self._topics, *told])

    def close(self) -> None:
        self._publishing.close(linger=0)
        self._replaying.close(linger=0)


@contextlib.asynccontextmanager
async def publishing(
    endpoint: str = "tcp://127.0.0.1:*", *, topics: bool = True
) -> AsyncIterator[Publisher]:
    """A publisher that replays."""
    publisher = Publisher(endpoint, topics=topics)
    task = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.wait({task})
        publisher.close()
