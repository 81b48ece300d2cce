"""Results of a reconciliation: actions of the controller, and the phase of each replica."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from argosy.policy.reconciliation.fleet_state import ReplicaRun
from argosy.policy.reconciliation.problems import ProblemKind


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag=str.lower):
    """An action on one replica. Carrying it out twice is carrying it out once."""

    pool: str
    replica: str
    launcher: str
    reason: str
    """Why it is done, as a clause such as `generation 3 replaces it`."""


class Start(Action, frozen=True, kw_only=True):
    """Call `Launcher.start`.

    The generation may be an older one than the desired one: a replica that crashes before its replacement is ready is
    restarted with its own settings. If the launcher raises `LaunchError`, append a `ReplicaRun` of it to the replica's
    past runs, so that the next attempt waits.
    """

    generation: int
    ordinal: int
    ended_run: ReplicaRun | None = None
    """The run that has ended. Append it to the past runs in the store before the start, unless they contain its
    attempt."""


class Warm(Action, frozen=True, kw_only=True):
    """Send the warm-up requests to the replica, and record their result."""


class Admit(Action, frozen=True, kw_only=True):
    """Publish the replica as a member of the rotation."""


class Withdraw(Action, frozen=True, kw_only=True):
    """Publish the rotation without the replica. Its running requests continue."""


class Drain(Action, frozen=True, kw_only=True):
    """Call `Launcher.drain`. The launcher kills the replica at its drain deadline."""


class Stop(Action, frozen=True, kw_only=True):
    """Call `Launcher.stop`."""


class Remove(Action, frozen=True, kw_only=True):
    """Call `Launcher.remove`, and forget the replica's past runs."""


class ReplicaPhase(enum.StrEnum):
    """Phase in the life of a replica."""

    PENDING = "pending"
    """The replica shall be started, but has to wait."""
    PROVISIONING = "provisioning"
    """The launcher waits for a machine, a GPU or an image."""
    LOADING = "loading"
    """The process runs, but does not serve."""
    WARMING = "warming"
    """The replica serves, but has not finished its warm-up, or not every gateway routes to it."""
    READY = "ready"
    """Every gateway routes to it, or it is a spare that can enter the rotation."""
    SLEEPING = "sleeping"
    """The replica has freed its memory, and a request wakes it up."""
    DRAINING = "draining"
    """The replica leaves the fleet, and finishes its requests before."""
    STOPPED = "stopped"
    """The replica has exited and is removed."""
    OUT_OF_SERVICE = "out_of_service"
    """The replica gets no requests, because an operator decided it or its own server drains. It stays in the fleet."""
    FAILED = "failed"
    """The replica fails to start, is hung, or is ejected by the gateways."""


SERVING_PHASES = frozenset({ReplicaPhase.READY, ReplicaPhase.SLEEPING})
"""Phases of the replicas that answer requests. One that sleeps wakes up for them."""


class PhaseReport(msgspec.Struct, frozen=True):
    """Phase of a replica, and why it is in it."""

    phase: ReplicaPhase
    reason: str
    problem: ProblemKind | None = None
    """Cause that keeps it from serving, other than its first start or a decision of the controller."""


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `reconcile`."""

    actions: tuple[Action, ...]
    """Actions to carry out now, in this order. Those of different pools are independent."""
    wake_at: float | None
    """When to reconcile again even if nothing changes, in seconds since the epoch; None for never."""
    phases: Mapping[str, PhaseReport]
    """Phase of each replica that exists or shall exist, by name."""
