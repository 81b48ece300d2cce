"""Values that a gateway's metrics expose as gauges, read at each scrape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from argosy.policy import ReplicaStatus


@dataclass(frozen=True, slots=True)
class ReplicaGauges:
    """Current state of one replica."""

    model: str
    replica: str
    status: ReplicaStatus
    in_flight: int


@dataclass(frozen=True, slots=True)
class QuotaBackendGauges:
    """State of the quota backend that gateways share."""

    is_connected: bool
    """Whether the quota backend is reachable."""
    degraded_allowed: int
    """Requests and running streams permitted while the backend was unreachable, since the gateway started."""
    degraded_rejected: int
    """Requests and running streams rejected while the backend was unreachable, since the gateway started."""


@dataclass(frozen=True, slots=True)
class GatewayGauges:
    """Current values of a gateway that are read rather than counted."""

    in_flight: int = 0
    """Running HTTP requests."""
    connections: int = 0
    """Open client connections."""
    fast_path_streams: int = 0
    """Streams on the fast path."""
    event_loop_lag_s: float = 0.0
    """Mean delay of the event loop's callbacks in seconds."""
    queue_depths: Mapping[str, int] = field(default_factory=dict)
    """Queued requests by model."""
    replicas: Sequence[ReplicaGauges] = ()
    arithmetics: Mapping[str, int] = field(default_factory=dict)
    """Number of different arithmetic identities of the replicas by model; of the version with most."""
    routes: Mapping[str, int] = field(default_factory=dict)
    """Version of the route that the gateway follows, by pool; empty without rollouts."""
    desired_replicas: Mapping[str, int] = field(default_factory=dict)
    """Number of replicas that the fleet's autoscaler wants by pool; empty without a controller."""
    usage_pending_records: int = 0
    """Usage records that are not in the store yet."""
    usage_unpersisted_records: int = 0
    """Usage records that are only in memory because the disk is full, and would be lost with the gateway."""
    store_up: bool | None = None
    """Whether the account snapshot is current; None without a store."""
    quota_backend: QuotaBackendGauges | None = None
    """State of the quota backend; None if the gateway shares no limits."""
