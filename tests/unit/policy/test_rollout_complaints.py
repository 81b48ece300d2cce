"""Failures that users of other systems reported; docs/explanation/rollout-evidence.md numbers them."""

from __future__ import annotations

import msgspec
import pytest
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
)

from argosy.policy.rollout import (
    CommandKind,
    GateResult,
    RollbackCause,
    RolloutState,
    VersionStatus,
)


@pytest.fixture
def pool() -> VirtualRollout:
    return begin()


def test_unmeasured_step_is_no_success(pool: VirtualRollout) -> None:
    pool.result = GateResult.INCONCLUSIVE
    pool.run_until(RolloutState.INCONCLUSIVE)
    pool.run(5_000.0)
    assert pool.state is RolloutState.INCONCLUSIVE


def test_ended_measurement_is_no_success(pool: VirtualRollout) -> None:
    pool.run_until_step(1)
    pool.result = None
    pool.run(500.0)
    assert pool.record.step == 1


def test_step_without_traffic_is_extended_and_says_so(pool: VirtualRollout) -> None:
    pool.result = GateResult.INCONCLUSIVE
    pool.run_until_step(0)
    pool.run(100.0)
    assert pool.record.step == 0
    assert pool.tick().status.endswith("; the gate says so")


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
