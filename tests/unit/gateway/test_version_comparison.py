"""Measurements of the versions of a pool: what counts as which outcome, in which step, and for how long it is kept."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import pytest
from tests.support.limit_harness import make_context

from argosy.deployment import ReplicaConfig
from argosy.gateway import OutcomeQuery, PublishedVersions
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import (
    REFUSED_BY_REPLICA,
    AssignedVersion,
    EndReason,
    RequestContext,
)
from argosy.gateway.version_comparison import OutcomeMeter
from argosy.gateway.version_comparison.outcome_meter import MAX_REPORTED_BATCHES
from argosy.gateway.version_comparison.request_outcome import build_outcome
from argosy.policy import ReplicaStatus
from argosy.policy.placement import AttemptRecord
from argosy.policy.rollout import Arm, Comparison, OutcomeStatus, RequestOutcome
from argosy.policy.traffic import PoolRoute, Variant
from argosy.protocol import ApiError
from argosy.telemetry import GatewayMetrics

KEY = ("shop", "ann")
CANDIDATE_REPLICAS = {"big-2-0", "big-2-1"}


def attempt(
    replica: str,
    outcome: str = "success",
    *,
    sent_at: float | None = 100.0,
    token_at: float | None = 101.0,
    delivered: int = 0,
) -> AttemptRecord:
    return AttemptRecord(
        replica,
        100.0,
        delivered,
        (),
        sent_at,
        token_at,
        103.0,
        outcome,
        uncached_tokens=40,
        in_flight=3,
    )


def ended_request(
    *attempts: AttemptRecord,
    status: str = "completed",
    error: ApiError | None = None,
    end_reason: EndReason | None = None,
    finish_reason: str = "stop",
    admitted_at: float = 100.0,
) -> RequestContext:
    context = make_context()
    context.trace.attempts = list(attempts)
    context.trace.admitted_at = admitted_at
    context.status, context.error, context.end_reason = status, error, end_reason  # type: ignore[assignment]
    context.delivered.output_tokens = 11
    context.delivered.finish_reasons[0] = finish_reason
    return context


STABLE = attempt("big-1-0")
CANDIDATE = attempt("big-2-0")
LOST = attempt("big-2-0", "failure", token_at=None)
FULL = attempt("big-2-0", "backpressure", token_at=None)
REFUSAL = ApiError(400, REFUSED_BY_REPLICA, "no")


def test_failures_of_a_model_do_not_count_for_the_version_of_its_fallback() -> None:
    context = ended_request(attempt("weak", "failure"))
    context.fall_back(context.pool, "fallback_models", "weak could not answer", None)
    context.start_placement().records.append(STABLE)
    context.status = "completed"
    outcome = build_outcome(context, Arm.STABLE, KEY, CANDIDATE_REPLICAS, 110.0)
    assert outcome is not None
    assert outcome.status is OutcomeStatus.COMPLETED
    shown = [each["replica"] for each in context.trace.to_dict()["attempts"]]
    assert shown == ["weak", "big-1-0"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (ended_request(CANDIDATE), OutcomeStatus.COMPLETED),
        (ended_request(CANDIDATE, finish_reason="content_filter"), OutcomeStatus.REFUSED),
        (ended_request(CANDIDATE, status="refused", error=REFUSAL), OutcomeStatus.REFUSED),
        (ended_request(CANDIDATE, status="cancelled"), OutcomeStatus.CANCELLED),
        (
            ended_request(CANDIDATE, status="stopped", end_reason=EndReason.DEADLINE),
            OutcomeStatus.CANCELLED,
        ),
        (
            ended_request(
                attempt("big-2-0", "ended"), status="failed", error=ApiError(503, "draining", "")
            ),
            OutcomeStatus.CANCELLED,
        ),
        (
            ended_request(CANDIDATE, status="failed", error=ApiError(502, "upstream_failed", "")),
            OutcomeStatus.FAILED,
        ),
        (ended_request(LOST, attempt("big-2-1")), OutcomeStatus.FAILED),
        (ended_request(LOST, STABLE), OutcomeStatus.FAILED),
        (
            ended_request(attempt("big-2-0", "ended"), attempt("big-1-0", delivered=4)),
            OutcomeStatus.FAILED,
        ),
        (ended_request(FULL, attempt("big-2-1")), OutcomeStatus.COMPLETED),
        (ended_request(FULL, STABLE), None),
        (ended_request(STABLE), None),
        (ended_request(attempt("big-2-0", sent_at=None), STABLE), None),
        (ended_request(status="refused"), None),
    ],
)
def test_outcome_of_a_request(request_: RequestContext, status: OutcomeStatus | None) -> None:
    outcome = build_outcome(request_, Arm.CANDIDATE, KEY, CANDIDATE_REPLICAS, 110.0)
    assert (None if outcome is None else outcome.status) == status


@pytest.mark.parametrize(
    ("outcome", "misses"),
    [
        ({"ttft_s": 0.9, "output_tokens": 11}, False),
        ({"ttft_s": 1.1}, True),
        ({"ttft_s": 0.5, "output_tokens": 3}, True),
        ({}, False),
        ({"status": OutcomeStatus.RUNNING}, True),
        ({"status": OutcomeStatus.REFUSED}, False),
        ({"ttft_s": 0.1, "status": OutcomeStatus.FAILED}, True),
    ],
)
def test_objective(outcome: dict[str, object], misses: bool) -> None:
    fields = {"arm": Arm.STABLE, "key": KEY, "status": OutcomeStatus.COMPLETED, "age_s": 2.0}
    judged = RequestOutcome(**fields | outcome).judge_objective(1.0, 0.2)  # type: ignore[arg-type]
    assert judged.misses_objective is misses


class MeteredModel:
    """Meter of one gateway, with a clock of its own and one pool in a rollout."""

    def __init__(self) -> None:
        self.now = 100.0
        self.meter = OutcomeMeter(
            "gw", lambda *_: None, GatewayMetrics(), lambda: self.now, lambda: self.now
        )

    def publish(self, step: int | None, rollout: str = "r1") -> None:
        comparison = None
        if step is not None:
            comparison = Comparison(
                rollout=rollout,
                candidate="new",
                step=step,
                share=0.5,
                num_gate_starts=2,
                max_ttft_s=0.5,
            )
        route = PoolRoute(
            pool="big",
            version=1,
            stable="old",
            rollout=rollout,
            variants=(Variant(digest="new", share=0.5),),
        )
        replicas = {"new": [ReplicaConfig(name=name, url="x") for name in CANDIDATE_REPLICAS]}
        self.meter.apply(
            [PublishedVersions(model="big", route=route, replicas=replicas, comparison=comparison)]
        )

    def place(
        self,
        digest: str,
        record: AttemptRecord,
        *,
        is_randomised: bool = True,
        replica_status: ReplicaStatus = ReplicaStatus.READY,
    ) -> RequestContext:
        context = make_context()
        health = Mock(status=lambda _: replica_status)
        context.pool.replicas["big-2-0"] = Mock(spec=ReplicaEndpoint, health=health)
        context.assigned_version = AssignedVersion(digest, is_randomised, KEY)
        context.start_placement()
        finished = ended_request(record)
        context.trace, context.delivered = finished.trace, finished.delivered
        context.status = finished.status
        self.meter.on_request_admitted(context)
        return context

    def run(self, digest: str, record: AttemptRecord, *, is_randomised: bool = True) -> None:
        """Run a request to its end."""
        self.meter.on_request_ended(self.place(digest, record, is_randomised=is_randomised))

    def sequences(self, **query: object) -> list[int]:
        fields = msgspec.structs.replace(OutcomeQuery(model="big"), **query)
        return [batch.sequence for batch in self.meter.build_report(fields).batches]


def test_requests_of_a_step_are_batched_until_the_controller_has_them() -> None:
    model = MeteredModel()
    model.publish(0)
    for _ in range(6):
        for digest, record in (("old", STABLE), ("new", CANDIDATE)):
            model.run(digest, record)
    model.run("new", CANDIDATE, is_randomised=False)
    late = model.place("new", CANDIDATE)
    for _ in range(2):
        model.now += 1.5
        model.meter.tick()
    model.publish(1)
    model.meter.on_request_ended(late)  # it was sent in the step before
    report = model.meter.build_report(OutcomeQuery(model="big"))
    first, last = report.batches
    assert (first.candidate_requests, first.stable_requests, first.candidate_misses) == (6, 6, 6)
    assert (last.step, last.candidate_requests, last.sequence) == (0, 0, 2)
    assert model.sequences(gateway="gw", after=1) == [2]
    assert model.sequences(gateway="gw", after=1) == [2]
    assert model.sequences(gateway="another process", after=9) == [2]
    assert model.sequences(rollout="r0") == []
    model.publish(None)
    assert model.sequences() == [2, 3], "kept after the comparison"
    model.publish(0, "r2")
    assert model.sequences() == []


def test_version_whose_replicas_have_all_failed_fails_what_the_other_one_takes_over() -> None:
    model = MeteredModel()
    model.publish(0)
    for status in ReplicaStatus:
        model.meter.on_request_ended(model.place("new", STABLE, replica_status=status))
    model.publish(None)
    (batch,) = model.meter.build_report(OutcomeQuery(model="big")).batches
    assert batch.candidate_requests == 2  # ejected and unreachable


def test_report_is_bounded() -> None:
    model = MeteredModel()
    model.publish(0)
    for _ in range(700):
        model.now += 31.0
        model.meter.tick()
    sequences = model.sequences()
    assert sequences == [*range(sequences[0], sequences[0] + MAX_REPORTED_BATCHES)]
    assert sequences[0] > 1, "the oldest are dropped"


def test_request_is_scored_once_at_the_scoring_age() -> None:
    model = MeteredModel()
    model.publish(0)
    silent = model.place("new", attempt("big-2-0", "running", token_at=None))
    model.place("old", STABLE)
    for _ in range(2):
        model.now += 60.5
        model.meter.tick()
    model.meter.on_request_ended(silent)
    batch, *_ = model.meter.build_report(OutcomeQuery(model="big")).batches
    assert (batch.candidate_requests, batch.stable_requests, batch.candidate_misses) == (1, 1, 1)


def test_history_has_the_recent_requests_of_the_stable_version() -> None:
    model = MeteredModel()
    model.publish(None)
    for digest, record in (("old", STABLE), ("new", CANDIDATE), ("old", LOST)):
        model.run(digest, record)
    report = model.meter.build_report(OutcomeQuery(model="big", wants_history=True))
    (outcome,) = report.history
    assert outcome == RequestOutcome(
        arm=Arm.STABLE,
        key=KEY,
        status=OutcomeStatus.COMPLETED,
        age_s=3.0,
        ttft_s=1.0,
        output_tokens=11,
        uncached_tokens=40,
        in_flight=3,
    )
    assert report.longest_request_s == 3.0
    assert not model.meter.build_report(OutcomeQuery(model="big")).history
    assert not model.meter.build_report(OutcomeQuery(model="other", wants_history=True)).history
