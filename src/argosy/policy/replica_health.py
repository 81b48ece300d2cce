"""Health of one replica: a state machine whose state is a `ReplicaStatus`, and the number of requests that it may get.

Five inputs decide the status, the first that applies wins:

1. The circuit breaker is open: `ejected`.
2. The replica reports that it is not ready, or has not reported yet: `starting`, `sleeping`, `draining`,
   `unreachable`.
3. It cannot be reached although it was ready: `unreachable`. One request per half second is still sent to it.
4. An operator decided so: `cordoned`, `draining`.
5. It refused requests as full: `backoff`. Otherwise it is `ready`.

Each event is one method, with the time as an argument. A changed status is reported to `on_status_change`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from argosy.policy.backpressure import Backpressure
from argosy.policy.breaker import AttemptOutcome, Breaker
from argosy.policy.outage_tracker import OutageTracker
from argosy.policy.replica_status import AdminState, ReplicaStatus


class StatusChange(NamedTuple):
    """Change of a replica's status as this gateway sees it."""

    at: float
    """Monotonic time in seconds."""
    replica: str
    previous: ReplicaStatus
    status: ReplicaStatus
    reason: str
    """Why the replica has this status; empty if it is ready."""


def ignore_status_change(change: StatusChange) -> None:
    """Default of `ReplicaHealth.on_status_change`."""


