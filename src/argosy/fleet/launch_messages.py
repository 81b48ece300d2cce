"""Messages between a launcher and a replica process: JSON, one message per line."""

from __future__ import annotations

import msgspec

from argosy.engine import EngineConfig, ReplicaServerConfig


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted state of one replica."""

    name: str
    """Id of the replica, also in its logs."""
    server: ReplicaServerConfig
    """Server settings. The launcher replaces the host, the port, the socket and TLS."""
    engine: EngineConfig
    gpu: str | None = None
    """GPU visible to the replica, in the syntax of `CUDA_VISIBLE_DEVICES`. None leaves the variable unchanged."""


class ReplicaLoading(msgspec.Struct, frozen=True, tag=True):
    """Report that the replica is loading."""

    activity: str
    fraction: float
    """Progress from 0 to 1."""


class ReplicaServing(msgspec.Struct, frozen=True, tag=True):
    """Report that the replica is ready."""


class ReplicaRefused(msgspec.Struct, frozen=True, tag=True):
    """Report that the replica cannot serve, or no longer. The process exits after it."""

    message: str


ReplicaReport = ReplicaLoading | ReplicaServing | ReplicaRefused
