"""Rules of reconciliation: what happens to which replica first, when, and for which reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from argosy.policy import ReplicaStatus
from argosy.policy.reconciliation import (
    MAX_PAST_RUNS,
    PROBLEMS,
    Action,
    DesiredFleet,
    DesiredPool,
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    PhaseReport,
    PoolCounts,
    Problem,
    ProblemKind,
    Reconciliation,
    ReplicaPhase,
    ReplicaRun,
    RestartLimits,
    Start,
    WarmUpState,
    build_problem,
    order_problems,
    plan_restart,
    reconcile,
    replica_name,
)
from argosy.policy.reconciliation.member import SILENCE_S, STATES

NOW = 1000.0
POOL = DesiredPool(name="a", launcher="local", generation=2, replicas=2)


def replica(ordinal: int, generation: int = 2, /, **fields: object) -> ObservedReplica:
    """Return a replica that serves in the rotation, except for the given fields."""
    ready = ObservedReplica(
        name=replica_name("a", generation, ordinal),
        pool="a",
        generation=generation,
        ordinal=ordinal,
        launcher="local",
        state=LaunchState.RUNNING,
        attempt=1,
        started_at=NOW - 600.0,
        last_response_at=NOW,
        is_serving=True,
        ready_at=NOW - 500.0,
        in_rotation=True,
        is_routed=True,
        is_routed_by_any=True,
    )
    return msgspec.structs.replace(ready, **fields)


SPARE = {"in_rotation": False, "is_routed": False, "is_routed_by_any": False}
LOADING = SPARE | {"is_serving": False, "ready_at": None}
EXITED = SPARE | {
    "state": LaunchState.EXITED,
    "exited_at": NOW - 1.0,
    "reason": "it exited with status 3",
    "is_serving": False,
}


def run(
    *replicas: ObservedReplica, unavailable: str = "", changes: Mapping[str, object] | None = None
) -> Reconciliation:
    observed = ObservedFleet(
        replicas=replicas, unavailable_launchers={"local": unavailable} if unavailable else {}
    )
    desired = DesiredFleet(pools=(msgspec.structs.replace(POOL, **changes or {}),))
    return reconcile(desired, observed, NOW)


def names(actions: tuple[Action, ...]) -> list[str]:
    return [f"{type(each).__name__} {each.replica}" for each in actions]


@pytest.mark.parametrize(
    ("replicas", "changes", "expected"),
    [
        pytest.param([], {}, ["Start a-2-0", "Start a-2-1"], id="starts-missing"),
        pytest.param([replica(1)], {}, ["Start a-2-0"], id="starts-lowest-free-ordinal"),
        pytest.param([replica(0), replica(7)], {}, [], id="keeps-any-ordinal"),
        pytest.param(
            [replica(0, **SPARE), replica(1), replica(2, **SPARE)],
            {"spares": 1},
            ["Admit a-2-0"],
            id="admits-until-rotation-is-complete",
        ),
        pytest.param(
            [replica(0, **EXITED | {"in_rotation": True}), replica(1), replica(2, **SPARE)],
            {"spares": 1},
            ["Admit a-2-2", "Withdraw a-2-0", "Start a-2-0"],
            id="spare-enters-when-replica-crashes",
        ),
        pytest.param(
            [replica(0, is_serving=False), replica(1), replica(2, **SPARE)],
            {"spares": 1},
            ["Admit a-2-2"],
            id="spare-enters-beside-replica-that-may-serve",
        ),
        pytest.param(
            [replica(0), replica(1), replica(2, **LOADING), replica(3)],
            {},
            ["Withdraw a-2-3", "Stop a-2-2"],
            id="scales-down-what-loads-and-highest-ordinal",
        ),
        pytest.param(
            [replica(0, reported_state="sleeping"), replica(1), replica(2)],
            {},
            ["Withdraw a-2-0"],
            id="scales-down-what-sleeps",
        ),
        pytest.param(
            [replica(0, reported_state="sleeping"), replica(1), replica(2, **SPARE)],
            {"spares": 1},
            [],
            id="no-spare-enters-for-replica-that-sleeps",
        ),
        pytest.param(
            [replica(0), replica(1), replica(2, **SPARE)],
            {"replicas": 1, "spares": 1},
            ["Withdraw a-2-1", "Drain a-2-2"],
            id="scales-down-spare-first",
        ),
        pytest.param(
            [replica(0, 1), replica(1, 1)], {}, ["Start a-2-0"], id="replaces-one-at-a-time"
        ),
        pytest.param(
            [replica(0, 1), replica(1, 1), replica(0, is_routed=False)],
            {},
            [],
            id="keeps-old-until-every-gateway-routes-to-new",
        ),
        pytest.param(
            [replica(0, 1), replica(1, 1), replica(0)],
            {},
            ["Withdraw a-1-1"],
            id="withdraws-old-when-new-is-routed",
        ),
        pytest.param(
            [replica(0, 1), replica(1, 1, **SPARE | {"is_routed_by_any": True}), replica(0)],
            {},
            [],
            id="drains-only-when-no-gateway-routes",
        ),
        pytest.param(
            [replica(0, 1), replica(1, 1)],
            {"max_surge": 0, "max_unavailable": 1},
            ["Withdraw a-1-1"],
            id="makes-room-without-surge",
        ),
        pytest.param(
            [replica(0, 1), replica(1, 1), replica(0)],
            {"serves_model": False},
            ["Withdraw a-1-0"],
            id="gateway-replaces-the-one-of-its-address",
        ),
        pytest.param(
            [replica(0, 0), replica(0, 1), replica(1, 1)],
            {"serves_model": False},
            ["Withdraw a-0-0"],
            id="keeps-a-gateway-for-each-address",
        ),
        pytest.param(
            [replica(0), replica(1, state=LaunchState.DRAINING)],
            {"serves_model": False},
            ["Withdraw a-2-1"],
            id="gateway-waits-for-its-address",
        ),
        pytest.param(
            [replica(1)],
            {"serves_model": False, "replicas": 1},
            ["Start a-2-0"],
            id="gateway-takes-the-lowest-address",
        ),
        pytest.param(
            [replica(0, **LOADING), replica(1)],
            {"serves_model": False, "replicas": 1},
            [],
            id="gateway-stays-until-the-lowest-address-serves",
        ),
        pytest.param(
            [replica(0, 1), replica(1, 1, **EXITED), replica(0, **LOADING)],
            {},
            ["Start a-1-1"],
            id="restarts-old-while-new-loads",
        ),
        pytest.param(
            [replica(0, 1, **EXITED), replica(0, **LOADING), replica(1, **LOADING)],
            {"max_surge": 0, "max_unavailable": 1},
            [],
            id="leaves-old-down-if-new-have-its-room",
        ),
        pytest.param(
            [replica(0), replica(1, state=LaunchState.DRAINING)],
            {},
            ["Withdraw a-2-1", "Start a-2-2"],
            id="replaces-what-drains-by-itself",
        ),
        pytest.param(
            [replica(0), replica(1, state=None, past_runs=())],
            {},
            ["Withdraw a-2-1", "Start a-2-1"],
            id="replaces-what-vanished",
        ),
        pytest.param(
            [replica(0), replica(1), replica(2, state=None)],
            {},
            ["Withdraw a-2-2", "Remove a-2-2"],
            id="forgets-what-vanished",
        ),
        pytest.param(
            [replica(0), replica(1), replica(2, **EXITED)], {}, ["Remove a-2-2"], id="removes"
        ),
        pytest.param(
            [replica(0), replica(1, **SPARE)],
            {"requires_warm_up": True},
            ["Warm a-2-0", "Warm a-2-1"],
            id="warms-before-rotation",
        ),
        pytest.param(
            [
                replica(0, warm_up=WarmUpState.SUCCEEDED),
                replica(1, **SPARE, warm_up=WarmUpState.FAILED),
            ],
            {"requires_warm_up": True},
            ["Stop a-2-1"],
            id="restarts-after-failed-warm-up",
        ),
    ],
)
def test_decides(
    replicas: list[ObservedReplica], changes: dict[str, object], expected: list[str]
) -> None:
    assert names(run(*replicas, changes=changes).actions) == expected


def test_wrong_health_signal_empties_no_pool() -> None:
    """All replicas seem hung. Only the share may be killed, and the phases name the others."""
    silent = [replica(number, last_response_at=NOW - 99.0, is_serving=False) for number in range(4)]
    share = {"replicas": 4, "max_unavailable": 2}
    result = run(*silent, changes=share)
    assert names(result.actions) == [
        *("Withdraw a-2-3", "Stop a-2-3"),
        *("Withdraw a-2-2", "Stop a-2-2"),
    ]
    assert {each.phase for each in result.phases.values()} == {ReplicaPhase.FAILED}
    assert "too many replicas of the pool are out" in result.phases["a-2-0"].reason
    down = [replica(number, **EXITED) for number in (2, 3)]
    assert names(run(*silent[:2], *down, changes=share).actions) == [
        *("Start a-2-2", "Start a-2-3"),
    ]


def test_silence_counts_from_start_and_only_while_observing() -> None:
    starting = replica(0, **LOADING, started_at=NOW - 130.0, last_response_at=NOW - 500.0)
    stepless = replica(1, last_step_at=NOW - 61.0)
    result = run(starting, stepless, changes={"max_unavailable": 2})
    assert names(result.actions) == ["Stop a-2-0", "Withdraw a-2-1", "Stop a-2-1"]
    assert "it has not answered since its start for 120 s" in result.phases["a-2-0"].reason
    assert "its engine has made no step for 60 s" in result.phases["a-2-1"].reason
    observed = ObservedFleet(replicas=(starting, stepless), observing_since=NOW - 5.0)
    result = reconcile(DesiredFleet(pools=(POOL,)), observed, NOW)
    assert not result.actions
    assert result.wake_at == NOW + 10.0


@pytest.mark.parametrize(
    ("num_past", "fields", "starts_in_s", "report"),
    [
        (0, {"ready_at": NOW - 50.0}, 0.0, "it exited with status 3; starts now"),
        (0, {"ready_at": None}, 0.0, "it exited with status 3; starts now"),
        (3, {"ready_at": None}, 0.5, "it crashed 4 times, last: it exited with status 3; starts"),
        (4, {"ready_at": None}, 59.5, "5 starts in a row failed: it exited with status 3; starts"),
        (
            0,
            {"ready_at": None, "start_error": "no model"},
            59.5,
            "a start failed: no model; starts",
        ),
        (9, {"ready_at": NOW - 50.0}, 0.0, "it exited with status 3; starts now"),
    ],
)
def test_crash_loop_backs_off(
    num_past: int, fields: dict[str, object], starts_in_s: float, report: str
) -> None:
    past = tuple(
        ReplicaRun(attempt=number, started_at=0.0, exited_at=1.0) for number in range(num_past)
    )
    crashed = replica(0, **EXITED | fields | {"exited_at": NOW - 0.5, "attempt": num_past})
    result = run(
        msgspec.structs.replace(crashed, past_runs=past), replica(1, last_response_at=2 * NOW)
    )
    phase = result.phases["a-2-0"]
    assert phase.reason.startswith(report)
    has_failed = starts_in_s > 10.0
    assert phase.phase is (ReplicaPhase.FAILED if has_failed else ReplicaPhase.PENDING)
    if starts_in_s:
        assert not result.actions
        assert result.wake_at == NOW + starts_in_s
    else:
        (start,) = result.actions
        assert isinstance(start, Start)
        assert start.ended_run is not None
        assert start.ended_run.attempt == num_past


def test_refused_starts_are_no_crashes_and_few() -> None:
    """Ten minutes of refusals cost 20 tries, and a run that crashed before does not count with them."""
    crashed = ReplicaRun(attempt=1, started_at=0.0, exited_at=1.0, reason="it crashed")
    runs: tuple[ReplicaRun, ...] = (crashed,)
    now, reasons = NOW, []
    while now < NOW + 600.0:
        plan = plan_restart(replica(0, state=None, past_runs=runs), RestartLimits())
        now = max(now, plan.starts_at)
        reasons.append(plan.reason)
        refused = ReplicaRun(attempt=2, started_at=now, exited_at=now, reason="x", was_refused=True)
        runs = (*runs, refused)[-MAX_PAST_RUNS:]
    assert reasons[:3] == [
        "it crashed",
        "its start was refused: x",
        "its start was refused 2 times: x",
    ]
    assert len(reasons) <= 20
    assert plan.has_failed


STARTING = LOADING | {"started_at": NOW - 5.0}


@pytest.mark.parametrize(
    ("replicas", "cores", "started"),
    [
        ([], 3, ["a-2-0", "a-2-1", "a-2-2"]),
        ([replica(0)], 3, ["a-2-1"]),
        ([replica(0)], 6, ["a-2-1", "a-2-2", "a-2-3"]),
        ([replica(0), replica(1, **STARTING)], 4, ["a-2-2"]),
        ([replica(0), replica(1, **STARTING)], 2, []),
        ([replica(0), replica(1, **STARTING | {"started_at": NOW - 60.0})], 2, ["a-2-2"]),
        ([replica(0), replica(1, **EXITED), replica(2, **STARTING)], 2, ["a-2-1"]),
        ([replica(0), replica(1, **STARTING | {"ready_at": NOW})], 2, []),
    ],
    ids=["all-cores", "half", "half-of-6", "one-starts", "full", "slow-start", "crash", "warm-up"],
)
def test_few_new_replicas_start_at_once(
    replicas: list[ObservedReplica], cores: int, started: list[str]
) -> None:
    pools = (msgspec.structs.replace(POOL, replicas=500, requires_warm_up=True),)
    desired = DesiredFleet(pools=pools, cores={"local": cores, "ray": 1})
    result = reconcile(desired, ObservedFleet(replicas=tuple(replicas)), NOW)
    assert [each.replica for each in result.actions if isinstance(each, Start)] == started
    waiting = {name for name, each in result.phases.items() if "waits for its turn" in each.reason}
    assert len(waiting) == 500 - len(started) - len(
        [each for each in replicas if each.name not in started]
    )


def test_pools_with_few_running_replicas_and_gateways_start_first() -> None:
    gateway = msgspec.structs.replace(POOL, name="gateway", serves_model=False)
    pools = (msgspec.structs.replace(POOL, replicas=9), msgspec.structs.replace(POOL, name="b"))
    desired = DesiredFleet(pools=(*pools, gateway), cores={"local": 6})
    result = reconcile(desired, ObservedFleet(replicas=(replica(0),)), NOW)
    assert [each.replica for each in result.actions] == [
        *("a-2-1", "b-2-0", "b-2-1"),
        *("gateway-2-0", "gateway-2-1"),
    ]


def test_start_error_of_replica_that_has_served_counts_as_a_crash() -> None:
    served = ReplicaRun(attempt=0, started_at=0.0, ready_at=1.0, exited_at=NOW - 9.0)
    fields = EXITED | {"ready_at": None, "start_error": "no memory", "attempt": 1}
    crashed = replica(0, **fields, past_runs=(served,))
    (start,) = run(crashed, replica(1)).actions
    assert isinstance(start, Start)
    assert start.reason == "no memory"


def test_nothing_is_done_to_what_cannot_be_listed() -> None:
    old = [replica(0, 1), replica(1, 1, **EXITED)]
    result = run(*old, unavailable="connection refused")
    assert not result.actions
    assert set(result.phases) == {"a-1-0", "a-1-1", "a-2-0", "a-2-1"}
    reasons = {each.reason for each in result.phases.values()}
    assert reasons == {"launcher local cannot list its replicas: connection refused"}
    moved = run(*old, unavailable="connection refused", changes={"launcher": "ray"})
    assert names(moved.actions) == ["Start a-2-0"]


def test_phase_of_replacement_without_room_names_the_remedy() -> None:
    waiting = {"state": LaunchState.PROVISIONING, "reason": "waiting for a GPU on any node"}
    result = run(replica(0, 1), replica(1, 1), replica(0, **LOADING | waiting))
    assert not result.actions
    reason = result.phases["a-2-0"].reason
    assert reason.startswith("waiting for a GPU on any node; set max_unavailable to 1")


def test_replicas_of_undeclared_pool_drain() -> None:
    observed = ObservedFleet(replicas=(replica(0), replica(1, **SPARE), replica(2, **EXITED)))
    result = reconcile(DesiredFleet(), observed, NOW)
    assert names(result.actions) == ["Withdraw a-2-0", "Drain a-2-1", "Remove a-2-2"]
    assert {each.reason for each in result.actions} == {"its pool is not declared any more"}


@pytest.mark.parametrize(
    ("fields", "phase", "reason"),
    [
        (LOADING, "loading", "it loads its model"),
        (LOADING | {"ready_at": NOW, "last_response_at": NOW - 1}, "loading", "it loads its model"),
        (LOADING | {"activity": "loading weights, 40 %"}, "loading", "loading weights, 40 %"),
        (
            LOADING
            | {"state": LaunchState.PROVISIONING, "reason": "waiting for a GPU on any node"},
            "provisioning",
            "waiting for a GPU on any node",
        ),
        ({"is_routed": False}, "warming", "not every gateway routes to it yet"),
        ({"state": LaunchState.DRAINING}, "draining", "it finishes its requests"),
        ({"reported_state": "sleeping"}, "sleeping", "it sleeps until a request wakes it up"),
        ({}, "ready", "every gateway routes to it"),
    ],
)
def test_phase_has_reason(fields: dict[str, object], phase: str, reason: str) -> None:
    result = run(replica(0, **fields), replica(1))
    assert result.phases["a-2-0"] == PhaseReport(ReplicaPhase(phase), reason)


CRASHED = ReplicaRun(attempt=1, started_at=1.0, ready_at=2.0, exited_at=3.0, reason="it crashed")


@pytest.mark.parametrize(
    ("fields", "phase", "severity", "reason"),
    [
        (
            {
                "reported_state": "draining",
                "is_serving": False,
                "activity": "warming up, 100%",
                "gateway_status": ReplicaStatus.DRAINING,
                "gateway_reason": "drained by root@vm: test",
            },
            "out_of_service",
            "note",
            "it is drained by root@vm: test",
        ),
        (
            {"gateway_status": ReplicaStatus.CORDONED, "gateway_reason": "cordoned by ann"},
            "out_of_service",
            "note",
            "it is cordoned by ann",
        ),
        (
            {"last_response_at": NOW - SILENCE_S, "gateway_status": ReplicaStatus.EJECTED},
            "loading",
            "page",
            "it does not answer, and is restarted after 10 s without an answer",
        ),
        ({"last_response_at": NOW - 10.0}, "failed", "page", "it has not answered for 10 s"),
        (
            {
                "is_serving": False,
                "reported_state": "restarting",
                "core_exit": "it was killed by SIGKILL",
                "gateway_status": ReplicaStatus.STARTING,
            },
            "loading",
            "ticket",
            "its engine core ended and is started again: it was killed by SIGKILL",
        ),
        (
            {"core_exit": "it ran out of memory", "core_exited_at": NOW - 1.0},
            "ready",
            "ticket",
            "its engine core ended and is started again: it ran out of memory",
        ),
        (
            {"is_serving": False, "reported_state": "failed"},
            "failed",
            "page",
            "its engine failed and is not started again",
        ),
        (
            {
                "gateway_status": ReplicaStatus.EJECTED,
                "gateway_reason": "its requests or probes failed: status 500",
                "is_routed": False,
                "is_routed_by_any": False,
            },
            "failed",
            "page",
            "gateways send it no requests, because its requests or probes failed: status 500",
        ),
        ({"is_serving": False}, "loading", "page", "it has stopped serving"),
        (
            LOADING | {"past_runs": (CRASHED,), "activity": "loading weights, 40 %"},
            "loading",
            "ticket",
            "it crashed; it starts again: loading weights, 40 %",
        ),
    ],
)
def test_problem_names_its_cause(
    fields: dict[str, object], phase: str, severity: str, reason: str
) -> None:
    others = [replica(1), replica(2)]
    report = run(replica(0, **fields), *others, changes={"replicas": 3}).phases["a-2-0"]
    assert (report.phase, report.reason.partition("; it stays")[0]) == (phase, reason)
    assert report.problem is not None
    assert PROBLEMS[report.problem].severity == severity


def named(kind: ProblemKind, pool: str) -> Problem:
    return build_problem(kind, "why", pool=pool, replica=f"{pool}-1-0")


@pytest.mark.parametrize(
    ("problems", "pools", "expected"),
    [
        pytest.param(
            [
                build_problem(ProblemKind.ROLLED_BACK, "a was rolled back: errors", pool="a"),
                named(ProblemKind.CORE_EXIT, "a"),
                named(ProblemKind.HUNG, "b"),
            ],
            {},
            ["page hung b", "ticket core_exit a", "ticket rolled_back a"],
            id="most-severe-first",
        ),
        pytest.param(
            [named(ProblemKind.DRAINED, "a"), named(ProblemKind.DRAINED, "b")],
            {"a": (2, 2, 1, 0), "b": (2, 1, 1, 0)},
            ["page drained a", "page pool_short a", "note drained b"],
            id="cause-before-its-symptom",
        ),
        pytest.param(
            [
                build_problem(ProblemKind.CONTROLLER, "demo"),
                build_problem(ProblemKind.STORE, "disk is full"),
            ],
            {},
            ["page store "],
            id="full-disk-explains-silent-controller",
        ),
        pytest.param([], {"a": (2, 2, 1, 1)}, ["note pool_starts a"], id="first-start"),
        pytest.param([], {"a": (2, 2, 1, 0)}, ["page pool_short a"], id="lost"),
        pytest.param([], {"a": (2, 2, 2, 1)}, [], id="old-ones-serve-during-replacement"),
    ],
)
def test_causes_stand_before_symptoms(
    problems: list[Problem], pools: dict[str, tuple[int, int, int, int]], expected: list[str]
) -> None:
    counts = {
        name: PoolCounts(desired=desired, minimum=minimum, serving=serving, starting=starting)
        for name, (desired, minimum, serving, starting) in pools.items()
    }
    found = order_problems(problems, counts)
    assert [f"{each.severity} {each.kind} {each.pool}" for each in found] == expected
    assert found == order_problems(problems[::-1], counts)


def test_counts_say_what_serves() -> None:
    counts = PoolCounts(desired=2, minimum=2, serving=2, starting=1)
    assert str(counts) == "2 of 2 replicas serve, 1 starts"


@pytest.mark.parametrize(
    ("fields", "reason"), [(LOADING, "it starts"), ({}, "it accepts requests")]
)
def test_phase_of_gateway_names_no_model(fields: dict[str, object], reason: str) -> None:
    result = run(replica(0, **fields), replica(1), changes={"serves_model": False})
    assert result.phases["a-2-0"].reason == reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": -1}, "replicas of pool a must be 0 or more"),
        ({"max_surge": 0}, "set max_surge or max_unavailable"),
    ],
)
def test_impossible_pool_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(POOL, **fields)


def test_documentation_has_the_table_of_states() -> None:
    page = Path(__file__).parents[3] / "docs/explanation/replica-status.md"
    rows = [f"| {state} | {row.condition} | `{row.phase}` |\n" for state, row in STATES.items()]
    assert "".join(rows) in page.read_text()
    rows = [
        f"| `{kind}` | {row.severity} | {row.sentence.format(reason='...')} |\n"
        for kind, row in PROBLEMS.items()
    ]
    assert "".join(rows) in page.read_text()