class ReplicaHealth:
    """Health of one replica as a gateway sees it.

    Args:
        name: Name of the replica in `StatusChange`.
        assume_ready: Whether the replica gets requests before it reported that it is ready.
        grace_s: How long requests wait for a replica that went down.
        admin_state: Initial decision about the replica, from the settings file.
    """

    __slots__ = (
        "_admin_reason",
        "_admin_state",
        "_backpressure",
        "_moves_at",
        "_observed_status",
        "_outage",
        "_own_reason",
        "_own_state",
        "_taken_out_at",
        "breaker",
        "is_schedulable",
        "last_failure",
        "name",
        "needs_undrain",
        "on_status_change",
        "status_since",
    )

    def __init__(
        self,
        name: str,
        *,
        assume_ready: bool = True,
        grace_s: float = 30.0,
        admin_state: AdminState = AdminState.ACTIVE,
    ) -> None:
        self.name = name
        self.on_status_change: Callable[[StatusChange], None] = ignore_status_change
        self.breaker = Breaker()
        self.last_failure = ""
        """Reason of the last failed probe or request."""
        self.needs_undrain = False
        """Whether the replica was asked to drain and has to be asked to accept requests again."""
        self.status_since = 0.0
        """Time since which the replica has its status; 0 before the first change."""
        self._backpressure = Backpressure()
        self._outage = OutageTracker(grace_s)
        self._own_state = ReplicaStatus.READY if assume_ready else ReplicaStatus.STARTING
        """State of the replica itself: ready, starting, sleeping, draining or unreachable."""
        self._own_reason = ""
        """Explanation of `_own_state`, if the replica gave one."""
        self._admin_state = admin_state
        self._admin_reason = "by the settings file"
        self._taken_out_at = 0.0
        """Time at which an operator took the replica out of service."""
        self._moves_at = 0.0
        """Time from which the streams of a replica that an operator drains move."""
        self._observed_status = ReplicaStatus.STARTING
        self.is_schedulable = False
        """Whether the replica may get new requests by its own state and the operators' decision.

        It may still be down, full, or ejected by its circuit breaker. Stored because every placement looks at it.
        """
        self._update_schedulable()

    # --- Queries ---------------------------------------------------------------------------------

    def status(self, now: float) -> ReplicaStatus:
        """Return the status."""
        if self.breaker.open_until is not None:
            return ReplicaStatus.EJECTED
        if self._own_state is not ReplicaStatus.READY:
            return self._own_state
        if self._outage.is_down:
            return ReplicaStatus.UNREACHABLE
        if self._admin_state is not AdminState.ACTIVE:
            return ReplicaStatus(self._admin_state)
        if self._backpressure.is_backing_off(now):
            return ReplicaStatus.BACKOFF
        return ReplicaStatus.READY

    def reason(self, now: float) -> str:
        """Return why the replica has its status; empty if it is ready."""
        match self.status(now):
            case ReplicaStatus.READY:
                return ""
            case ReplicaStatus.BACKOFF:
                return self.last_failure or "it refused a request as full"
            case ReplicaStatus.EJECTED:
                return f"its requests or probes failed: {self.last_failure}"
            case ReplicaStatus.CORDONED:
                return f"cordoned {self._admin_reason}"
            case ReplicaStatus.DRAINING if self._admin_state is AdminState.DRAINING:
                return f"drained {self._admin_reason}"
            case ReplicaStatus.DRAINING:
                return "it reports that it drains"
            case ReplicaStatus.SLEEPING:
                return "its memory is freed until it is woken up"
            case ReplicaStatus.STARTING:
                default = "it has not reported that it is ready"
                return self._own_reason or self.last_failure or default
            case _ if self._own_state is ReplicaStatus.READY:
                return self.last_failure or "it cannot be reached"
        return self._own_reason

    @property
    def is_out_of_service(self) -> bool:
        """Whether an operator decided that the replica gets no requests."""
        return self._admin_state is not AdminState.ACTIVE

    @property
    def is_ejected(self) -> bool:
        """Whether the circuit breaker is open."""
        return self.breaker.open_until is not None

    @property
    def is_down(self) -> bool:
        """Whether the replica cannot be reached, or reported that it does not take requests."""
        return self._outage.is_down

    @property
    def grace_ends_at(self) -> float:
        """Time until which requests wait for the replica; infinite while it is up and in service."""
        outage = self._outage
        if self._admin_state is AdminState.ACTIVE:
            return outage.grace_ends_at
        return min(outage.grace_ends_at, self._taken_out_at + outage.grace_s)

    def request_limit(self, slots: int, in_flight: int, now: float) -> int:
        """Return how many requests the replica may run at a time.

        The limit is 0 during a backoff. A replica that is down gets one request more every half second.

        Args:
            slots: Concurrency slots of a healthy replica.
            in_flight: Requests that this gateway runs at the replica.
            now: Monotonic time in seconds.
        """
        if not (self._backpressure.has_limit or self._outage.is_down):
            return slots  # by far the most frequent case
        limit = min(slots, self._backpressure.concurrency_limit(now))
        if self._outage.is_down:
            limit = min(limit, in_flight + self._outage.probe_budget(now))
        return int(limit)

    def retry_after_s(self, now: float) -> float:
        """Return the seconds for which the replica reports to be full; 0 if it gave no `Retry-After`."""
        return self._backpressure.retry_after_s(now)

    def must_move_streams(self, now: float) -> bool:
        """Whether running streams should move to other replicas, because an operator or the replica itself drains."""
        if self._admin_state is AdminState.DRAINING:
            return now >= self._moves_at
        return self._own_state is ReplicaStatus.DRAINING

    def drain_request(self, reported_state: str) -> bool | None:
        """Return whether to ask a native replica to drain or to accept requests again, so that all clients see it.

        A replica that drains for another reason than an operator's decision is left alone.

        Args:
            reported_state: State that the replica reported.

        Returns:
            True to drain, False to accept requests again; None for neither.
        """
        if self._admin_state is AdminState.DRAINING and reported_state == "ready":
            return True
        return False if self.needs_undrain and reported_state == "draining" else None

    def is_probe_due(self, now: float) -> bool:
        """Whether to probe the replica. An ejected replica is left alone until its breaker's open time ends."""
        breaker = self.breaker
        return breaker.is_closed or breaker.is_probe_due(now) or self._outage.is_down

    # --- Events ----------------------------------------------------------------------------------

    def observe(self, now: float) -> None:
        """Report a change of the status that only the passing of time caused, which is the end of a backoff."""
        status = self.status(now)
        if status is not self._observed_status:
            previous, self._observed_status, self.status_since = self._observed_status, status, now
            self.on_status_change(StatusChange(now, self.name, previous, status, self.reason(now)))

    def on_report_required(self) -> None:
        """Withhold requests until the replica reports that it is ready."""
        self._set_own_state(ReplicaStatus.STARTING)

    def on_detected(self, now: float) -> None:
        """Record that the kind of the server became known, so that the replica may get requests."""
        self._set_own_state(ReplicaStatus.READY)
        self.observe(now)

    def on_model_missing(self, now: float) -> None:
        """Record that the server does not serve the replica's model."""
        self._set_own_state(ReplicaStatus.UNREACHABLE, "it does not serve the model")
        self._outage.mark_down(now)
        self.observe(now)

    def on_reported_state(self, state: str, now: float, explanation: str = "") -> None:
        """Apply a state that the replica reported.

        Args:
            state: One of the values of `LoadResponse.state`.
            now: Monotonic time in seconds.
            explanation: Progress of a start; empty if there is none.
        """
        self._set_own_state(ReplicaStatus.from_report(state), explanation)
        if self._own_state is not ReplicaStatus.DRAINING:
            self.needs_undrain = False
        match self._own_state:
            case ReplicaStatus.READY:
                self._outage.mark_up()
            case ReplicaStatus.STARTING | ReplicaStatus.SLEEPING:
                self._outage.mark_starting(now)
            case ReplicaStatus.DRAINING:
                self._outage.mark_down(now)
            case _:
                self._own_reason = "its engine failed"
                self._outage.mark_down(now)
        self.observe(now)

    def on_removed(self, now: float) -> None:
        """Record that the replica left its pool. Requests wait for a replacement until `grace_ends_at`."""
        self._outage.mark_down(now)

    def on_unreachable(self, now: float) -> None:
        """Record that the replica could not be reached or failed its health check.

        While its circuit breaker is closed the failure is ignored, unless the replica has never been up.
        """
        if not (self.breaker.is_closed and self._outage.was_ever_up):
            self._outage.mark_down(now)
        self.observe(now)

    def on_admin_decision(
        self,
        state: AdminState,
        now: float,
        *,
        reason: str,
        moves_at: float = 0.0,
        is_recent: bool = False,
    ) -> None:
        """Apply an operator's decision, or the settings file's if there is none.

        Args:
            state: What was decided.
            now: Monotonic time in seconds.
            reason: Who decided, and why.
            moves_at: Time from which the streams of a draining replica move.
            is_recent: Whether the decision is so new that it also ends a drain which this gateway did not see begin.
        """
        was_draining = self._admin_state is AdminState.DRAINING
        self.needs_undrain = state is not AdminState.DRAINING and (
            was_draining or is_recent or self.needs_undrain
        )
        if self._admin_state is AdminState.ACTIVE:
            self._taken_out_at = now
        self._admin_state, self._admin_reason, self._moves_at = state, reason, moves_at
        self._update_schedulable()
        self.observe(now)

    def on_dispatched(self, now: float) -> None:
        """Record that a request was sent to the replica."""
        self._outage.on_dispatched(now)

    def on_response_started(self, now: float) -> bool:
        """Record that the replica started a response. Return whether this ended an outage."""
        if not self._outage.is_down or self._own_state is not ReplicaStatus.READY:
            return False
        self._outage.mark_up()
        self.observe(now)
        return True

    def on_attempt_ended(
        self,
        outcome: AttemptOutcome | None,
        other_running: int,
        now: float,
        *,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        """Record the end of a request.

        Args:
            outcome: Class of the end; None if it says nothing about the replica.
            other_running: Other requests of this gateway that run at the replica.
            now: Monotonic time in seconds.
            retry_after_s: The replica's Retry-After.
            reason: Why the request failed.
        """
        if outcome is None:
            return
        if outcome is AttemptOutcome.SUCCESS:
            self._backpressure.on_accepted()
        else:
            self.last_failure = reason
            if outcome is AttemptOutcome.BACKPRESSURE:
                self._backpressure.on_rejected(other_running, now, retry_after_s)
        self.breaker.record_outcome(outcome, now)
        if (
            outcome is not AttemptOutcome.SUCCESS
            or self._observed_status is not ReplicaStatus.READY
        ):
            self.observe(now)  # a success of a replica that is ready changes nothing

    def on_check_ended(self, outcome: AttemptOutcome, now: float, *, is_up: bool) -> None:
        """Record the outcome of a health check, whose failure counts as that of a request.

        Args:
            outcome: Outcome of the check.
            now: Monotonic time in seconds.
            is_up: Whether the replica is healthy by its own report.
        """
        if outcome is AttemptOutcome.FAILURE:
            self.breaker.record_outcome(outcome, now)
        self._end_check(now, is_up=is_up)

    def on_test_ended(
        self, outcome: AttemptOutcome, other_running: int, now: float, *, is_up: bool
    ) -> None:
        """Record the outcome of a test generation, which alone closes an open circuit breaker.

        Args:
            outcome: Outcome of the check with the test generation.
            other_running: Requests of this gateway that run at the replica.
            now: Monotonic time in seconds.
            is_up: Whether the replica is healthy by its own report.
        """
        self.breaker.record_probe_outcome(outcome, now)
        if outcome is AttemptOutcome.BACKPRESSURE:
            self._backpressure.on_rejected(other_running, now)
        self._end_check(now, is_up=is_up)

    def _set_own_state(self, state: ReplicaStatus, reason: str = "") -> None:
        self._own_state, self._own_reason = state, reason
        self._update_schedulable()

    def _update_schedulable(self) -> None:
        self.is_schedulable = (
            self._own_state is ReplicaStatus.READY and self._admin_state is AdminState.ACTIVE
        )

    def _end_check(self, now: float, *, is_up: bool) -> None:
        if is_up:
            self.observe(now)
        else:
            self.on_unreachable(now)
