"""ZeroMQ subscription to a server's KV cache events: one connection, from its handshake to its loss.

vLLM and SGLang publish messages of `[topic, number, batch]`. Numbers are big-endian and increase from 0 without gaps. A
server may replay the batches that it still has, from a given number. ZeroMQ does not reconnect a lost connection here,
because another server may have taken over the address.
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

from argosy.deployment import KvEventAddress

HANDSHAKE_TIMEOUT_S = 5.0
REPLAY_TIMEOUT_S = 10.0
"""Maximum time between two messages of a replay."""
HEARTBEAT_INTERVAL_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""Time without an answer to heartbeats after which the connection counts as lost."""
MAX_QUEUED_BATCHES = 10_000
"""Maximum number of received batches in the queue. Beyond it the publisher drops batches, which leaves a gap."""
MAX_BATCH_BYTES = 64 * 1024 * 1024
MAX_SOCKETS = 1 << 14
"""Maximum number of ZeroMQ sockets. Each replica needs three, and one more during a replay."""

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
"""Number of the message that ends a replay."""

BatchHandler = Callable[[int, bytes], Awaitable[None]]
"""Callback for a batch: its number and its payload."""


class SubscribeError(Exception):
    """No KV event publisher at the address, or no ZeroMQ socket left."""


class SubscriptionLostError(Exception):
    """The connection to the publisher was lost."""


class ZmqSubscription:
    """Subscription to one address, as an async context manager.

    Not thread-safe: use it from one event loop. The constructor raises SubscribeError.
    """

    def __init__(self, address: KvEventAddress) -> None:
        self._address = address
        self._socket = _open_socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._monitor = self._socket.get_monitor_socket()
        self._disconnected: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        """Connect to the publisher. Raises SubscribeError."""
        connected = False
        try:
            connected = await self._connect()
        finally:
            if not connected:
                self._close()
        if not connected:
            raise SubscribeError(
                f"no KV event publisher at {self._address.endpoint}. "
                "Start the engine with KV events, or correct `kv_events` of this replica."
            )
        self._disconnected = asyncio.ensure_future(self._wait_for_disconnect())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        if self._disconnected is not None:
            self._disconnected.cancel()
            await asyncio.wait({self._disconnected})
        self._close()

    async def receive_batches(self, on_batch: BatchHandler) -> None:
        """Pass all batches to `on_batch` until the connection is lost. Exceptions of `on_batch` propagate.

        Raises:
            SubscriptionLostError: The connection was lost.
            ValueError: A message is no batch.
        """
        assert self._disconnected is not None  # noqa: S101 - set by `__aenter__`
        receive_task = asyncio.ensure_future(self._receive_until_cancelled(on_batch))
        try:
            await asyncio.wait(
                {receive_task, self._disconnected}, return_when=asyncio.FIRST_COMPLETED
            )
            if receive_task.done():
                await receive_task
        except zmq.ZMQError as error:
            raise SubscriptionLostError(str(error)) from error
        finally:
            receive_task.cancel()
            await asyncio.wait({receive_task})
        raise SubscriptionLostError("the connection was lost")

    async def replay_batches(self, start: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yield number and payload of the batches that the server still has, from number `start`.

        Raises:
            SubscribeError: No ZeroMQ socket is left.
            ValueError: A message is no batch.
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
                # Only some servers send the topic before the number.
                if len(frames) < 3 or len(frames[-2]) != 8:
                    raise ValueError("a replayed message is not a KV event batch")
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
                raise ValueError("a published message is not a KV event batch")
            await on_batch(int.from_bytes(frames[1], "big"), frames[2])
            await asyncio.sleep(0)  # `recv_multipart` does not yield while messages are queued

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
    """Open a ZeroMQ socket of type `kind`. Raises SubscribeError if too many are open."""
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
