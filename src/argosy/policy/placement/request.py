"""A generation request in placement: the facts with which it arrives, and its state until it has ended."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

import msgspec

from argosy.policy.deficit_round_robin import QueuedRequest
from argosy.policy.placement.attempt import Attempt, AttemptRecord
from argosy.policy.placement.replica import PlacementReplica
from argosy.policy.prefix_cache_index import BLOCK_BYTES

MAX_ATTEMPT_RECORDS = 64
"""Maximum attempts kept per request: the first one and the latest."""
TOKENS_PER_LOSS = 4
"""Delivered tokens that cancel one replica loss. Without this a request could cost one replica per token."""


class RequestState(enum.StrEnum):
    """Where a request is on its way."""

    NEW = "new"
    WAITING = "waiting"
    """In its tenant's queue, before its first attempt."""
    SENT = "sent"
    """At a replica that has not begun to answer, or at two."""
    STREAMING = "streaming"
    """The response of a replica arrives."""
    PAUSED = "paused"
    """At the head of its tenant's queue, because it gave way to other requests."""
    DISPLACED = "displaced"
    """Waits for another replica, before all queued requests, because its own failed or drains."""
    FINISHED = "finished"
    """The response is complete, and may still be on its way to the client."""
    REFUSED = "refused"
    ENDED = "ended"


_S = RequestState
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    _S.NEW: frozenset({_S.WAITING, _S.SENT, _S.REFUSED, _S.ENDED}),
    _S.WAITING: frozenset({_S.SENT, _S.REFUSED, _S.ENDED}),
    _S.SENT: frozenset({_S.STREAMING, _S.PAUSED, _S.DISPLACED, _S.FINISHED, _S.REFUSED, _S.ENDED}),
    _S.STREAMING: frozenset({_S.PAUSED, _S.DISPLACED, _S.FINISHED, _S.REFUSED, _S.ENDED}),
    _S.PAUSED: frozenset({_S.SENT, _S.DISPLACED, _S.REFUSED, _S.ENDED}),
    _S.DISPLACED: frozenset({_S.SENT, _S.REFUSED, _S.ENDED}),
    _S.FINISHED: frozenset({_S.ENDED}),
    _S.REFUSED: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}
"""The states that may follow each state."""


class PlacementError(Exception):
    """An event does not fit the state of its request, which is a bug of the driver or of the core."""


