"""Requests of a simulated gateway that have not ended, and their attempts at replicas."""

from __future__ import annotations

import msgspec

from argosy.policy import Reservation
from argosy.policy.placement import Attempt, PlacementRequest
from argosy.policy.traffic import VersionChoice
from argosy.twin.replica import SimulatedReplica
from argosy.twin.workload import SimulatedRequest, Tenant


class Call(msgspec.Struct, eq=False):
    """Attempt that was sent to a replica."""

    id: str
    request: ActiveRequest
    attempt: Attempt
    replica: SimulatedReplica
    is_answered: bool = False
    withheld_tokens: int = 0
    """Tokens that the network withholds."""
    is_end_withheld: bool = False


class ActiveRequest(msgspec.Struct, eq=False):
    """Request that has not ended, as the gateway sees it."""

    planned: SimulatedRequest
    prompt: list[int]
    tenant: Tenant
    placement: PlacementRequest
    choice: VersionChoice
    arrived_s: float
    reservation: Reservation | None = None
    """Units of the tenant's limits; None if they have no room for the request."""
    calls: list[Call] = []
    num_calls: int = 0
    delivered: int = 0
    reported: int = 0
    reported_at: float = 0.0
    is_prompt_charged: bool = False
    cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
