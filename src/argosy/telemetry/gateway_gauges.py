"""What a gateway's metrics show that is counted elsewhere, read when somebody asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from argosy.policy import ReplicaStatus


@dataclass(frozen=True, slots=True)
class ReplicaGauges:
    """One replica, as it is now."""

    model: str
    replica: str
    status: ReplicaStatus
    in_flight: int


@dataclass(frozen=True, slots=True)
class QuotaBackendGauges:
    """How it stands with limits that are shared with other gateways."""

    is_connected: bool
    """Whether it can be told now how much of them is in use."""
    degraded_allowed: int
    """Requests and running streams that went on while it could not be told, since the gateway started."""
    degraded_rejected: int
    """Those that did not."""


@dataclass(frozen=True, slots=True)
class GatewayGauges:
    """What is counted nowhere, but can be read at any time."""

    in_flight: int = 0
    """Requests being answered."""
    fast_path_streams: int = 0
    """Streams that are passed on by native code just now."""
    queue_depths: Mapping[str, int] = field(default_factory=dict)
    """Requests that wait for a replica, by model."""
    replicas: Sequence[ReplicaGauges] = ()
    usage_pending_records: int = 0
    """Rows of the ledger that the store does not have yet."""
    usage_unpersisted_records: int = 0
    """Rows of the ledger that would not survive the gateway, since the disk was full."""
    store_up: bool | None = None
    """Whether accounts are as the store has them; None where there is none."""
    quota_backend: QuotaBackendGauges | None = None
    """None where the gateway shares none."""
