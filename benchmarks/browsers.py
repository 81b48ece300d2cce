"""Browsers that show the console: their event streams and reads, sent from a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import httpx2

OWN_PAGE = {"sec-fetch-site": "same-origin"}
OVERVIEW_METRICS = (
    *("requests_per_s", "output_tokens_per_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s"),
    *("failed_per_s", "kv_usage_ratio", "running", "queued"),
)
TODAY_S = 86_400
FLOOD_REQUESTS = 50
FLOOD_INTERVAL_S = 1.0
STREAMS_PER_KEY = 5
PATIENCE_S = 30.0

Client = httpx2.AsyncClient
Act = Callable[[Sequence[Client]], Awaitable[None]]


def _overview_reads() -> tuple[tuple[str, float], ...]:
    """Return the paths that the Overview reads, each with its interval in seconds (`screens/overview.js`)."""
    now = int(time.time())
    return (
        (f"/admin/series?step=1&metrics={','.join(OVERVIEW_METRICS)}", 2.0),
        ("/admin/replicas", 5.0),
        ("/admin/pools", 5.0),
        (f"/admin/usage?since={now - 60}", 5.0),
        (f"/admin/usage?since={now // TODAY_S * TODAY_S}", 10.0),
        ("/admin/requests?limit=200", 10.0),
    )


async def show_overview(clients: Sequence[Client]) -> None:
    """Show the Overview in one window."""
    client = clients[0]

    async def repeat(path: str, interval_s: float) -> None:
        while True:
            (await client.get(path)).raise_for_status()
            await asyncio.sleep(interval_s)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_read_events(client))
        for path, interval_s in _overview_reads():
            tasks.create_task(repeat(path, interval_s))


async def flood(clients: Sequence[Client]) -> None:
    """Open many event streams, and send many reads at once, again each second. Refused ones are not repeated."""
    paths = [path for path, _ in _overview_reads()]
    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            for _ in range(STREAMS_PER_KEY):
                tasks.create_task(_read_events(client))
        while True:
            began_at = time.monotonic()
            await asyncio.gather(
                *(clients[0].get(paths[number % len(paths)]) for number in range(FLOOD_REQUESTS))
            )
            await asyncio.sleep(max(0.0, began_at + FLOOD_INTERVAL_S - time.monotonic()))


async def _read_events(client: Client) -> None:
    async with client.stream("GET", "/console/events") as stream:
        stream.raise_for_status()
        async for _ in stream.aiter_raw():
            pass


class Browser:
    """Acts in a thread while it is entered.

    Args:
        address: Base URL of the gateway.
        keys: Keys that may see the whole gateway. The gateway learns them within seconds of their creation.
        act: What the browser does, with a client for each key.
    """

    def __init__(self, address: str, keys: Sequence[str], act: Act) -> None:
        self._address = address
        self._keys = keys
        self._act = act
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> None:
        self._thread.start()
        limits = httpx2.Limits(max_connections=None)
        self._clients = [
            Client(
                base_url=self._address,
                headers=OWN_PAGE | {"authorization": f"Bearer {key}"},
                limits=limits,
                timeout=60.0,
            )
            for key in self._keys
        ]
        try:
            asyncio.run_coroutine_threadsafe(self._wait_until_known(), self._loop).result()
        except BaseException:
            self._stop()
            raise
        self._acting = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failed = self._acting.done()
        self._acting.cancel()
        self._stop()
        if failed and error is None:
            self._acting.result()  # a browser that failed was not measured

    async def _wait_until_known(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            unknown = list(self._clients)
            while unknown:
                if (await unknown[-1].get("/admin/me")).status_code == httpx2.codes.OK:
                    unknown.pop()
                else:
                    await asyncio.sleep(0.1)

    async def _run(self) -> None:
        await self._act(self._clients)

    async def _close(self) -> None:
        for client in self._clients:
            await client.aclose()

    def _stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
