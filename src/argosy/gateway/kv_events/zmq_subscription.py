"""A subscription to a server's published KV cache events, over ZeroMQ: one connection, from its handshake to its loss.

vLLM and SGLang publish `[topic, number, batch]`, numbers without gaps from 0 in big-endian, and may give again, from a
number on, what they still have. A connection that is lost is not made again beneath: it may be another server's then.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from argosy.gateway.backends import KvEventAddress

HANDSHAKE_TIMEOUT_S = 5.0
REPLAY_TIMEOUT_S = 10.0
"""From one piece of a replay to the next."""
HEARTBEAT_INTERVAL_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""A publisher that leaves heartbeats unanswered for so long is lost."""
MAX_QUEUED_BATCHES = 10_000
"""Batches that wait here; then the publisher drops some, and their numbers are missed."""
MAX_BATCH_BYTES = 64 * 1024 * 1024
MAX_SOCKETS = 1 << 14
"""Three for each replica, one more while it replays."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_DISCONNECT_EVENTS = frozenset(
    {
        zmq.EVENT_CLOSED,
        zmq.EVENT_DISCONNECTED,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    }
)
_REPLAY_END = b"\xff" * 8
"""The number at the end of a replay."""

BatchHandler = Callable[[int, bytes], Awaitable[None]]
"""Gets a batch and its number."""


class SubscribeError(Exception):
    """Nobody publishes there, or there is no socket left to ask with."""


class SubscriptionLostError(Exception):
    """There is no connection any more."""


class ZmqSubscription:
    """Use it as a context, from one event loop. Raises UnmetError."""

    def __init__(self, address: KvEventAddress) -> None:
        self._address = address
        self._socket = _open_socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._monitor = self._socket.get_monitor_socket()
        self._disconnected: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        """Connect. Raises UnmetError."""
        connected = False
        try:
            connected = await self._connect()
        finally:
            if not connected:
                self._close()
        if not connected:
            raise SubscribeError(f"{self._address.endpoint} cannot be connected to")
        self._disconnected = asyncio.ensure_future(self._wait_for_disconnect())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave."""
        if self._disconnected is not None:
            self._disconnected.cancel()
            await asyncio.wait({self._disconnected})
        self._close()

    async def receive_batches(self, on_batch: BatchHandler) -> None:
        """Give `take` all that comes, until the connection is lost.

        Raises LostError, ValueError for what is no batch, or what `take` raises.
        """
        assert self._disconnected is not None  # noqa: S101 - it is a context
        reading = asyncio.ensure_future(self._receive_until_cancelled(on_batch))
        try:
            await asyncio.wait({reading, self._disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
        except zmq.ZMQError as error:
            raise SubscriptionLostError(str(error)) from error
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        raise SubscriptionLostError("the connection was lost")

    async def replay_batches(self, start: int) -> AsyncIterator[tuple[int, bytes]]:
        """Batches from this number on, as far as they are given again.

        Raises UnmetError, or ValueError for what is no batch.
        """
        if self._address.replay is None:
            return
        socket = _open_socket(zmq.DEALER)
        try:
            socket.connect(self._address.replay)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                # Some put the topic before the number, some do not.
                if len(frames) < 3 or len(frames[-2]) != 8:
                    raise ValueError("its replay is no batch")
                if frames[-2] == _REPLAY_END:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        except (TimeoutError, zmq.ZMQError) as error:
            log.info("kv_events_replay_failed", address=self._address.replay, reason=repr(error))
        finally:
            socket.close(linger=0)

    async def _connect(self) -> bool:
        try:
            self._socket.connect(self._address.endpoint)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                while (event := await self._next_monitor_event()) not in _DISCONNECT_EVENTS:
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        return True
        except (TimeoutError, zmq.ZMQError):
            pass
        return False

    async def _receive_until_cancelled(self, on_batch: BatchHandler) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                raise ValueError("it publishes something else")
            await on_batch(int.from_bytes(frames[1], "big"), frames[2])
            await asyncio.sleep(0)  # what has come already is received without a pause

    async def _wait_for_disconnect(self) -> None:
        while await self._next_monitor_event() not in _DISCONNECT_EVENTS:
            pass

    async def _next_monitor_event(self) -> int:
        event: int = (await recv_monitor_message(self._monitor))["event"]
        return event

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


@functools.cache
def _zmq_context() -> zmq.asyncio.Context:
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def _open_socket(kind: int) -> zmq.asyncio.Socket:
    """Raises UnmetError when there are too many."""
    try:
        socket = _zmq_context().socket(kind)
    except zmq.ZMQError as error:
        raise SubscribeError(str(error)) from error
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.RECONNECT_IVL, -1),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.RCVHWM, MAX_QUEUED_BATCHES),
        (zmq.MAXMSGSIZE, MAX_BATCH_BYTES),
        (zmq.IPV6, 1),
    ):
        socket.setsockopt(option, value)
    return socket
