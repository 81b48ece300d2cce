"""Awaitable reads of a request's deltas."""

from __future__ import annotations

import asyncio

from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream


async def next_delta(stream: DeltaStream) -> Delta | None:
    """Wait for new deltas and return them merged. Return None after the end of the stream."""
    is_ready = asyncio.Event()
    stream.set_listener(is_ready.set)
    await is_ready.wait()
    return stream.drain()


async def all_deltas(stream: DeltaStream) -> list[Delta]:
    """Return all deltas up to the end of the stream."""
    deltas = []
    while (delta := await next_delta(stream)) is not None:
        deltas.append(delta)
    return deltas
