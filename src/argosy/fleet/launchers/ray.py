"""Launcher of replicas on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping

import msgspec
import structlog

from argosy.extras import install_command
from argosy.fleet.launchers.launcher import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    StaleEpochError,
)
from argosy.fleet.launchers.ray_messages import RayRequest, RayResponse

ADDRESS_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 60.0
RECONNECT_DELAY_S = 5.0
"""Time from a failed or lost connection to the next attempt."""
RESPONSE_TIMEOUT_S = 10.0
START_TIMEOUT_S = 90.0
"""Longest time to the start or exit of a process."""
CHANGE_TIMEOUT_S = 90.0
"""Time without an answer to a request to wait for a change, which the registry answers sooner, changed or not."""
AUTO_ADDRESS = "auto"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class RayLauncher:
    """`Launcher` of processes on the nodes of a Ray cluster. Not thread-safe: use it from one event loop.

    A driver process (`ray_driver`) connects to the cluster, since Ray's library would take over this process. It
    forwards each action to the `ReplicaRegistry`, an actor that the cluster restarts, which remembers the highest
    epoch. The registry gives each replica a placement group and a `ReplicaSupervisor`, an actor on the replica's node
    that runs its process. All of them outlive this launcher. The requests to replicas do not pass through Ray.

    Args:
        namespace: Ray namespace of the fleet. Launchers of the same namespace control the same replicas.
        address: Address of the cluster, of which this machine is a node. By default that of the variable
            `RAY_ADDRESS`, or of the cluster that this machine belongs to.

    Raises:
        LaunchError: Ray is not installed.
    """

    def __init__(self, namespace: str, address: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(f"Ray is not installed; run {install_command('ray')}")
        self._namespace = namespace
        self._address = address or AUTO_ADDRESS
        self._connection: asyncio.Task[_Driver] | None = None
        self._reconnect_at = 0.0
        self._changes: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    # --- interface -------------------------------------------------------------------------------

    async def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        return (await self._call(RayRequest(method="list"))).replicas

    async def start(self, spec: LaunchSpec, epoch: int) -> None:
        request = RayRequest(method="start", name=spec.name, spec=spec, epoch=epoch)
        await self._call(request, START_TIMEOUT_S)

    async def prepare_pool(self, spec: LaunchSpec, epoch: int) -> None:
        """Do nothing: actors share nothing."""

    async def drain(self, name: str, epoch: int) -> None:
        await self._call(RayRequest(method="drain", name=name, epoch=epoch))

    async def stop(self, name: str, epoch: int) -> None:
        await self._call(RayRequest(method="stop", name=name, epoch=epoch), START_TIMEOUT_S)

    async def remove(self, name: str, epoch: int) -> None:
        await self._call(RayRequest(method="remove", name=name, epoch=epoch))

    async def read_log(self, name: str, max_bytes: int) -> bytes:
        request = RayRequest(method="read_log", name=name, max_bytes=max_bytes)
        return (await self._call(request)).log

    async def close(self) -> None:
        tasks = [task for task in (self._changes, self._connection) if task is not None]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for driver in results:
            if isinstance(driver, _Driver):
                await driver.close()
        self._changes = self._connection = None

    async def connect(self) -> None:
        """Connect to the cluster unless it is connected. Changes nothing there.

        Raises:
            LaunchError: The cluster cannot be reached.
        """
        await self._connect(None)

    # --- connection ------------------------------------------------------------------------------

    async def _call(
        self, request: RayRequest, timeout_s: float = RESPONSE_TIMEOUT_S
    ) -> RayResponse:
        driver = await self._connect(timeout_s)
        if self._changes is None:
            self._changes = asyncio.create_task(self._follow_changes())
        return await driver.call(request, timeout_s)

    async def _connect(self, timeout_s: float | None) -> _Driver:
        """Return the connected driver. A connection that takes longer goes on in the background."""
        now = asyncio.get_running_loop().time()
        connection = self._connection
        if connection is None or (_has_failed(connection) and now >= self._reconnect_at):
            self._reconnect_at = now + RECONNECT_DELAY_S
            connection = asyncio.create_task(_Driver.start(self._address, self._namespace))
            self._connection = connection
        await asyncio.wait({connection}, timeout=timeout_s)
        if not connection.done():
            raise LaunchError(f"the Ray cluster {self._address} has not answered yet")
        driver = connection.result()
        driver.check()
        return driver

    async def _follow_changes(self) -> None:
        """Set the event at each change. Runs until cancelled, and connects again when the connection is lost."""
        version = 0
        while True:
            try:
                driver = await self._connect(RESPONSE_TIMEOUT_S)
                request = RayRequest(method="wait", version=version)
                response = await driver.call(request, CHANGE_TIMEOUT_S)
            except (LaunchError, OSError) as error:
                log.warning("launcher_disconnected", launcher="ray", reason=str(error))
                self.changed.set()
                await asyncio.sleep(RECONNECT_DELAY_S)
                continue
            if response.version != version:
                version = response.version
                self.changed.set()


def _has_failed(connection: asyncio.Task[_Driver]) -> bool:
    if not connection.done():
        return False
    return connection.cancelled() or bool(connection.exception()) or connection.result().has_ended


async def _check_address(address: str) -> None:
    """Raise OSError if nothing listens at an address, to which Ray's library would try to connect for a minute."""
    if address == AUTO_ADDRESS:
        address = os.environ.get("RAY_ADDRESS", address)
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        async with asyncio.timeout(ADDRESS_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        await writer.wait_closed()


def _unusable(address: str, reason: str) -> LaunchError:
    return LaunchError(
        f"the Ray cluster {address} cannot be used: {reason}. Start a node of it on this machine with "
        "`ray start --address`, or correct `ray.address` or RAY_ADDRESS."
    )


class _Driver:
    """A driver process, and the requests that it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._pending: dict[int, asyncio.Future[RayResponse]] = {}
        self._next_id = 1
        self._end_reason = "the connection to the Ray cluster was lost"
        self._reader = asyncio.create_task(self._read_responses())

    @classmethod
    async def start(cls, address: str, namespace: str) -> _Driver:
        """Start a driver process, and wait until it is connected.

        Raises:
            LaunchError: It cannot connect.
        """
        try:
            await _check_address(address)
        except ConnectionRefusedError as error:
            raise _unusable(address, "nothing listens there") from error
        except OSError as error:
            raise _unusable(address, str(error) or "it does not answer") from error
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "argosy.fleet.launchers.ray_driver"),
            *(address, namespace),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=sys.maxsize,
            start_new_session=True,  # keeps signals of the terminal from it
        )
        driver = cls(process)
        connected = driver._pending[0] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connected
        except (TimeoutError, LaunchError) as error:
            await driver.close()
            reason = str(error) or f"it did not answer within {CONNECT_TIMEOUT_S:g} s"
            raise _unusable(address, reason) from error
        except BaseException:
            await driver.close()
            raise
        return driver

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._reader.done()

    def check(self) -> None:
        """Raise LaunchError if the process has ended."""
        if self.has_ended:
            raise LaunchError(self._end_reason)

    async def call(self, request: RayRequest, timeout_s: float) -> RayResponse:
        """Send a request, and return its response.

        Raises:
            LaunchError: It failed, or was not answered in time.
            StaleEpochError: The epoch is outdated.
        """
        self.check()
        number, self._next_id = self._next_id, self._next_id + 1
        response: asyncio.Future[RayResponse] = asyncio.get_running_loop().create_future()
        self._pending[number] = response
        request = msgspec.structs.replace(request, id=number)
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                return await response
        except TimeoutError as error:
            raise LaunchError(
                f"the Ray cluster did not answer within {timeout_s:g} s; see `ray status`"
            ) from error
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read_responses(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # noqa: S101, PT018 - they are pipes
        try:
            while line := await stdout.readline():
                self._on_response(msgspec.json.decode(line, type=RayResponse))
            await self._process.wait()
        finally:
            stdin.close()
            for pending in self._pending.values():
                if not pending.done():
                    pending.set_exception(LaunchError(self._end_reason))

    def _on_response(self, response: RayResponse) -> None:
        pending = self._pending.get(response.id)
        if pending is None or pending.done():
            return  # its caller has given up
        if response.is_stale_epoch:
            pending.set_exception(StaleEpochError(response.error, response.newer_epoch))
        elif response.error:
            pending.set_exception(LaunchError(response.error))
        else:
            pending.set_result(response)
