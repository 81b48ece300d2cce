"""Proxy in front of a real server that cuts a stream after a number of events while the server keeps running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

END = b"\n\n"


@dataclass
class StreamCutter:
    """Cuts the next stream that passes any of the proxies that share the cutter."""

    events_left: int | None = None
    """Events to forward before the cut; None for no cut."""

    def truncate(self, data: bytes) -> bytes | None:
        """Return the part of `data` before the cut, or None if the stream continues after it."""
        if self.events_left is None or not (END in data or b"data:" in data):
            return None
        events = data.split(END)
        if len(events) - 1 < self.events_left:
            self.events_left -= len(events) - 1
            return None
        forwarded = END.join(events[: self.events_left]) + END if self.events_left else b""
        self.events_left = None
        return forwarded


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, cutter: StreamCutter
) -> None:
    while data := await source.read(65536):
        forwarded = cutter.truncate(data)
        target.write(data if forwarded is None else forwarded)
        await target.drain()
        if forwarded is not None:
            return


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: Path, cutter: StreamCutter
) -> None:
    """Copy both directions of a connection until one of them ends."""
    upstream = await asyncio.open_unix_connection(socket)
    directions = [_copy(reader, upstream[1], StreamCutter()), _copy(upstream[0], writer, cutter)]
    copies = [asyncio.ensure_future(direction) for direction in directions]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        upstream[1].close()
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        await _close(upstream[1])


@contextlib.asynccontextmanager
async def cutting_proxy(socket: Path, cutter: StreamCutter) -> AsyncIterator[str]:
    """Run a proxy to the server at this Unix socket and yield its URL."""
    connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await _join(reader, writer, socket, cutter)
        await _close(writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[writer] = asyncio.ensure_future(serve(reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer, task in connections.items():
            task.cancel()
            writer.close()
        await asyncio.gather(*connections.values(), return_exceptions=True)
