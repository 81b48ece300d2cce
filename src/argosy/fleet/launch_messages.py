"""What a launched replica is told, and what it tells: JSON, one message a line."""

from __future__ import annotations

import msgspec

from argosy.engine import EngineConfig, ReplicaServerConfig


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as it is wanted."""

    name: str
    """Its id; also in its logs."""
    server: ReplicaServerConfig
    """Where it listens is the launcher's affair: host, port, socket and TLS are replaced."""
    engine: EngineConfig
    gpu: str | None = None
    """The only one that it sees, as `CUDA_VISIBLE_DEVICES` names it; None: what its launcher sees."""


class ReplicaLoading(msgspec.Struct, frozen=True, tag=True):
    """It is getting ready."""

    activity: str
    fraction: float
    """0 to 1."""


class ReplicaServing(msgspec.Struct, frozen=True, tag=True):
    """It takes requests."""


class ReplicaRefused(msgspec.Struct, frozen=True, tag=True):
    """It cannot serve, or no longer; its process ends."""

    message: str


ReplicaReport = ReplicaLoading | ReplicaServing | ReplicaRefused
