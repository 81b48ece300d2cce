"""Status of a replica as code, metrics, the API and the documentation name it."""

from __future__ import annotations

from enum import StrEnum


class AdminState(StrEnum):
    """Decision of an operator about a replica. The replica's own health is independent of it."""

    ACTIVE = "active"
    """The replica gets requests if its health permits."""
    CORDONED = "cordoned"
    """The replica gets no new requests. Running ones continue there."""
    DRAINING = "draining"
    """As `CORDONED`; running streams also move to other replicas of the same arithmetic, as far as these have room."""


class ReplicaStatus(StrEnum):
    """Whether a replica takes requests and, if not, why."""

    READY = "ready"
    """The replica takes requests."""
    STARTING = "starting"
    """The replica loads its model, restarts its engine, or has not been reached yet."""
    SLEEPING = "sleeping"
    """The replica has freed its memory, or is about to, and takes no requests until it is woken up."""
    DRAINING = "draining"
    """The replica finishes its running requests and takes no new ones, by its own report or an operator's decision."""
    CORDONED = "cordoned"
    """An operator decided that the replica takes no new requests. Running ones continue there."""
    BACKOFF = "backoff"
    """The replica rejected a request because it was full; it gets few or none for a short time."""
    EJECTED = "ejected"
    """The replica's circuit breaker is open after consecutive failures."""
    UNREACHABLE = "unreachable"
    """The replica cannot be reached, fails its health check, or does not serve the model."""

    @classmethod
    def from_report(cls, state: str) -> ReplicaStatus:
        """Return the status for the `state` of a native replica's load report."""
        return _REPORTED.get(state, cls.UNREACHABLE)


_REPORTED = {
    "ready": ReplicaStatus.READY,
    "starting": ReplicaStatus.STARTING,
    "restarting": ReplicaStatus.STARTING,
    "sleeping": ReplicaStatus.SLEEPING,
    "waking": ReplicaStatus.STARTING,
    "draining": ReplicaStatus.DRAINING,
}
