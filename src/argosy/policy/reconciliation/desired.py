"""Desired state of a fleet, built from the applied declaration."""

from __future__ import annotations

import msgspec

from argosy.policy.restart_limits import RestartLimits


class DesiredPool(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of one pool.

    Raises:
        ValueError: A number is negative, or none of its replicas could ever be replaced.
    """

    name: str
    launcher: str
    """Name of the launcher that runs new replicas."""
    generation: int
    """Number of the version of the replica settings. Replicas of other generations are replaced, unless the fleet has
    a `DesiredPool` for them too."""
    replicas: int
    """Number of replicas in the rotation."""
    spares: int = 0
    """Number of further replicas that are started and warm, but outside the rotation."""
    max_surge: int = 1
    """Number of replicas that may exist beyond `replicas` and `spares` during a replacement. If it is 0, an old replica
    leaves before a new one is started."""
    max_unavailable: int = 0
    """Number of replicas by which the rotation may be short because of the controller's own actions. For hung
    replicas it is at least 1, because these are restarted in place."""
    restart_limits: RestartLimits = RestartLimits()
    requires_warm_up: bool = False
    """Whether a replica enters the rotation, or becomes a spare, only after its warm-up."""
    serves_model: bool = True
    """Whether its replicas serve a model behind gateways. Otherwise they are the gateways. Only phases depend on it."""
    surplus_reason: str = ""
    """Why replicas beyond the desired number leave; empty for the number itself."""

    def __post_init__(self) -> None:
        for field in ("replicas", "spares", "max_surge", "max_unavailable"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} of pool {self.name} must be 0 or more")
        if self.replicas and not self.spares + self.max_surge + self.max_unavailable:
            raise ValueError(
                f"No replica of pool {self.name} could be replaced; set max_surge or max_unavailable to at least 1"
            )


class DesiredFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of a fleet. Replicas of pools that it does not contain are drained and removed."""

    pools: tuple[DesiredPool, ...] = ()
    """Pools. Several of one name are versions of one pool that serve beside each other. Each has the replicas of its
    generation, and the first one replaces those of generations that no other one has."""
