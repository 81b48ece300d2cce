"""Active health check of one replica: decides which probe is sent when, and what its result says about the replica.

Results of probes and the passing of time go in; the next `Probe` or a `WakeAt`, and `ProbeFinding`s to log, come out.
One check of a replica consists of these probes, each sent after the result of the one before:

1. `DETECT`, unless the server's kind and models are known.
2. `LOAD` for each load report that the server may support, until one can be parsed, or else `HEALTH`. A native replica
   that disagrees with an operator's decision gets a `DRAIN` or `UNDRAIN` afterwards.
3. `TEST_GENERATION`, if the circuit breaker is open and its open time has passed. A server may report that it is
   healthy and still fail every request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from argosy.policy.breaker import AttemptOutcome, classify_status
from argosy.policy.replica_health import ReplicaHealth
from argosy.policy.routing import ReplicaLoad
from argosy.policy.wake_at import WakeAt

NATIVE_PROBE_INTERVAL_S = 0.5
SHARED_PROBE_INTERVAL_S = 0.25
"""Interval for a native replica that other gateways use too, because their share of the slots changes."""
LOAD_PROBE_INTERVAL_S = 1.0
HEALTH_PROBE_INTERVAL_S = 5.0
PROBE_TIMEOUT_S = 2.0
"""Timeout for all probes of a check together, except for the test generation."""
TEST_GENERATION_TIMEOUT_S = 10.0
"""Timeout for the token that an ejected replica must generate before it gets requests again."""
NATIVE_LOAD_PATH = b"/load"
UNSUPPORTED_STATUSES = frozenset({401, 403, 404, 405, 501})
"""Statuses of servers that do not support a load report."""


class ProbeKind(enum.Enum):
    """Kind of a probe, which decides what the driver sends and which facts it returns."""

    DETECT = "detect"
    """Find out the kind of the server and its models. The result is a `ServerProfile`, or None if it cannot answer."""
    LOAD = "load"
    """Fetch a load report. The result is a `ProbeAnswer`."""
    HEALTH = "health"
    """Fetch the health endpoint. The result is a `ProbeAnswer`."""
    DRAIN = "drain"
    """Ask a native replica to drain. The result is a `ProbeAnswer`."""
    UNDRAIN = "undrain"
    """Ask a native replica to accept requests again. The result is a `ProbeAnswer`."""
    TEST_GENERATION = "test generation"
    """Let the replica generate one token. The result is a `ProbeAnswer`."""


class Probe(NamedTuple):
    """Effect: send a probe and report its result."""

    kind: ProbeKind
    timeout_s: float
    path: bytes = b""
    """Path of the load report, for `LOAD`."""


class FindingKind(enum.Enum):
    """Kind of a finding, for the log."""

    UNREACHABLE = "unreachable"
    """The replica failed its probe, for the first time since it was reachable."""
    REACHABLE_AGAIN = "reachable again"
    LOAD_REPORT_MISSING = "load report missing"
    """The server does not support the load report at `path`."""
    LOAD_REPORT_INVALID = "load report invalid"
    """The load report at `path` could not be parsed, for the first time."""
    DRAIN_REFUSED = "drain refused"
    """The replica refused to drain or to accept requests again, for the first time."""


class ProbeFinding(NamedTuple):
    """Effect: log a finding."""

    kind: FindingKind
    reason: str = ""
    path: bytes = b""
    status: int = 0


ProbeEffect = Probe | WakeAt | ProbeFinding
"""Effect of an event. Exactly one `Probe` or `WakeAt` comes last, after any findings."""


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """Kind of a server and its load reports."""

    is_native: bool
    """Whether the server is an Argosy replica."""
    load_paths: tuple[bytes, ...] = ()
    """Paths of the load reports that another server may support, best first."""
    serves_model: bool = True
    """False if a native replica does not list the replica's model, so that it would refuse its requests."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Response to a probe, as the backend adapter parsed it."""

    status: int
    """HTTP status."""
    invalid_reason: str = ""
    """Why a load report could not be parsed; empty if it could."""
    state: str = ""
    """State that a native replica reports."""
    state_explanation: str = ""
    """Progress of a start."""
    is_shared: bool = False
    """Whether other gateways use a native replica too."""


