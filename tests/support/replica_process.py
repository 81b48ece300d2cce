"""`argosy replica` as a process that tests kill, stop and restart."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

MODEL = "argosy-mini"


@dataclass
class ReplicaProcess:
    """`argosy replica` with the bundled model, on a Unix socket."""

    socket: Path
    options: tuple[str, ...] = ()
    """Further command-line options."""
    process: asyncio.subprocess.Process | None = None
    was_signalled: bool = False
    """Whether the process was sent a signal, so that it may be stopped or dead."""

    async def start(self) -> None:
        self.was_signalled = False
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", "replica", "--uds", str(self.socket)),
            *("--threads", "1", "--kv-memory", "64MiB", "--drain-deadline", "0"),
            *self.options,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def wait_ready(self) -> None:
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket))
        async with httpx2.AsyncClient(transport=transport, base_url="http://replica") as client:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.05)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the replica server."""
        assert self.process is not None
        self.was_signalled = True
        self.process.send_signal(number)

    def kill_core(self) -> None:
        """Kill the engine core. The replica server keeps running."""
        assert self.process is not None
        for core in psutil.Process(self.process.pid).children():
            core.kill()

    async def kill(self) -> None:
        """Kill the replica server and its engine core."""
        assert self.process is not None
        if self.process.returncode is None:
            processes: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):  # the replica may just have exited
                server = psutil.Process(self.process.pid)
                processes = [*server.children(recursive=True), server]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        await self.process.wait()

    async def restart(self) -> None:
        await self.kill()
        await self.start()
        await self.wait_ready()
