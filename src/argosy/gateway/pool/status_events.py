"""Recent changes of the status of replicas, with their reasons."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from argosy.policy import ReplicaStatus

MAX_STATUS_EVENTS = 500
"""Status changes that each pool keeps."""


class StatusEvent(NamedTuple):
    """Change of a replica's status as this gateway sees it."""

    at: float
    """Monotonic time in seconds."""
    replica: str
    previous: ReplicaStatus
    status: ReplicaStatus
    reason: str
    """Why the replica has this status; empty if it is ready."""


def new_status_events() -> deque[StatusEvent]:
    """Return an empty list of events, which drops the oldest ones when it is full."""
    return deque(maxlen=MAX_STATUS_EVENTS)
