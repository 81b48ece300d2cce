"""What a launched replica is told, and what it tells: JSON, one message a line."""

from __future__ import annotations

import msgspec

from argosy.engine import EngineConfig, ServerConfig


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as it is wanted."""

    name: str
    """Its id; also in its logs."""
    server: ServerConfig
    """Where it listens is the launcher's affair: host, port, socket and TLS are replaced."""
    engine: EngineConfig
    gpu: str | None = None
    """The only one that it sees, as `CUDA_VISIBLE_DEVICES` names it; None: what its launcher sees."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """It is getting ready."""

    what: str
    done: float
    """0 to 1."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """It takes requests."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It cannot serve, or no longer; its process ends."""

    message: str


Report = Loading | Serving | Refused
