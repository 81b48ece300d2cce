"""The console's event stream: live readings each second, and status changes of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from argosy.gateway.auth import has_role
from argosy.gateway.console.sessions import ConsoleSessions
from argosy.gateway.pool import Pool
from argosy.gateway.principal import Principal
from argosy.http_server import DisconnectedError, HttpExchange
from argosy.protocol import ApiError
from argosy.store import ConsoleSession
from argosy.telemetry import GatewayGauges

TICK_INTERVAL_S = 1.0
SESSION_CHECK_TICKS = 10
"""Ticks after which a session is looked up in the store again. Its key and role are checked at each tick."""
MAX_STREAMS_PER_CALLER = 6
MAX_STREAMS = 200

_encode = msgspec.json.Encoder().encode


class ConsoleEvents:
    """Streams of all browsers that show the console. Use it from one event loop.

    Args:
        sessions: Sessions, which are checked while a stream runs.
        read_gauges: Returns the gateway's current readings.
        pools: Returns the pools.
    """

    def __init__(
        self,
        sessions: ConsoleSessions,
        read_gauges: Callable[[], GatewayGauges],
        pools: Callable[[], list[Pool]],
    ) -> None:
        self._sessions = sessions
        self._read_gauges = read_gauges
        self._pools = pools
        self._streams: Counter[str] = Counter()
        self._closing = asyncio.Event()
        self._tick = b""
        """Event with the latest readings."""
        self._tick_expires_at = 0.0

    def close(self) -> None:
        """End all streams. Browsers connect again, to another gateway if this one stops."""
        self._closing.set()

    async def stream(self, exchange: HttpExchange, principal: Principal, build_id: str) -> None:
        """Send events until the client disconnects, its session or key ends, or the gateway drains.

        Raises:
            ApiError: 429 if too many streams are open, 503 while the gateway drains.
        """
        caller = principal.key or principal.user
        if self._closing.is_set():
            raise ApiError(503, "draining", "The gateway stops. Connect again.", retry_after_s=1.0)
        if self._streams[caller] >= MAX_STREAMS_PER_CALLER or self._streams.total() >= MAX_STREAMS:
            message = "Too many event streams are open. Close other windows of the console."
            raise ApiError(429, "too_many_streams", message, retry_after_s=5.0)
        self._streams[caller] += 1
        try:
            await self._send_events(exchange, build_id)
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _send_events(self, exchange: HttpExchange, build_id: str) -> None:
        session: ConsoleSession | None = None
        changes_after = time.monotonic()
        await exchange.start_stream()
        await _send(exchange, "hello", {"build": build_id})
        for tick in itertools.count():
            if exchange.is_disconnected:
                raise DisconnectedError
            if tick % SESSION_CHECK_TICKS == 0:
                # A stream is no use of a session: it also runs in a hidden window.
                session = await self._sessions.find_session(exchange, is_use=False)
            principal = self._find_principal(session, exchange)
            if principal is None:
                await _send(exchange, "session_ended", {})
                break
            sees_fleet = has_role(principal, "viewer", "gateway")
            if sees_fleet:
                now = time.monotonic()
                for change in self._changes_since(changes_after):
                    await _send(exchange, "replica", change)
                changes_after = now
            await exchange.write(
                self._read_tick() if sees_fleet else _event("tick", {"at": time.time()})
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_INTERVAL_S):
                    await self._closing.wait()
            if self._closing.is_set():
                break
        await exchange.end_stream()

    def _find_principal(
        self, session: ConsoleSession | None, exchange: HttpExchange
    ) -> Principal | None:
        """Return the present principal, or None if the client is no longer accepted, for whatever reason."""
        try:
            return self._sessions.resolve(session, exchange)
        except ApiError as error:
            if error.status != 403:
                raise
            return None

    def _read_tick(self) -> bytes:
        """Return the event with the present readings, which the streams share for half an interval."""
        now = time.monotonic()
        if now < self._tick_expires_at:
            return self._tick
        gauges = self._read_gauges()
        statuses = Counter(replica.status.value for replica in gauges.replicas)
        present = Counter(replica.model for replica in gauges.replicas)
        readings = {
            "at": time.time(),
            "running": sum(replica.in_flight for replica in gauges.replicas),
            "queued": sum(gauges.queue_depths.values()),
            "connections": gauges.connections,
            "replicas": dict(statuses),
            "missing_replicas": sum(
                max(0, count - present[model]) for model, count in gauges.serving_replicas.items()
            ),
            "store_up": gauges.store_up,
        }
        self._tick, self._tick_expires_at = _event("tick", readings), now + TICK_INTERVAL_S / 2
        return self._tick

    def _changes_since(self, after: float) -> list[dict[str, Any]]:
        wall_offset = time.time() - time.monotonic()
        return [
            {
                "at": change.at + wall_offset,
                "model": pool.model,
                "replica": change.replica,
                "status": change.status,
                "previous": change.previous,
                "reason": change.reason,
            }
            for pool in self._pools()
            for change in pool.status_changes
            if change.at > after
        ]


async def _send(exchange: HttpExchange, event: str, data: dict[str, Any]) -> None:
    await exchange.write(_event(event, data))


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode(data))
