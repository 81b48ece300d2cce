"""Health checks and warm-up of replicas over HTTP, directly and not through a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from urllib.parse import unquote

import httpx2
import msgspec

from argosy.fleet.launchers import LaunchedReplica, LaunchState
from argosy.protocol import SLEEP_STATES, LoadResponse, StatusResponse

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 5.0
FIRST_CHECK_TIMEOUT_S = 2.0
WARM_UP_TIMEOUT_S = 300.0
WARM_UP_PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
WARM_UP_TOKENS = 16
EXPECTED_STATUSES = frozenset({200, 503})
"""Statuses of a server that serves, and of one that starts or drains."""
MAX_VERSION_CHARS = 64
UNSUPPORTED_STATUSES = frozenset({400, 404, 405, 501})
"""Statuses of a server that does not serve the path, or not for its model."""


class CheckPaths(msgspec.Struct, frozen=True):
    """Paths of a kind of server for health checks."""

    ready: str = "/ready"
    """Answers 200 as long as the server accepts requests."""
    load: str | None = "/load"
    """Answers a `LoadResponse`; None for servers without one."""


_CheckKey = tuple[str, int, str, CheckPaths]
"""Name, attempt and own URL of a replica, and the paths of its checks, which a declaration may change."""


class ReplicaHealthReading(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the checks of one attempt of a replica. Times are seconds since the epoch."""

    attempt: int
    is_serving: bool = False
    ready_problem: str = ""
    """Why it does not serve although it answers; empty while it starts or drains, and if it serves."""
    last_response_at: float | None = None
    last_step_at: float | None = None
    """When the engine's step counter last advanced, or when it last had no request. None without a counter."""
    load: LoadResponse | None = None
    """Its latest load report."""
    gateway: str = ""
    """Id that it states as a gateway, by which its record in the store is found."""
    version: str = ""
    """Version of Argosy that it states, cut to `MAX_VERSION_CHARS`; empty if it states none."""
    core_exits: int = 0
    """Number of times that its engine core has ended, by its latest load report that could be decoded."""
    core_exited_at: float | None = None
    """When it was first seen that its engine core had ended for the last time; None if it never did."""