class PlacementRequest(QueuedRequest, eq=False):
    """Request that the driver creates. Only the core changes its state."""

    # --- facts, which never change ---
    id: str
    prompt_tokens: int
    """Estimated tokens of the prompt."""
    compute_block_keys: Callable[[], list[bytes]]
    """Returns the keys of the prompt's blocks (see `compute_prefix_keys`). Called once, when a replica is selected."""
    compute_digest: Callable[[], bytes]
    """Returns a digest that identifies the request if it makes replicas crash."""
    tool_tokens: int = 0
    """Part of `prompt_tokens` that describes the tools, which templates render first."""
    prompt_bytes: int = 0
    choice_count: int = 1
    sequence_count: int = 1
    """Sequences that a replica computes for it, each of which takes a slot."""
    max_output_tokens: int | None = None
    session_id: str = ""
    adapter: str = ""
    """Digest of the adapter that computes the response; empty for the model itself."""
    min_homes: int = 0
    """Fewest replicas that keep the adapter."""
    is_stream: bool = True
    """Whether the client receives the response as a stream."""
    can_aggregate: bool = True
    """Whether a response in one piece can be put together from the stream of a native replica."""
    start_wait_s: float = 60.0
    """How long it may wait for the first replica of its pool to start."""
    unsuitable: set[str] = msgspec.field(default_factory=set)
    """Names of replicas that do not enforce the request's constraint, or cannot resume its response."""
    can_fall_back: Callable[[], bool] | None = None
    """Returns whether another model can answer now, so that the request is refused instead of waiting for its own. None
    if there is no other model."""

    # --- state ---
    state: RequestState = RequestState.NEW
    attempts: list[Attempt] = msgspec.field(default_factory=list)
    """The attempts that run: none, one, or two with a hedge."""
    records: list[AttemptRecord] = msgspec.field(default_factory=list)
    """The attempts so far."""
    last_attempt: Attempt | None = None
    """The attempt from which the response is or was expected."""
    arithmetic_id: str = ""
    """Arithmetic identity of the response; empty before its first token, or if it is unknown."""
    output_tokens: int = 0
    """Output tokens delivered to the client, as of the last report."""
    failed: set[str] = msgspec.field(default_factory=set)
    """Names of replicas that failed the request since its last progress."""
    failed_attempts: int = 0
    """Failed attempts since the last progress."""
    error_responses: int = 0
    """Failures that were HTTP responses, so the replica is alive."""
    replica_losses: int = 0
    """Replicas lost while they ran the request, less credit for progress since then. The request may be what crashes
    them."""
    failing_since: float = math.inf
    """Time of the first failure since the last progress; infinite if there was none."""
    must_wait_for_budget: bool = False
    """Whether the next attempt has to wait for the retry budget or a healthy replica."""
    queued_at: float | None = None
    """When it first had to wait."""
    queued_ahead: int = 0
    """Number of queued requests ahead of it at that time."""
    displaced_number: int = 0
    """Order in which the replicas of displaced requests failed; 0 unless it is or was displaced."""
    displaced_key: tuple[int, frozenset[str]] | None = None
    """Its group among the displaced requests, while it waits there."""
    timer: int = 0
    """Number of its pending or last timer; earlier timers of the request are void. 0 if it has had none."""
    slots: int = 0
    """Slots that it takes from its tenant's share while an attempt runs."""
    unspent_tokens: float = 0.0
    """Weighted tokens that it was charged in the queue and has not consumed."""
    unspent_prompt: float = 0.0
    """Part of `unspent_tokens` for the prompt, until the number of uncached prompt tokens is known."""
    is_placed: bool = False
    """Whether it counts as running: from its first attempt to its end, without the times in which it is paused."""
    pauses: list[tuple[float, float | None]] = msgspec.field(default_factory=list)
    """When it gave way to other requests, and when it was placed again."""
    _block_keys: list[bytes] | None = None

    def move_to(self, state: RequestState) -> None:
        """Change the state.

        Raises:
            PlacementError: The state may not follow the present one.
        """
        if state not in TRANSITIONS[self.state]:
            raise PlacementError(f"{self.id} cannot go from {self.state} to {state}")
        self.state = state

    @property
    def prompt_blocks(self) -> float:
        """Length of the prompt in blocks of `BLOCK_BYTES`."""
        return self.prompt_bytes / BLOCK_BYTES

    @property
    def block_keys(self) -> list[bytes]:
        """Keys of the prompt's blocks."""
        if self._block_keys is None:
            self._block_keys = self.compute_block_keys()
        return self._block_keys

    def uses_stream(self, replica: PlacementReplica) -> bool:
        """Whether the replica is sent a streaming request, whose response may be aggregated for the client."""
        return self.is_stream or (replica.is_native and self.can_aggregate)

    @property
    def has_reached_replica(self) -> bool:
        """Whether a replica processed the request: an error response, a loss or output. Backpressure does not count."""
        return bool(self.error_responses or self.replica_losses or self.output_tokens)

    def add_attempt(self, attempt: Attempt) -> None:
        """Add an attempt that starts now."""
        self.attempts.append(attempt)
        if len(self.records) == MAX_ATTEMPT_RECORDS:
            del self.records[1]
        self.records.append(attempt.record)

    def record_sent(self, attempt: Attempt, now: float, *, is_restarted: bool = False) -> None:
        """Record that an attempt's request is sent, for a response that starts from its beginning if restarted."""
        attempt.record.sent_at = now
        if is_restarted:
            attempt.record.delivered_tokens = self.output_tokens = 0

    def record_progress(self, tokens: int) -> None:
        """Record that at least one more token was delivered, which resets the failure counters.

        Every `TOKENS_PER_LOSS` tokens cancel one replica loss.
        """
        self.failed.clear()
        self.failed_attempts = self.error_responses = 0
        self.replica_losses = max(0, self.replica_losses - tokens // TOKENS_PER_LOSS)
        self.failing_since = math.inf
        self.displaced_number = 0
