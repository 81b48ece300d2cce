"""Comparison of two versions by a gateway in one step of a rollout, and the batches of scored requests that result."""

from __future__ import annotations

import msgspec

from argosy.policy.rollout.baseline import Baseline, UserRates, score
from argosy.policy.rollout.gate_record import GateSettings
from argosy.policy.rollout.metrics import Arm, RequestOutcome


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the versions of a pool, which a rollout publishes with the route of the pool."""

    rollout: str
    """Id of the rollout."""
    candidate: str
    """Digest of the version that is compared with the stable one."""
    step: int
    """Step for which requests count that are sent from now on."""
    share: float
    """Share of the step, as for `RolloutGate.open_step`."""
    num_gate_starts: int
    """As for `RolloutGate.start`."""
    settings: GateSettings = GateSettings()
    baseline: Baseline = Baseline()
    rates: UserRates = UserRates()
    max_ttft_s: float | None = None
    """Declared objective: a request whose first token is later misses it. None if none is declared."""
    max_time_per_token_s: float | None = None


MIN_ARM_REQUESTS = 5
"""Requests of each arm in a batch, unless it is as old as a batch may be."""
MIN_BATCH_S = 1.0
MAX_BATCH_S = 30.0


class EventCell(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one event in one stratum.

    Both expectations are sums over requests of the rate of their users, so that their ratio is that of the
    opportunities.
    """

    event: int
    """Position in `EVENTS`."""
    candidate_expected: float
    stable_expected: float
    candidate_events: int
    stable_events: int


class OutcomeBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Scored requests of one gateway in a short period."""

    schema: int = 1
    """Version of the fields. Later versions only add fields with defaults."""
    rollout: str
    step: int
    """Step during which the requests were sent."""
    gateway: str
    sequence: int
    """Number of the batch. A gate counts each batch of a gateway once."""
    ended_at: float
    """Seconds since the epoch."""
    cells: tuple[EventCell, ...] = ()
    candidate_requests: int = 0
    stable_requests: int = 0
    candidate_misses: int = 0
    """Requests of the candidate that missed the objective."""
    invalid_requests: int = 0
    """Requests whose measurements are missing or no number."""


class OutcomeAggregator:
    """Collects scored requests of one gateway into batches.

    Batches are short, since opportunities and events are compared within one: a burst of one user that falls into a
    batch raises both.
    """

    def __init__(
        self, rollout: str, step: int, gateway: str, baseline: Baseline, rates: UserRates
    ) -> None:
        """Create an aggregator.

        Args:
            rollout: Id of the rollout.
            step: Its current step.
            gateway: Id of the gateway's process, since the numbers of its batches begin again with the process.
            baseline: Thresholds of the stable version.
            rates: Rates of its users.
        """
        self._rollout = rollout
        self._step = step
        self._gateway = gateway
        self._baseline = baseline
        self._rates = rates
        self._sequence = 0
        self._started_at: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._cells: dict[tuple[int, str], tuple[list[float], list[int]]] = {}
        self._requests = {Arm.STABLE: 0, Arm.CANDIDATE: 0}
        self._candidate_misses = self._invalid_requests = 0

    def start_step(self, step: int) -> None:
        """Count the following requests for another step. Call `take_batch` with `force` before."""
        self._step = step

    def record(self, outcome: RequestOutcome) -> None:
        """Add a request that was assigned at random.

        In a shadow step these are the copied requests, once for each version.
        """
        if not outcome.is_valid:
            self._invalid_requests += 1
            return
        arm = outcome.arm
        index = int(arm is Arm.CANDIDATE)
        self._requests[arm] += 1
        self._candidate_misses += index and outcome.misses_objective
        for event, stratum, has_occurred in score(outcome, self._baseline):
            cell = self._cells.setdefault((event, stratum), ([0.0, 0.0], [0, 0]))
            cell[0][index] += self._rates.expected(outcome.key, event)
            cell[1][index] += has_occurred

    def take_batch(self, now: float, *, force: bool = False) -> OutcomeBatch | None:
        """Return a batch if it is large or old enough, or if it is forced. It may be empty.

        An empty batch is sent as well: it distinguishes "no traffic" from "no report".
        """
        if self._started_at is None:
            self._started_at = now
        age_s = now - self._started_at
        is_large = min(self._requests.values()) >= MIN_ARM_REQUESTS
        if not (force or age_s >= MAX_BATCH_S or (age_s >= MIN_BATCH_S and is_large)):
            return None
        self._sequence += 1
        batch = OutcomeBatch(
            rollout=self._rollout,
            step=self._step,
            gateway=self._gateway,
            sequence=self._sequence,
            ended_at=now,
            cells=tuple(
                EventCell(
                    event=event,
                    candidate_expected=expected[1],
                    stable_expected=expected[0],
                    candidate_events=events[1],
                    stable_events=events[0],
                )
                for (event, _), (expected, events) in sorted(self._cells.items())
            ),
            candidate_requests=self._requests[Arm.CANDIDATE],
            stable_requests=self._requests[Arm.STABLE],
            candidate_misses=self._candidate_misses,
            invalid_requests=self._invalid_requests,
        )
        self._started_at = now
        self._clear()
        return batch