class ReplicaMonitor:
    """Checks all running replicas at regular intervals. Not thread-safe: use it from one event loop.

    Args:
        wake: Set whenever a replica starts or stops to serve.
    """

    def __init__(self, clock: Callable[[], float], wake: asyncio.Event) -> None:
        self._clock = clock
        self._wake = wake
        self._readings: dict[str, ReplicaHealthReading] = {}
        self._tasks: dict[_CheckKey, tuple[asyncio.Task[None], asyncio.Future[None]]] = {}
        """Checks, each with a future that is done after the first one."""

    def watch(
        self, replicas: Collection[LaunchedReplica], paths: Callable[[LaunchedReplica], CheckPaths]
    ) -> None:
        """Check these replicas from now on, and no others."""
        wanted = {
            (replica.name, replica.attempt, url, paths(replica)): replica
            for replica in replicas
            if (url := replica.own_url or replica.url) is not None
            and replica.state in {LaunchState.RUNNING, LaunchState.DRAINING}
        }
        for key in self._tasks.keys() - wanted.keys():
            for future in self._tasks.pop(key):
                future.cancel()
        for key, replica in wanted.items():
            if key not in self._tasks:
                first_check = asyncio.get_running_loop().create_future()
                checks = self._check_forever(replica, key[2], key[3], first_check)
                task = asyncio.create_task(checks, name=f"check-{replica.name}")
                self._tasks[key] = task, first_check
        names = {replica.name for replica in replicas}
        for name in self._readings.keys() - names:
            del self._readings[name]

    async def wait_first_checks(self) -> None:
        """Wait until each watched replica has been checked once, but at most `FIRST_CHECK_TIMEOUT_S`.

        Otherwise a new controller would take all replicas for silent.
        """
        first = {first_check for _, first_check in self._tasks.values() if not first_check.done()}
        if first:
            await asyncio.wait(first, timeout=FIRST_CHECK_TIMEOUT_S)

    def reading(self, replica: LaunchedReplica) -> ReplicaHealthReading:
        """Return the results for the latest attempt of a replica."""
        reading = self._readings.get(replica.name)
        if reading is None or reading.attempt != replica.attempt:
            return ReplicaHealthReading(attempt=replica.attempt)
        return reading

    async def close(self) -> None:
        """End all checks."""
        tasks = [task for task, _ in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_forever(
        self,
        replica: LaunchedReplica,
        url: str,
        paths: CheckPaths,
        first_check: asyncio.Future[None],
    ) -> None:
        async with open_replica_client(url, CHECK_TIMEOUT_S) as client:
            while True:
                reading = await self._check(client, self.reading(replica), paths)
                was_serving = self.reading(replica).is_serving
                self._readings[replica.name] = reading
                if not first_check.done():
                    first_check.set_result(None)
                if reading.is_serving != was_serving:
                    self._wake.set()
                await asyncio.sleep(CHECK_INTERVAL_S)

    async def _check(
        self, client: httpx2.AsyncClient, last: ReplicaHealthReading, paths: CheckPaths
    ) -> ReplicaHealthReading:
        try:
            response = await client.get(paths.ready)
            load = None if paths.load is None else await _fetch_load(client, paths.load)
        except (httpx2.HTTPError, OSError):
            return msgspec.structs.replace(last, is_serving=False)
        now = self._clock()
        stated = _read_status(response.content)
        reading = msgspec.structs.replace(
            last,
            is_serving=response.status_code == 200
            or (load is not None and load.state in SLEEP_STATES),
            ready_problem=""
            if response.status_code in EXPECTED_STATUSES
            else f"{paths.ready} answers {response.status_code}, see `ready_path` of its engine",
            last_response_at=now,
            load=load,
            gateway=stated.gateway,
            version=_read_version(stated, load),
        )
        if load is None:
            return reading
        if load.core_exits > last.core_exits:
            reading = msgspec.structs.replace(
                reading, core_exits=load.core_exits, core_exited_at=now
            )
        is_idle = not (load.running or load.waiting)
        if is_idle or last.load is None or load.step != last.load.step:
            return msgspec.structs.replace(reading, last_step_at=now)
        return reading


async def warm_up_replica(url: str, model: str) -> None:
    """Send real requests through the hot paths of a replica: a chat and a stream, or embeddings.

    Raises:
        RuntimeError: A request failed. The message contains the reason.
    """
    prompt = {"model": model, "max_tokens": WARM_UP_TOKENS, "temperature": 0}
    chat = prompt | {"messages": [{"role": "user", "content": WARM_UP_PROMPT}]}
    requests: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/completions", prompt | {"prompt": WARM_UP_PROMPT}),
        ("/v1/embeddings", {"model": model, "input": [WARM_UP_PROMPT]}),
    )
    errors = []
    async with open_replica_client(url, WARM_UP_TIMEOUT_S) as client:
        for path, body in requests:
            try:
                response = await client.post(path, json=body)
            except (httpx2.HTTPError, OSError) as error:
                raise RuntimeError(f"the warm-up request to {path} failed: {error}") from error
            if response.status_code == 200:
                continue
            text = " ".join(response.text.split())[:200]  # of several lines if it is a page
            reason = f"the warm-up request to {path} has the answer {response.status_code}: {text}"
            if response.status_code not in UNSUPPORTED_STATUSES:
                raise RuntimeError(reason)
            errors.append(reason)
    if len(errors) == len(requests):
        raise RuntimeError(errors[0])


async def fetch_awake_bytes(url: str) -> int:
    """Return the memory that a replica needs at most while it is awake; 0 if it does not report it."""
    async with open_replica_client(url, CHECK_TIMEOUT_S) as client:
        load = await _fetch_load(client, "/load")
    return 0 if load is None else load.awake_bytes


def open_replica_client(url: str, timeout_s: float) -> httpx2.AsyncClient:
    """Return an HTTP client of a replica, at `http://HOST:PORT` or `unix:PATH` with a percent-encoded path."""
    if url.startswith("unix:"):
        path = unquote(url.removeprefix("unix:").removeprefix("//"))
        # There is no TLS, and certificates take long to load.
        transport = httpx2.AsyncHTTPTransport(uds=path, verify=False)
        return httpx2.AsyncClient(
            base_url="http://replica", transport=transport, timeout=timeout_s, trust_env=False
        )
    return httpx2.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False)


async def _fetch_load(client: httpx2.AsyncClient, path: str) -> LoadResponse | None:
    response = await client.get(path)
    try:
        return msgspec.json.decode(response.content, type=LoadResponse)
    except msgspec.MsgspecError:
        return None


def _read_status(content: bytes) -> StatusResponse:
    try:
        return msgspec.json.decode(content, type=StatusResponse)
    except msgspec.MsgspecError:
        return StatusResponse(status="")


def _read_version(stated: StatusResponse, load: LoadResponse | None) -> str:
    program, _, version = ("", "", "") if load is None else load.build.partition(" ")
    return (stated.version or (version if program == "argosy" else ""))[:MAX_VERSION_CHARS]
