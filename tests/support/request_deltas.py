"""What a request's reader gets, awaited."""

from __future__ import annotations

import asyncio

from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.delta_stream import DeltaStream


async def next_delta(stream: DeltaStream) -> Delta | None:
    """All that came since the last one, once there is something; None after the end."""
    news = asyncio.Event()
    stream.set_listener(news.set)
    await news.wait()
    return stream.drain()


async def all_deltas(stream: DeltaStream) -> list[Delta]:
    """What comes, to the end."""
    deltas = []
    while (delta := await next_delta(stream)) is not None:
        deltas.append(delta)
    return deltas
