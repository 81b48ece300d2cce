"""Rollouts under a virtual clock: strategies, commands, reported failures, and the invariants under any history.

`VirtualRollout` checks the invariants 1 to 6 after each decision. Those of sticky shares are in test_traffic.py.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.virtual_rollout import (
    ABORT,
    FORCED,
    PLANS,
    STATES_WITH_A_WAY_BACK,
    TICK_S,
    VirtualRollout,
    begin,
    bring_to,
    command,
    fast_plan,
)

from argosy.policy.rollout import (
    CheckStatus,
    CommandKind,
    DeclaredVersion,
    GateResult,
    RollbackCause,
    RolloutPlan,
    RolloutState,
    RolloutStep,
    VersionStatus,
    decide,
)
from argosy.policy.rollout.rollout_record import TERMINAL_STATES
from argosy.policy.traffic import UserTraffic


@pytest.mark.parametrize("needed", [1, 2, 5])
@pytest.mark.parametrize("plan", PLANS)
def test_good_version_replaces_the_stable_one(plan: str, needed: int) -> None:
    pool = begin(plan, needed=needed)
    if plan == "a-b":
        pool.run(5_000.0)
        assert (pool.state, pool.shares[-1]) == (RolloutState.STEP, 0.5)
        pool.tick(command(CommandKind.PROMOTE))
    pool.run_until(RolloutState.DONE)
    assert pool.stored_route.stable == "v2"
    assert (pool.ready("v1"), pool.ready("v2")) == (0, needed)
    assert pool.shares == sorted(pool.shares)
    pool.run(60.0)
    assert (pool.ready("v1"), pool.ready("v2")) == (0, needed)


def test_canary_takes_its_steps_in_order() -> None:
    pool = begin()
    pool.run_until(RolloutState.STEP)
    assert pool.stored_route.shadow is not None
    pool.run_until(RolloutState.DONE)
    assert sorted({*pool.shares}) == [0.0, 0.05, 0.25, 0.5, 1.0]
    states = [each.state for each in pool.record.transitions]
    assert states == [
        RolloutState.STARTING,
        RolloutState.WARMING,
        RolloutState.CHECKING,
        *[RolloutState.STEP] * 4,
        RolloutState.SOAKING,
        RolloutState.RETIRING,
        RolloutState.DONE,
    ]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        pytest.param({"result": GateResult.ROLL_BACK}, RollbackCause.GATE, id="gate"),
        pytest.param({"declared": "v1"}, RollbackCause.REVERTED, id="reverted"),
        pytest.param({"declared": "v3"}, RollbackCause.SUPERSEDED, id="superseded"),
    ],
)
@pytest.mark.parametrize("plan", ["canary", "canary-in-place", "blue-green"])
def test_rollback_is_one_route_from_any_traffic(
    plan: str, change: dict[str, object], cause: RollbackCause
) -> None:
    """Invariant 1, with and without a stored record."""
    pool = bring_to(RolloutState.SOAKING, plan)
    pool.run(10.0)
    share = pool.stored_route.share_of("v2")
    assert share > 0.0
    for name, value in change.items():
        setattr(pool, name, value)
    version = pool.stored_route.version
    pool.tick(loses_record=True)
    assert pool.stored_route.version == version + 1
    assert pool.stored_route.share_of("v1") == 1.0
    pool.tick()
    assert pool.stored_route.share_of("v1") == 1.0
    if change != {"declared": "v3"}:
        assert pool.record.cause in {cause, RollbackCause.ROUTE}


def test_failed_check_rolls_back_before_any_traffic() -> None:
    pool = bring_to(RolloutState.CHECKING)
    pool.check = CheckStatus.FAILED
    pool.run_until(RolloutState.ABORTED)
    assert pool.record.cause is RollbackCause.CHECK
    assert {*pool.shares} == {0.0}
    assert pool.ready("v2") == 0


def test_inconclusive_check_waits_for_a_person() -> None:
    pool = bring_to(RolloutState.CHECKING)
    pool.check = CheckStatus.INCONCLUSIVE
    pool.run(10.0)
    assert pool.state is RolloutState.INCONCLUSIVE
    pool.tick(command(CommandKind.RESUME))
    assert pool.state is RolloutState.INCONCLUSIVE
    assert {*pool.shares} == {0.0}
    pool.tick(command(CommandKind.RESUME, force=True, reason="the set is too small"))
    pool.run_until(RolloutState.DONE)


def test_gateway_rolls_back_without_the_controller() -> None:
    pool = bring_to(RolloutState.SOAKING)
    pool.run(10.0)
    pool.route = pool.stored_route.roll_back("all requests fail", pool.now)
    pool.history.append((pool.now, pool.route.version))
    pool.run_until(RolloutState.ABORTED)
    assert pool.record.cause is RollbackCause.ROUTE
    assert pool.shares[-1] == 0.0


def test_rollout_ends_if_the_record_of_its_last_route_is_lost() -> None:
    """The route serves only the new version, whose replicas must stay whatever the gate says then."""
    pool = begin()
    pool.run_until_step(4)
    pool.tick(seconds=30.0, loses_record=True)
    assert (pool.state, pool.stored_route.stable) == (RolloutState.SOAKING, "v2")
    pool.result = GateResult.ROLL_BACK
    decision = pool.tick(ABORT)
    assert decision.refusals
    pool.run_until(RolloutState.DONE)
    assert pool.ready("v2") == pool.needed


def test_rejected_version_is_not_tried_again_until_a_person_permits_it() -> None:
    """Invariant 5."""
    pool = bring_to(RolloutState.STEP)
    pool.result = GateResult.ROLL_BACK
    pool.run_until(RolloutState.ABORTED)
    pool.result = GateResult.PROMOTE
    pool.run(300.0)
    assert pool.state is RolloutState.ABORTED
    assert "is not tried again" in pool.tick().status
    pool.declared = "v1"
    pool.run(30.0)
    pool.declared = "v2"
    pool.run(30.0)
    assert pool.state is RolloutState.ABORTED
    pool.tick(command(CommandKind.RESUME, reason="the driver is mended"))
    pool.run_until(RolloutState.DONE)


def test_another_version_replaces_a_rollout_in_the_middle() -> None:
    """Invariant 6."""
    pool = bring_to(RolloutState.STEP)
    first = pool.record
    pool.declared = "v3"
    pool.run_until(RolloutState.DONE)
    assert pool.record.candidate == "v3"
    assert pool.record.salt != first.salt
    assert pool.rollouts.verdicts == ()


def test_equal_digest_starts_no_rollout() -> None:
    """Invariant 7: a change that needs no restart causes none."""
    pool = VirtualRollout(PLANS["canary"])
    pool.plan = PLANS["blue-green"]
    pool.run(60.0)
    assert pool.rollouts.current is None
    assert pool.stored_route.version == 1


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_spent_error_budget_pauses_until_forced(budget: float) -> None:
    pool = bring_to(RolloutState.STEP)
    pool.error_budget = budget
    pool.run(60.0)
    assert pool.state is RolloutState.PAUSED
    decision = pool.tick(command(CommandKind.RESUME))
    assert "error budget is spent" in decision.refusals[0]
    assert pool.state is RolloutState.PAUSED
    pool.tick(command(CommandKind.RESUME, force=True, reason="it mends the cause"))
    pool.run_until(RolloutState.DONE)


def test_spent_error_budget_delays_the_start() -> None:
    pool = VirtualRollout(PLANS["canary"], error_budget=0.0)
    pool.declared = "v2"
    pool.run(60.0)
    assert pool.tick().status.endswith("; 0% of the error budget is left, more than 0% is needed")
    assert pool.state is RolloutState.PLANNED
    pool.error_budget = 0.5
    pool.run_until(RolloutState.DONE)


def test_pause_keeps_the_share_and_the_gate() -> None:
    pool = begin()
    pool.run_until_step(2)
    pool.tick(command(CommandKind.PAUSE))
    pool.run(700.0)
    assert (pool.state, pool.shares[-1]) == (RolloutState.PAUSED, 0.25)
    pool.tick(command(CommandKind.RESUME))
    assert pool.state is RolloutState.STEP
    pool.tick(command(CommandKind.PAUSE))
    pool.result = GateResult.ROLL_BACK
    pool.run_until(RolloutState.ABORTED)


def test_promotion_without_evidence_needs_force_and_a_reason() -> None:
    pool = begin()
    pool.result = GateResult.INCONCLUSIVE
    pool.run_until_step(0)
    decision = pool.tick(command(CommandKind.PROMOTE))
    assert decision.refusals == (
        "promote by ann: the gate says so; repeat it with force and a reason to go on without",
    )
    with pytest.raises(ValueError, match="needs a reason"):
        command(CommandKind.PROMOTE, force=True)
    pool.tick(FORCED)
    assert (pool.record.step, pool.record.is_forced) == (1, True)
    pool.result = GateResult.ROLL_BACK
    pool.run_until(RolloutState.DONE)


def test_refused_promotion_leaves_the_gate_in_force() -> None:
    pool = bring_to(RolloutState.SOAKING)
    pool.run_until_step(4)
    pool.kill("v2", count=1)
    assert "too few ready replicas" in pool.tick(FORCED).refusals[0]
    pool.result = GateResult.ROLL_BACK
    pool.run_until(RolloutState.ABORTED)
    assert pool.record.cause is RollbackCause.GATE


def test_promotion_skips_the_time_of_a_step_but_not_the_checks() -> None:
    pool = begin(RolloutPlan())
    decision = pool.tick(command(CommandKind.PROMOTE))
    assert "has not been checked yet" in decision.refusals[0]
    pool.run_until(RolloutState.STEP)
    pool.tick(command(CommandKind.PROMOTE, rollout="p-0"))
    assert pool.record.step == 0
    pool.tick(command(CommandKind.PROMOTE, rollout=pool.record.id))
    assert pool.record.step == 1
    pool.tick(*[command(CommandKind.PROMOTE)] * 2)
    assert pool.record.step == 2


def test_manual_plan_waits_for_people() -> None:
    pool = begin(fast_plan(auto_promote=False))
    pool.run_until(RolloutState.INCONCLUSIVE)
    assert pool.record.resume_state is RolloutState.STEP
    assert pool.tick().status == "inconclusive: no promotion within 600 s"
    status = pool.tick(command(CommandKind.RESUME)).status
    assert status == "step: resume by ann; a person has to promote or abort it"
    for _ in range(5):
        pool.run(100.0)
        pool.tick(command(CommandKind.PROMOTE))
    pool.run_until(RolloutState.DONE)


def test_salt_and_heavy_tenants_come_from_the_history() -> None:
    pool = VirtualRollout(PLANS["canary"])
    history = [UserTraffic(key=("large", f"u{number}"), weights=(1.0,)) for number in range(50)]
    declared = DeclaredVersion(digest="v2", plan=pool.plan)
    decision = decide(pool.rollouts, declared, pool.observe(), pool.now, history=history)
    assert decision.route is not None
    assert decision.route.per_session_tenants == ("large",)
    assert decision.route.salt.startswith("p-1/")


ACTIONS = st.one_of(
    st.tuples(st.just("run"), st.sampled_from([5, 30, 200])),
    st.tuples(st.just("result"), st.sampled_from([*GateResult, None])),
    st.tuples(st.just("declare"), st.sampled_from(["v1", "v2", "v3"])),
    st.tuples(st.just("kill"), st.sampled_from(["v1", "v2", "v3"])),
    st.tuples(st.just("needed"), st.integers(0, 6)),
    st.tuples(st.just("check"), st.sampled_from(CheckStatus)),
    st.tuples(st.just("budget"), st.sampled_from([None, 0.0, 0.5])),
    st.tuples(st.just("crash"), st.sampled_from(["record", "route"])),
    st.tuples(st.just("lose"), st.just(0)),
    st.tuples(st.just("command"), st.sampled_from([*CommandKind, "forced"])),
)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(PLANS)),
    st.integers(1, 5),
    st.lists(ACTIONS, min_size=1, max_size=14),
)
def test_invariants_hold_under_any_history(
    plan: str, needed: int, actions: list[tuple[str, object]]
) -> None:
    """Also under crashes of the controller and lost records; then each rollout ends."""
    pool = begin(plan, needed=needed)
    for name, value in actions:
        match name, value:
            case "run", int(seconds):
                pool.run(seconds)
            case "declare", str(digest):
                pool.declared = digest
            case "kill", str(digest):
                pool.kill(digest)
            case "needed", int(count):
                pool.needed = count
            case "crash", lost:
                pool.tick(loses_record=lost == "record", loses_route=lost == "route")
            case "lose", _:
                pool.rollouts = msgspec.structs.replace(
                    pool.rollouts, current=None, version=pool.rollouts.version + 1
                )
            case "command", str(kind):
                sent = FORCED if kind == "forced" else command(CommandKind(kind))
                pool.tick(sent)
            case "budget", _:
                pool.error_budget = value  # type: ignore[assignment]
            case _:
                setattr(pool, name, value)
        pool.tick()
    pool.needed, pool.error_budget = max(1, pool.needed), None
    pool.check, pool.result = CheckStatus.PASSED, GateResult.PROMOTE
    for _ in range(4):
        pool.tick(command(CommandKind.RESUME, force=True, reason="go on"))
        pool.run(200.0)
        pool.tick(command(CommandKind.PROMOTE))
    pool.run(600.0)
    current = pool.rollouts.current
    assert current is None or current.state in TERMINAL_STATES or plan == "a-b"
    if current is None or current.state in TERMINAL_STATES:
        route = pool.stored_route
        assert pool.ready(route.stable) == pool.needed == len(pool.replicas)
        assert route.share_of(route.stable) == 1.0


@pytest.mark.parametrize(
    ("share", "needed", "replicas"),
    [(0.25, 2, 1), (0.5, 2, 2), (0.25, 4, 2), (0.05, 16, 1), (0.05, 40, 2), (0.25, 40, 10)],
)
def test_replicas_of_a_candidate_are_not_idle(share: float, needed: int, replicas: int) -> None:
    """Each gets at least half the requests of a stable one, as far as there is more than one."""
    assert RolloutPlan().candidate_replicas(share, needed) == replicas


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: RolloutPlan(soak_s=1e9), "at most max_step_s"),
        (lambda: RolloutPlan(steps=(RolloutStep(share=0.5), RolloutStep(share=0.1))), "not fall"),
        (
            lambda: RolloutPlan(strategy="rolling", steps=(RolloutStep(share=0.5),)),
            "has no steps",
        ),
        (lambda: RolloutPlan(strategy="a_b", steps=()), "exactly one step"),
        (lambda: RolloutStep(share=1.0), "between 0 and 1"),
    ],
    ids=["soak", "fall", "rolling", "a-b", "share"],
)
def test_invalid_plans_are_refused(create: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create()


# --- failures that users of other systems reported (docs/explanation/rollout-evidence.md) ---------


@pytest.fixture
def pool() -> VirtualRollout:
    return begin()


@pytest.mark.parametrize("result", [GateResult.INCONCLUSIVE, None])
def test_unmeasured_step_is_no_success(pool: VirtualRollout, result: GateResult | None) -> None:
    pool.run_until_step(1)
    pool.result = result
    pool.run(500.0)
    assert pool.record.step == 1
    assert result is None or pool.tick().status.endswith("; the gate says so")
    pool.run(5_000.0)
    assert pool.state is RolloutState.INCONCLUSIVE


def test_abort_ends_the_share_at_once(pool: VirtualRollout) -> None:
    for plan in PLANS:
        for needed in (1, 2, 4):
            for state in (RolloutState.STEP, RolloutState.SOAKING):
                other = begin(plan, needed=needed)
                has_steps = bool(other.plan.steps)
                if has_steps is (state is RolloutState.SOAKING):
                    continue
                other.run_until(state)
                other.run(15.0)
                other.tick(ABORT)
                assert other.stored_route.share_of("v2") == 0.0, (plan, needed, state)
                other.run_until(RolloutState.ABORTED)
                assert (other.ready("v2"), other.stored_route.shadow) == (0, None)
    assert pool.state is RolloutState.STARTING


def test_weight_follows_ready_replicas(pool: VirtualRollout) -> None:
    pool.start_s = 60.0
    pool.run_until_step(3)
    pool.kill("v2", 3)
    pool.tick()
    assert pool.stored_route.share_of("v2") <= 0.25
    pool.run(100.0)
    assert pool.stored_route.share_of("v2") >= 0.5


def test_candidate_that_never_starts_is_rolled_back(pool: VirtualRollout) -> None:
    pool.unstartable.add("v2")
    pool.kill("v2")
    aborted = begin()
    aborted.unstartable.add("v2")
    aborted.kill("v2")
    aborted.run(60.0)
    aborted.tick(ABORT)
    aborted.run_until(RolloutState.ABORTED, max_s=30.0)
    pool.run_until(RolloutState.ABORTED)
    assert pool.record.reason == "0 of 1 replicas are ready after 1800 s"


def test_abort_wins_over_any_other_command(pool: VirtualRollout) -> None:
    others = [*map(command, CommandKind), FORCED]
    for state in STATES_WITH_A_WAY_BACK:
        for other in others:
            for pair in ((ABORT, other), (other, ABORT)):
                pool = bring_to(state)
                pool.tick(*pair)
                assert pool.record.cause is RollbackCause.COMMAND, (state, pair)
                pool.tick(FORCED)
                assert pool.record.cause is RollbackCause.COMMAND
    pool = bring_to(RolloutState.STEP)
    pool.tick(command(CommandKind.PAUSE), command(CommandKind.PROMOTE))
    assert pool.record.transitions[-2].step == 1


def test_abort_without_a_rollout_does_nothing(pool: VirtualRollout) -> None:
    idle = VirtualRollout(PLANS["canary"])
    decision = idle.tick(ABORT)
    assert decision.refusals == ("abort by ann: no rollout is running",)
    assert idle.ready("v1") == idle.needed
    pool.run_until(RolloutState.DONE)
    pool.tick(ABORT)
    assert (pool.state, pool.ready("v2")) == (RolloutState.DONE, pool.needed)


def test_no_candidate_returns_after_an_abort(pool: VirtualRollout) -> None:
    pool.run_until_step(2)
    pool.tick(ABORT)
    pool.needed = 7
    pool.kill("v1", 1)
    pool.kill("v2", 1)
    before = pool.ready("v2")
    for _ in range(60):
        pool.tick()
        assert pool.status("v2").existing <= before
    assert (pool.ready("v1"), pool.status("v2").existing) == (7, 0)


def test_three_versions_in_ten_seconds(pool: VirtualRollout) -> None:
    for digest in ("v3", "v4", "v5"):
        pool.declared = digest
        pool.tick(seconds=3.0)
        assert pool.ready("v1") == pool.needed
    while pool.rollouts.current is None or pool.state is not RolloutState.DONE:
        pool.tick()
        assert max(pool.ready("v1"), pool.ready("v5")) == pool.needed
    assert pool.record.candidate == "v5"


def test_revert_in_any_state_keeps_the_serving_version(pool: VirtualRollout) -> None:
    for state in STATES_WITH_A_WAY_BACK:
        for forgets in (False, True):
            pool = bring_to(state)
            if forgets:
                pool.rollouts = msgspec.structs.replace(pool.rollouts, current=None)
            pool.declared = "v1"
            for _ in range(60):
                pool.tick()
                assert pool.ready("v1") == pool.needed
            assert pool.stored_route.share_of("v1") == 1.0
            assert pool.status("v2").existing == 0
            assert pool.rollouts.current is None or pool.state is RolloutState.ABORTED


def test_traffic_goes_to_what_is_healthy(pool: VirtualRollout) -> None:
    pool.run_until(RolloutState.SOAKING)
    pool.run(40.0)
    pool.unstartable.add("v1")
    pool.kill("v1")
    pool.tick(ABORT)
    assert pool.stored_route.share_of("v2") == 1.0
    pool.run(60.0)
    assert pool.ready("v2") == pool.needed
    pool.unstartable.clear()
    pool.run_until(RolloutState.ABORTED)
    assert pool.stored_route.share_of("v1") == 1.0
    rejected = bring_to(RolloutState.SOAKING)
    rejected.run(10.0)
    rejected.kill("v1", 2)
    rejected.result = GateResult.ROLL_BACK
    rejected.tick()
    assert rejected.stored_route.share_of("v2") == 0.0
    other = bring_to(RolloutState.SOAKING)
    other.run(40.0)
    other.kill("v2")
    other.tick()
    assert other.stored_route.share_of("v1") == 1.0


def test_rollback_at_the_peak_fits_the_stable_version(pool: VirtualRollout) -> None:
    pool.run_until_step(3)
    pool.needed = 6
    pool.tick(ABORT)
    while pool.state is not RolloutState.ABORTED:
        share = pool.stored_route.share_of("v1")
        assert share * pool.needed <= pool.ready("v1") + 1e-9
        pool.tick()


def test_one_gpu_without_surge(pool: VirtualRollout) -> None:
    done = begin("canary-in-place", needed=1)
    done.run_until(RolloutState.DONE)
    assert len(done.replicas) == 1
    aborted = begin("rolling-in-place", needed=1)
    aborted.run_until(RolloutState.SOAKING)
    aborted.run(10.0)
    aborted.tick(ABORT)
    assert aborted.stored_route.share_of("v1") == 1.0
    aborted.run_until(RolloutState.ABORTED)
    aborted.run(40.0)
    assert (aborted.ready("v1"), aborted.ready("v2")) == (1, 0)
    assert "max_surge is 0" in PLANS["rolling-in-place"].describe_risks(1)[0]
    assert "Up to 8 replicas" in pool.plan.describe_risks(4)[0]
    assert "inconclusive" in PLANS["blue-green"].describe_risks(4)[1]


def test_failing_version_costs_no_healthy_replica(pool: VirtualRollout) -> None:
    failing = VersionStatus(existing=2, failure="it crashed 5 times, last: SIGSEGV")
    versions = {"v1": pool.status("v1"), "v2": failing}
    observation = msgspec.structs.replace(pool.observe(), versions=versions)
    pool.observe = lambda: observation  # type: ignore[method-assign]
    decision = pool.tick()
    assert decision.split is not None
    assert (decision.split.stable, decision.split.stable_replicas) == ("v1", 4)
    assert pool.rollouts.verdicts[0].cause is RollbackCause.FAILURE


def test_broken_stable_version_does_not_block_its_fix(pool: VirtualRollout) -> None:
    pool.unstartable.add("v1")
    pool.kill("v1")
    pool.run_until(RolloutState.DONE)
    assert pool.ready("v2") == pool.needed


def test_done_means_routed_at_every_gateway(pool: VirtualRollout) -> None:
    for state in (RolloutState.SOAKING, RolloutState.RETIRING):
        pool.run_until(state)
        pool.gateway_lag_s = 1e6
        pool.run(120.0)
        assert pool.state is state
        pool.gateway_lag_s = 5.0
    pool.run_until(RolloutState.DONE)


def test_replica_count_has_one_owner(pool: VirtualRollout) -> None:
    pool.run_until_step(2)
    pool.kill("v1", 1)
    pool.replicas += pool.replicas[-1:]
    pool.run(TICK_S)
    assert pool.status("v1").existing == pool.needed
    assert pool.status("v2").existing == pool.plan.candidate_replicas(0.25, pool.needed)
