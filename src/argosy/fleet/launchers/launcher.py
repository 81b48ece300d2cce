"""Interface of launchers, which run replicas in some environment: processes, Ray, Kubernetes, or a simulation."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from argosy.deployment import KubernetesSettings, LaunchResources
from argosy.policy.reconciliation import LaunchState

MAX_KEPT_LOGS = 100
"""Number of removed replicas whose logs a launcher keeps."""
_CRASH_SIGNALS = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS"})
"""Signals by which faulty code ends its own process."""


class StaleEpochError(RuntimeError):
    """Raised for an action of a controller that is no longer the leader. The environment has seen a newer epoch."""

    def __init__(self, message: str, newer_epoch: int = 0) -> None:
        super().__init__(message)
        self.newer_epoch = newer_epoch
        """Epoch that the environment has seen."""


def refuse_stale_epoch(epoch: int, highest: int) -> None:
    """Raise `StaleEpochError` if the epoch of an action is lower than the highest one that was seen."""
    if epoch < highest:
        raise StaleEpochError(
            f"epoch {epoch} is outdated; a controller with epoch {highest} has taken over",
            highest,
        )


class LaunchError(RuntimeError):
    """Raised if a replica cannot be launched. The message says why and contains the remedy."""


class LaunchProbes(msgspec.Struct, frozen=True, kw_only=True):
    """Health checks for launchers whose environment checks replicas too, also while no controller runs."""

    ready_path: str = "/health"
    """Answers 200 once the replica accepts requests."""
    live_path: str = "/health"
    """Answers 200 unless the replica must be restarted."""
    start_timeout_s: float = 600.0
    """Time after the start in which it must become ready."""
    hang_timeout_s: float = 10.0
    """Time without an answer after which the controller restarts it. The environment waits longer."""


class ReplicaIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Name of a replica, and what it consists of."""

    name: str
    """Derived from pool, generation and ordinal, so that starting it twice is starting it once."""
    pool: str
    generation: int
    """Number of the version of the pool's replica settings."""
    ordinal: int

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that identify the replica, for another record of it."""
        return {name: getattr(self, name) for name in ReplicaIdentity.__struct_fields__}


class LaunchSpec(ReplicaIdentity, frozen=True, kw_only=True):
    """Everything that a launcher needs to start one replica. Two specs with the same name are the same replica."""

    command: tuple[str, ...]
    """Program and arguments. `{host}`, `{port}`, `{socket}` and `{name}` stand for what the launcher assigns."""
    environment: Mapping[str, str] = {}
    """Variables in addition to those that every replica gets (`child_environment.replica_variables`)."""
    inherits_environment: bool = False
    """Whether the process gets all variables of the launcher's own, as a gateway does."""
    resources: LaunchResources = LaunchResources()
    drain_deadline_s: float = 30.0
    """How long running requests may take after `drain`, before the replica is killed."""
    drain_signal: str = "SIGTERM"
    """Signal by which `drain` asks the process to exit."""
    url: str | None = None
    """Address of its server if the command fixes it. Otherwise the launcher assigns it. With `{socket}` in the command
    too, others may have the same address, and the socket is its own."""
    image: str | None = None
    """Container image, for launchers that use containers."""
    secret_keys: Mapping[str, str] = {}
    """Variables whose values the environment itself keeps as secrets, with their keys there."""
    probes: LaunchProbes = LaunchProbes()
    max_unavailable: int = 1
    """How many replicas of the pool the environment may evict at once, for example to update its nodes."""
    kubernetes: KubernetesSettings | None = None
    """Settings for Kubernetes, if that is where the replica runs."""


class LaunchedReplica(ReplicaIdentity, frozen=True, kw_only=True):
    """State of a replica that was started, until it is removed. Times are seconds since the epoch."""

    state: LaunchState
    reason: str = ""
    """Why it waits, such as `waiting for a GPU on any node of zone a`, or why it exited."""
    url: str | None = None
    """Address of its HTTP server, such as `http://10.0.0.5:8000` or `unix:///run/replica.sock`. None before that."""
    own_url: str | None = None
    """Address that no other replica has. None if `url` is; gateways that replace each other share one."""
    node: str = ""
    """Machine or node on which it runs."""
    zone: str = ""
    attempt: int = 1
    """Number of times that it was started."""
    started_at: float = 0.0
    """When the latest attempt started."""
    exited_at: float | None = None
    exit_status: int | None = None
    """Exit status, or the negative number of the signal that ended it."""
    ran_out_of_memory: bool = False
    activity: str = ""
    """Activity that it reported, such as `loading weights`. Only some engines report."""
    progress: float = 0.0
    """Reported progress of its start, from 0 to 1."""
    has_reported_ready: bool = False
    """Whether it reported that it accepts requests."""
    start_error: str = ""
    """Reported reason why it cannot serve, or no longer."""


class Launcher(Protocol):
    """Starts and stops replicas. All methods are idempotent.

    Replicas run on when the controller or the launcher ends. The next launcher finds them by `list_replicas`.
    `epoch` is the fencing epoch of the controller's lease. The environment, not this object, remembers the highest
    epoch that it has seen, and every action with a lower one raises `StaleEpochError`.
    """

    @property
    def changed(self) -> asyncio.Event:
        """Event that is set whenever the state of a replica changes. The waiting task clears it."""
        ...

    async def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        """Return all replicas that were started and not removed, by name."""
        ...

    async def start(self, spec: LaunchSpec, epoch: int) -> None:
        """Start the replica unless it runs. One that has exited is started again as its next attempt.

        Raises:
            LaunchError: It cannot be launched.
            StaleEpochError: The epoch is outdated.
        """
        ...

    async def prepare_pool(self, spec: LaunchSpec, epoch: int) -> None:
        """Create or restore what the environment keeps for all replicas of the spec's pool.

        Raises:
            LaunchError: The environment refuses it. Replicas can run without it.
            StaleEpochError: The epoch is outdated.
        """
        ...

    async def drain(self, name: str, epoch: int) -> None:
        """Ask the replica to exit once its requests have ended, or after its drain deadline. Does not wait for it."""
        ...

    async def stop(self, name: str, epoch: int) -> None:
        """Kill the replica. Returns after its exit."""
        ...

    async def remove(self, name: str, epoch: int) -> None:
        """Forget a replica that has exited, and delete what it left, except its logs."""
        ...

    async def read_log(self, name: str, max_bytes: int) -> bytes:
        """Return the end of the replica's log. It outlives the process."""
        ...

    async def close(self) -> None:
        """Release this launcher's own resources. Replicas run on."""
        ...


def describe_exit(code: int | None, *, error: str = "", ran_out_of_memory: bool = False) -> str:
    """Return why a process exited, as far as its own error and its exit status show.

    `code` is the exit status, or the negative number of the signal that ended the process.
    """
    if error:
        return f"it could not start: {error}"
    if code is None:
        return "it exited"
    if code >= 0:
        return f"it exited with status {code}"
    if -code == signal.SIGKILL:
        if ran_out_of_memory:
            return "the system killed it because memory ran out"
        return "it was killed (SIGKILL), by a person or because memory ran out"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it crashed with {name}" if name in _CRASH_SIGNALS else f"it was killed ({name})"
