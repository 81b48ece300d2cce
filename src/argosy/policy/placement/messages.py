"""Events that the placement core receives, and the effects that it asks its driver to perform."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from argosy.policy.breaker import AttemptOutcome
from argosy.policy.placement.attempt import Attempt, AttemptEnding
from argosy.policy.placement.pool import PlacementPool
from argosy.policy.placement.request import PlacementRequest
from argosy.policy.wake_at import WakeAt


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened. It is handled at the time that is given with it."""


class Arrived(Event, frozen=True, gc=False):
    """A request was admitted and needs a replica."""

    request: PlacementRequest
    pool: PlacementPool[Any]


class AttemptAnswered(Event, frozen=True, gc=False):
    """A replica began to answer."""

    request: PlacementRequest
    attempt: Attempt
    is_response: bool = True
    """Whether the attempt provides the response from now on. False if only the headers have arrived, and another
    attempt may be faster."""
    is_stream: bool = False
    arithmetic_id: str = ""
    """Arithmetic identity with which the response starts."""


class AttemptEnded(Event, frozen=True, gc=False):
    """An attempt ended by itself, or because of a `Pause`."""

    request: PlacementRequest
    attempt: Attempt
    ending: AttemptEnding
    outcome: AttemptOutcome | None = None
    """Its outcome for the replica; None if it says nothing about the replica."""
    reason: str = ""
    status: int = 0
    """HTTP status of a `REFUSED` attempt."""
    retry_after_s: float | None = None
    is_sent: bool = True
    """Whether the replica may have seen the request."""
    is_too_large: bool = False
    """Whether a `LOST` attempt was given up because of the size of its response."""
    output_tokens: int = 0
    """Output tokens delivered so far, by all attempts."""
    can_resume: bool = True
    """Whether another replica may be able to continue."""
    is_complete: bool = False
    """Whether the response was complete but for its end, which the driver has written."""
    is_restarted: bool = False
    """Whether the response starts over because the client has received nothing."""
    received_at: float | None = None
    """When a response in one piece arrived."""
    tokens_per_choice: float | None = None
    """Output tokens per choice of a complete response, if they are known."""


class RequestEnded(Event, frozen=True, gc=False):
    """A request is over, whatever its state: answered, refused, or its client left."""

    request: PlacementRequest


class CapacityChanged(Event, frozen=True, gc=False):
    """A replica of the pool may have more room than before, or a new state."""

    pool: PlacementPool[Any]


class PoolRemoved(Event, frozen=True, gc=False):
    """The pool gets no more requests and has none."""

    pool: PlacementPool[Any]


class Tick(Event, frozen=True, gc=False):
    """The time of the last `WakeAt` has come."""


class RefusalReason(enum.Enum):
    """Why a request is refused, or ends without a complete response."""

    QUEUE_FULL = "the queue is full"
    TENANT_SHARE_FULL = "the tenant's share of the queue is full"
    RESERVED_FOR_HIGHER_TIERS = "the remaining capacity is for higher tiers"
    QUEUE_TIMEOUT = "no free slot in time"
    STARTING = "the first replica has not started in time"
    REPLICAS_FULL = "all replicas report that they are full"
    NO_REPLICA = "no replica is available"
    QUARANTINED = "replicas failed while they ran this request"
    REFUSED_BY_REPLICA = "the replica refused the request"
    TOO_LARGE = "the response is too large"
    INTERRUPTED = "no other replica can resume the response"
    UPSTREAM_FAILED = "no replica could answer"


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send the request to the replica of the attempt."""

    request: PlacementRequest
    attempt: Attempt


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Cancel an attempt, which the core regards as ended."""

    request: PlacementRequest
    attempt: Attempt


class Pause(msgspec.Struct, frozen=True, gc=False):
    """Stop a stream at its last delivered token, and report `AttemptEnding.PAUSED`."""

    request: PlacementRequest
    attempt: Attempt
    waiting: PlacementRequest | None
    """The request to which it gives way. None if it moves because its replica drains."""


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """Refuse the request, or end its response with an error."""

    request: PlacementRequest
    reason: RefusalReason
    retry_after_s: float | None = None
    status: int = 0
    """Status with which the replica refused it."""
    detail: str = ""


class Move(msgspec.Struct, frozen=True, gc=False):
    """Count a request for another pool from now on, which serves it instead of its own."""

    request: PlacementRequest
    pool: PlacementPool[Any]
    reason: str


Effect = Send | Cancel | Pause | Refuse | Move | WakeAt
"""Work for the driver. For `WakeAt` it sends a `Tick` at the time, and forgets the earlier times."""