class HealthCheck:
    """Health check of one replica. Its results change the replica's `ReplicaHealth`.

    Args:
        health: Health of the replica.
        load: Load of the replica.
        profile: Configured kind of the server; None if its kind has to be detected.
    """

    def __init__(
        self, health: ReplicaHealth, load: ReplicaLoad, profile: ServerProfile | None
    ) -> None:
        self._health = health
        self._load = load
        self._profile = profile
        self._is_detected = False
        """Whether the server's kind and models are known. They are detected again after an ejection."""
        self._load_paths = list(profile.load_paths) if profile else []
        """Load reports that the server may support. Unsupported ones are removed."""
        self._untried_paths: list[bytes] = []
        """Load reports that the current check has not fetched yet."""
        self._probe = Probe(ProbeKind.DETECT, 0.0)
        """Last probe, whose result is awaited."""
        self._deadline = 0.0
        self._is_test = False
        """Whether the current check decides about an open circuit breaker."""
        self._is_shared = False
        self._known_unreachable = False
        self._known_invalid: set[bytes] = set()
        """Load reports that were found invalid. Some servers have no gauges before their first request."""
        self._known_refusals: set[ProbeKind] = set()

    # --- Events ----------------------------------------------------------------------------------

    def on_tick(self, now: float) -> list[ProbeEffect]:
        """Begin a check, in place of one that was interrupted. An ejected replica may have to wait."""
        if not self._health.is_probe_due(now):
            return [self._wake(now)]
        self._is_test = self._health.breaker.is_probe_due(now)
        if self._is_test:  # another server may run at the address now
            self._is_detected = False
            self._load_paths = list(self._profile.load_paths) if self._profile else []
        self._deadline = now + PROBE_TIMEOUT_S
        if not self._is_detected:
            return [self._send(ProbeKind.DETECT, now)]
        return [self._fetch_first_report(now)]

    def on_detected(self, profile: ServerProfile | None, now: float) -> list[ProbeEffect]:
        """Handle the result of `DETECT`; None if the server cannot answer yet."""
        if profile is None:
            if self._profile is None:
                return self._end(now, is_healthy=False)
            return [self._fetch_first_report(now)]
        if not profile.serves_model:
            self._health.on_model_missing(now)
            return self._end(now, is_healthy=False)
        self._is_detected = True
        if self._profile is None:
            self._profile, self._load_paths = profile, list(profile.load_paths)
            self._health.on_detected(now)
        return [self._fetch_first_report(now)]

    def on_answer(self, answer: ProbeAnswer, now: float) -> list[ProbeEffect]:
        """Handle the response to any other probe than `DETECT`."""
        match self._probe.kind:
            case ProbeKind.LOAD if self._is_native:
                return self._on_native_load(answer, now)
            case ProbeKind.LOAD:
                return self._on_load(answer, now)
            case ProbeKind.DRAIN | ProbeKind.UNDRAIN:
                return [*self._note_refusal(answer), *self._end(now, is_healthy=True)]
            case ProbeKind.TEST_GENERATION:
                return self._end_healthy(classify_status(answer.status), now)
        return self._end(now, is_healthy=answer.status < 500)

    def on_failure(
        self, reason: str, now: float, outcome: AttemptOutcome = AttemptOutcome.FAILURE
    ) -> list[ProbeEffect]:
        """Handle an error of a probe.

        Args:
            reason: The error; empty after a timeout.
            now: Monotonic time in seconds.
            outcome: What the error says about the replica, for example `BACKPRESSURE` if the gateway has no free file
                descriptor.
        """
        is_test_generation = self._probe.kind is ProbeKind.TEST_GENERATION
        timeout_s = TEST_GENERATION_TIMEOUT_S if is_test_generation else PROBE_TIMEOUT_S
        reason = reason or f"no answer within {timeout_s:g} s"
        self._health.last_failure = reason
        is_news, self._known_unreachable = not self._known_unreachable, True
        return [
            *([ProbeFinding(FindingKind.UNREACHABLE, reason)] if is_news else []),
            *self._finish(
                AttemptOutcome.FAILURE if self._is_test else outcome, now, is_up=is_test_generation
            ),
        ]

    # --- Internal --------------------------------------------------------------------------------

    @property
    def _is_native(self) -> bool:
        return self._profile is not None and self._profile.is_native

    def _wake(self, now: float) -> WakeAt:
        if self._is_shared:
            return WakeAt(now + SHARED_PROBE_INTERVAL_S)
        if self._profile is None or self._profile.is_native:
            return WakeAt(now + NATIVE_PROBE_INTERVAL_S)
        has_report = bool(self._load_paths)
        return WakeAt(now + (LOAD_PROBE_INTERVAL_S if has_report else HEALTH_PROBE_INTERVAL_S))

    def _send(self, kind: ProbeKind, now: float, path: bytes = b"") -> Probe:
        self._probe = Probe(kind, max(0.0, self._deadline - now), path)
        return self._probe

    def _fetch_first_report(self, now: float) -> Probe:
        if self._is_native:
            return self._send(ProbeKind.LOAD, now, NATIVE_LOAD_PATH)
        self._untried_paths = list(self._load_paths)
        return self._fetch_next_report(now)

    def _fetch_next_report(self, now: float) -> Probe:
        if self._untried_paths:
            return self._send(ProbeKind.LOAD, now, self._untried_paths.pop(0))
        return self._send(ProbeKind.HEALTH, now)

    def _on_native_load(self, answer: ProbeAnswer, now: float) -> list[ProbeEffect]:
        if answer.status != 200:
            return self._end(now, is_healthy=answer.status < 500)
        self._is_shared = answer.is_shared
        self._health.on_reported_state(answer.state, now, answer.state_explanation)
        match self._health.drain_request(answer.state):
            case True:
                return [self._send(ProbeKind.DRAIN, now)]
            case False:
                return [self._send(ProbeKind.UNDRAIN, now)]
        return self._end(now, is_healthy=True)

    def _on_load(self, answer: ProbeAnswer, now: float) -> list[ProbeEffect]:
        path, findings = self._probe.path, list[ProbeEffect]()
        if answer.status in UNSUPPORTED_STATUSES:
            self._load_paths.remove(path)
            findings = [ProbeFinding(FindingKind.LOAD_REPORT_MISSING, path=path)]
        elif answer.status != 200:
            self._untried_paths.clear()
        elif not answer.invalid_reason:
            return self._end(now, is_healthy=True)
        elif path not in self._known_invalid:
            self._known_invalid.add(path)
            kind = FindingKind.LOAD_REPORT_INVALID
            findings = [ProbeFinding(kind, answer.invalid_reason, path)]
        return [*findings, self._fetch_next_report(now)]

    def _note_refusal(self, answer: ProbeAnswer) -> list[ProbeEffect]:
        kind = self._probe.kind
        if answer.status == 200 or kind in self._known_refusals:
            return []
        self._known_refusals.add(kind)
        path = b"/" + kind.value.encode()
        return [ProbeFinding(FindingKind.DRAIN_REFUSED, path=path, status=answer.status)]

    def _end(self, now: float, *, is_healthy: bool) -> list[ProbeEffect]:
        """End the part of a check that has a deadline. The server responded to all of its probes."""
        findings = list[ProbeEffect]()
        if self._known_unreachable:
            self._known_unreachable = False
            findings = [ProbeFinding(FindingKind.REACHABLE_AGAIN)]
        if not is_healthy:
            return [*findings, *self._finish(AttemptOutcome.FAILURE, now, is_up=False)]
        if self._is_test:
            self._probe = Probe(ProbeKind.TEST_GENERATION, TEST_GENERATION_TIMEOUT_S)
            return [*findings, self._probe]
        return [*findings, *self._end_healthy(AttemptOutcome.SUCCESS, now)]

    def _end_healthy(self, outcome: AttemptOutcome, now: float) -> list[ProbeEffect]:
        if not self._is_native:  # a native replica reports its own state
            self._health.on_reported_state("ready", now)
        return self._finish(outcome, now, is_up=True)

    def _finish(self, outcome: AttemptOutcome, now: float, *, is_up: bool) -> list[ProbeEffect]:
        """End the check. `is_up` is whether the server passed the part before a test generation."""
        if self._is_test:
            self._health.on_test_ended(outcome, self._load.slots_in_use, now, is_up=is_up)
        else:
            self._health.on_check_ended(outcome, now, is_up=is_up)
        return [self._wake(now)]
