"""What a gateway's metrics show that is counted elsewhere, read when somebody asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

ReplicaState = Literal["ready", "cooling", "open", "away"]
"""It takes requests; it said that it is full; its breaker is open; it says that it takes none."""
REPLICA_STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One replica, as it is now."""

    model: str
    replica: str
    state: ReplicaState
    in_flight: int


@dataclass(frozen=True, slots=True)
class SharedLimitsReading:
    """How it stands with limits that are shared with other gateways."""

    up: bool
    """Whether it can be told now how much of them is in use."""
    allowed: int
    """Requests and running streams that went on while it could not be told, since the gateway started."""
    refused: int
    """Those that did not."""


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """What is counted nowhere, but can be read at any time."""

    in_flight: int = 0
    """Requests being answered."""
    on_fast_path: int = 0
    """Streams that are passed on by native code just now."""
    queued: Mapping[str, int] = field(default_factory=dict)
    """Requests that wait for a replica, by model."""
    replicas: Sequence[ReplicaReading] = ()
    backlog: int = 0
    """Rows of the ledger that the store does not have yet."""
    in_memory: int = 0
    """Rows of the ledger that would not survive the gateway, since the disk was full."""
    store_up: bool | None = None
    """Whether accounts are as the store has them; None where there is none."""
    shared_limits: SharedLimitsReading | None = None
    """None where the gateway shares none."""
