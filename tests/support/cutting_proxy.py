"""A proxy in front of a real server that cuts a stream after so many events, so that the server itself lives on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

END = b"\n\n"


@dataclass
class Knife:
    """Cuts the next stream that passes any of the proxies that share it."""

    after: int | None = None
    """Events that still pass; None: it is not to cut."""

    def cut(self, data: bytes) -> bytes | None:
        """What still passes; None: all of it, and it goes on."""
        if self.after is None or not (END in data or b"data:" in data):
            return None
        events = data.split(END)
        if len(events) - 1 < self.after:
            self.after -= len(events) - 1
            return None
        passed = END.join(events[: self.after]) + END if self.after else b""
        self.after = None
        return passed


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, knife: Knife) -> None:
    while data := await source.read(65536):
        passed = knife.cut(data)
        target.write(data if passed is None else passed)
        await target.drain()
        if passed is not None:
            return


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: Path, knife: Knife
) -> None:
    """Pass on what two ends of a connection say, until one of them has said all."""
    behind = await asyncio.open_unix_connection(socket)
    ways = [_copy(reader, behind[1], Knife()), _copy(behind[0], writer, knife)]
    copies = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        behind[1].close()
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        await _close(behind[1])


@contextlib.asynccontextmanager
async def proxied(socket: Path, knife: Knife) -> AsyncIterator[str]:
    """The URL at which the server behind this Unix socket is reached through `knife`."""
    connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await _join(reader, writer, socket, knife)
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
