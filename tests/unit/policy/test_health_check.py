"""Health check: which probes are sent, when the next one is due, and what their results do to the replica's health."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    AdminState,
    AttemptOutcome,
    FindingKind,
    HealthCheck,
    Probe,
    ProbeAnswer,
    ProbeEffect,
    ProbeFinding,
    ProbeKind,
    ReplicaHealth,
    ReplicaLoad,
    ReplicaStatus,
    ServerProfile,
    StatusChange,
    WakeAt,
)
from argosy.policy.health_check import PROBE_TIMEOUT_S, TEST_GENERATION_TIMEOUT_S

NATIVE = ServerProfile(is_native=True)
VLLM = ServerProfile(is_native=False, load_paths=(b"/load", b"/metrics"))
DETECT, LOAD, HEALTH, DRAIN, UNDRAIN, TEST = ProbeKind
OK = ProbeAnswer(200)
Result = ServerProfile | ProbeAnswer | str | None
"""Result of a probe; a text is an error."""


def state(name: str, *, is_shared: bool = False) -> ProbeAnswer:
    return ProbeAnswer(200, state=name, is_shared=is_shared)


@dataclass
class Checked:
    """Replica under a health check, whose probes take no time."""

    profile: ServerProfile | None = None
    health: ReplicaHealth = field(default_factory=lambda: ReplicaHealth("r", assume_ready=False))
    now: float = 100.0
    findings: list[FindingKind] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.check = HealthCheck(self.health, ReplicaLoad("r"), self.profile)

    def run(self, *results: Result) -> tuple[list[ProbeKind], float]:
        """Run a check with these results of its probes. Return the probes, and the time until the next check."""
        probes, remaining = list[ProbeKind](), list(results)
        effects = self.check.on_tick(self.now)
        while isinstance(probe := self._last(effects), Probe):
            is_test = probe.kind is TEST
            assert probe.timeout_s == (TEST_GENERATION_TIMEOUT_S if is_test else PROBE_TIMEOUT_S)
            probes.append(probe.kind)
            effects = self._deliver(remaining.pop(0))
        assert not remaining
        return probes, probe.at - self.now

    def _deliver(self, result: Result) -> list[ProbeEffect]:
        if isinstance(result, str):
            return self.check.on_failure(result, self.now)
        if isinstance(result, ProbeAnswer):
            return self.check.on_answer(result, self.now)
        return self.check.on_detected(result, self.now)

    def _last(self, effects: list[ProbeEffect]) -> Probe | WakeAt:
        *findings, last = effects
        for finding in findings:
            assert isinstance(finding, ProbeFinding)
            self.findings.append(finding.kind)
        assert not isinstance(last, ProbeFinding)
        return last

    def eject(self) -> None:
        for _ in range(3):
            self.health.on_attempt_ended(AttemptOutcome.FAILURE, 0, self.now)


@pytest.mark.parametrize(
    ("profile", "results", "probes", "interval_s", "status"),
    [
        (None, [None], [DETECT], 0.5, ReplicaStatus.STARTING),
        (NATIVE, [None, state("starting")], [DETECT, LOAD], 0.5, ReplicaStatus.STARTING),
        (NATIVE, [NATIVE, state("ready")], [DETECT, LOAD], 0.5, ReplicaStatus.READY),
        (
            *(NATIVE, [NATIVE, state("ready", is_shared=True)], [DETECT, LOAD]),
            *(0.25, ReplicaStatus.READY),
        ),
        (None, [NATIVE, ProbeAnswer(500)], [DETECT, LOAD], 0.5, ReplicaStatus.UNREACHABLE),
        (
            *(None, [ServerProfile(is_native=True, serves_model=False)], [DETECT]),
            *(0.5, ReplicaStatus.UNREACHABLE),
        ),
        (None, [VLLM, OK], [DETECT, LOAD], 1.0, ReplicaStatus.READY),
        (VLLM, [VLLM, ProbeAnswer(500), OK], [DETECT, LOAD, HEALTH], 1.0, ReplicaStatus.READY),
        (
            *(VLLM, [VLLM, ProbeAnswer(404), ProbeAnswer(405), OK], [DETECT, LOAD, LOAD, HEALTH]),
            *(5.0, ReplicaStatus.READY),
        ),
        (
            VLLM,
            [None, ProbeAnswer(200, invalid_reason="no number"), OK],
            *([DETECT, LOAD, LOAD], 1.0, ReplicaStatus.READY),
        ),
        (VLLM, ["refused"], [DETECT], 1.0, ReplicaStatus.STARTING),
    ],
)
def test_check_sends_probes_until_health_is_known(
    profile: ServerProfile | None,
    results: list[Result],
    probes: list[ProbeKind],
    interval_s: float,
    status: ReplicaStatus,
) -> None:
    replica = Checked(profile)
    assert replica.run(*results) == (probes, interval_s)
    assert replica.health.status(replica.now) is status


def test_findings_are_reported_once() -> None:
    replica = Checked(VLLM)
    for results in (["refused"], ["refused"], [VLLM, ProbeAnswer(404), OK], [OK]):
        replica.run(*results)
    invalid = ProbeAnswer(200, invalid_reason="no number")
    for _ in range(2):
        replica.run(invalid, OK)
    assert replica.findings == [
        FindingKind.UNREACHABLE,
        FindingKind.LOAD_REPORT_MISSING,
        FindingKind.REACHABLE_AGAIN,
        FindingKind.LOAD_REPORT_INVALID,
    ]


@pytest.mark.parametrize(
    ("result", "wait_s", "status"),
    [
        (OK, 1.0, ReplicaStatus.READY),
        (ProbeAnswer(503), 1.0, ReplicaStatus.BACKOFF),
        (ProbeAnswer(500), 1.0, ReplicaStatus.EJECTED),
        ("", 1.0, ReplicaStatus.EJECTED),
    ],
)
def test_ejected_replica_waits_and_must_then_generate_a_token(
    result: Result, wait_s: float, status: ReplicaStatus
) -> None:
    replica = Checked(VLLM)
    replica.run(VLLM, OK)
    replica.eject()
    assert replica.run() == ([], 1.0)
    replica.now += 2.0
    assert replica.run(VLLM, OK, result) == ([DETECT, LOAD, TEST], wait_s)
    assert replica.health.status(replica.now) is status
    if not result:
        assert replica.health.last_failure == "no answer within 10 s"


def test_error_of_the_gateway_itself_does_not_eject_the_replica() -> None:
    replica = Checked(VLLM)
    replica.run(VLLM, OK)
    for _ in range(5):
        replica.check.on_tick(replica.now)
        replica.check.on_failure("no descriptor", replica.now, AttemptOutcome.BACKPRESSURE)
    assert replica.health.status(replica.now) is ReplicaStatus.READY


def test_failed_first_check_is_one_change_of_the_status() -> None:
    replica, changes = Checked(VLLM, ReplicaHealth("r")), list[StatusChange]()
    replica.health.on_status_change = changes.append
    replica.run("refused")
    assert [change.status for change in changes] == [ReplicaStatus.UNREACHABLE]


def test_unreachable_ejected_replica_is_probed_without_waiting() -> None:
    replica = Checked(NATIVE)
    replica.run(NATIVE, state("ready"))
    for _ in range(3):
        replica.run("refused")
    assert replica.health.is_down
    for _ in range(2):
        assert replica.run("refused") == ([LOAD], 0.5)
    assert replica.run(state("ready")) == ([LOAD], 0.5)
    assert replica.health.status(replica.now) is ReplicaStatus.EJECTED
    replica.now += 2.0
    replica.run(NATIVE, state("ready"), OK)
    assert replica.health.status(replica.now) is ReplicaStatus.READY


def test_native_replica_is_asked_to_follow_the_operator() -> None:
    replica = Checked(NATIVE)
    replica.run(NATIVE, state("ready"))
    replica.health.on_admin_decision(AdminState.DRAINING, replica.now, reason="by ana")
    for refused in (ProbeAnswer(404), ProbeAnswer(404), OK):
        assert replica.run(state("ready"), refused)[0] == [LOAD, DRAIN]
    assert replica.findings == [FindingKind.DRAIN_REFUSED]
    assert replica.run(state("draining"))[0] == [LOAD]
    replica.health.on_admin_decision(AdminState.ACTIVE, replica.now, reason="by ana")
    assert replica.run(state("draining"), OK)[0] == [LOAD, UNDRAIN]
    assert replica.run(state("ready"))[0] == [LOAD]
    assert replica.run(state("draining"))[0] == [LOAD]  # for another reason


DETECTED = (None, NATIVE, VLLM)
ANSWERS = (
    *(state(name) for name in ("ready", "starting", "draining", "failed", "")),
    *(ProbeAnswer(status) for status in (404, 429, 500)),
    *(OK, ProbeAnswer(200, invalid_reason="no number")),
)


@given(
    st.sampled_from(DETECTED),
    st.lists(st.tuples(st.integers(0, 11), st.floats(0.0, 1.0)), max_size=50),
)
def test_every_check_ends_with_a_time_for_the_next(
    profile: ServerProfile | None, steps: list[tuple[int, float]]
) -> None:
    """Whatever the probes return, also if a check is interrupted."""
    check, now = HealthCheck(ReplicaHealth("r"), ReplicaLoad("r"), profile), 0.0
    effects = check.on_tick(now)
    for choice, part in steps:
        last = effects[-1]
        if isinstance(last, WakeAt):
            assert 0.2 < last.at - now < 5.1
            now = last.at
            effects = check.on_tick(now)
            continue
        assert isinstance(last, Probe)
        now += part * last.timeout_s
        if choice == 11:
            effects = check.on_tick(now)  # the probe was interrupted
        elif choice == 10:
            effects = check.on_failure("refused", now)
        elif last.kind is DETECT:
            effects = check.on_detected(DETECTED[choice % 3], now)
        else:
            effects = check.on_answer(ANSWERS[choice], now)
