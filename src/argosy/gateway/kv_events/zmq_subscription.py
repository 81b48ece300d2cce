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

from argosy.gateway.backends import KvAddress

HANDSHAKE_S = 5.0
REPLAY_S = 10.0
"""From one piece of a replay to the next."""
HEARTBEAT_MS = 5_000
SILENCE_MS = 15_000
"""A publisher that leaves heartbeats unanswered for so long is lost."""
MOST_WAITING = 10_000
"""Batches that wait here; then the publisher drops some, and their numbers are missed."""
LARGEST_BATCH = 64 * 1024 * 1024
MOST_SOCKETS = 1 << 14
"""Three for each replica, one more while it replays."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_ENDS = frozenset(
    {
        zmq.EVENT_CLOSED,
        zmq.EVENT_DISCONNECTED,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    }
)
_NO_MORE = b"\xff" * 8
"""The number at the end of a replay."""

Take = Callable[[int, bytes], Awaitable[None]]
"""Gets a batch and its number."""


class UnmetError(Exception):
    """Nobody publishes there, or there is no socket left to ask with."""


class LostError(Exception):
    """There is no connection any more."""


class Feed:
    """Use it as a context, from one event loop. Raises UnmetError."""

    def __init__(self, address: KvAddress) -> None:
        self._address = address
        self._socket = _socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._monitor = self._socket.get_monitor_socket()
        self._lost: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        """Connect. Raises UnmetError."""
        connected = False
        try:
            connected = await self._connect()
        finally:
            if not connected:
                self._close()
        if not connected:
            raise UnmetError(f"{self._address.endpoint} cannot be connected to")
        self._lost = asyncio.ensure_future(self._end())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave."""
        if self._lost is not None:
            self._lost.cancel()
            await asyncio.wait({self._lost})
        self._close()

    async def read(self, take: Take) -> None:
        """Give `take` all that comes, until the connection is lost.

        Raises LostError, ValueError for what is no batch, or what `take` raises.
        """
        assert self._lost is not None  # noqa: S101 - it is a context
        reading = asyncio.ensure_future(self._read(take))
        try:
            await asyncio.wait({reading, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
        except zmq.ZMQError as error:
            raise LostError(str(error)) from error
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        raise LostError("the connection was lost")

    async def replay(self, start: int) -> AsyncIterator[tuple[int, bytes]]:
        """Batches from this number on, as far as they are given again.

        Raises UnmetError, or ValueError for what is no batch.
        """
        if self._address.replay is None:
            return
        socket = _socket(zmq.DEALER)
        try:
            socket.connect(self._address.replay)
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                # Some put the topic before the number, some do not.
                if len(frames) < 3 or len(frames[-2]) != 8:
                    raise ValueError("its replay is no batch")
                if frames[-2] == _NO_MORE:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        except (TimeoutError, zmq.ZMQError) as error:
            log.info("kv_events_not_replayed", address=self._address.replay, reason=repr(error))
        finally:
            socket.close(linger=0)

    async def _connect(self) -> bool:
        try:
            self._socket.connect(self._address.endpoint)
            async with asyncio.timeout(HANDSHAKE_S):
                while (event := await self._event()) not in _ENDS:
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        return True
        except (TimeoutError, zmq.ZMQError):
            pass
        return False

    async def _read(self, take: Take) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                raise ValueError("it publishes something else")
            await take(int.from_bytes(frames[1], "big"), frames[2])
            await asyncio.sleep(0)  # what has come already is received without a pause

    async def _end(self) -> None:
        while await self._event() not in _ENDS:
            pass

    async def _event(self) -> int:
        event: int = (await recv_monitor_message(self._monitor))["event"]
        return event

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


@functools.cache
def _context() -> zmq.asyncio.Context:
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
    return context


def _socket(kind: int) -> zmq.asyncio.Socket:
    """Raises UnmetError when there are too many."""
    try:
        socket = _context().socket(kind)
    except zmq.ZMQError as error:
        raise UnmetError(str(error)) from error
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.RECONNECT_IVL, -1),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
        (zmq.RCVHWM, MOST_WAITING),
        (zmq.MAXMSGSIZE, LARGEST_BATCH),
        (zmq.IPV6, 1),
    ):
        socket.setsockopt(option, value)
    return socket
