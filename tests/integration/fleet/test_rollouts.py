"""A controller rolls versions out and back, and scales, whatever happens to it, to replicas or to the declaration."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.rollout_fleet import PLAN, POOL, RolloutFleet, declare, digest_of
from tests.support.simulated_cluster import SimulatedBehaviour

from argosy.deployment import FleetConfig, set_replicas, stop_everything
from argosy.policy.reconciliation import ObservedFleet
from argosy.policy.rollout import CommandKind, RollbackCause, RolloutState
from argosy.store import FleetEvent


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RolloutFleet]:
    fleet = RolloutFleet(tmp_path, monkeypatch)
    yield fleet
    await fleet.close()


def watch_floor(fleet: RolloutFleet, floor: int = 2) -> None:
    """Check at each round that enough replicas of one version serve, which the gateways know."""

    def check(_: ObservedFleet) -> None:
        assert fleet.gateways.versions() is not None
        assert fleet.num_default_serving() >= floor

    fleet.on_reconciled = check


async def test_good_version_gets_all_users(fleet: RolloutFleet) -> None:
    await fleet.deploy(declare(rollout=PLAN | {"shadow": 0.1}))
    assert fleet.route.version == 1
    watch_floor(fleet)
    fleet.apply(declare("v2", rollout=PLAN | {"shadow": 0.1}))
    await fleet.until_state(RolloutState.STEP)
    versions = fleet.gateways.versions()
    assert versions is not None
    assert versions.route.stable == digest_of("v1")
    states = ["planned", "starting", "warming", "checking", "step", "step", "soaking", "retiring"]
    await fleet.until_states(*states, "done")
    assert fleet.route.stable == digest_of("v2")
    assert not fleet.replicas("v1")
    assert fleet.ready("v2") == 2
    assert "promote" in {event.outcome for event in fleet.events("rollout_gate")}
    done = fleet.record
    fleet.apply(declare("v2", rollout=PLAN | {"shadow": 0.1}), [POOL])  # as an upgrade of Argosy
    await fleet.until(lambda: fleet.ready("v2") == 2)
    await fleet.until(lambda: len(fleet.cluster.list_replicas()) == 2)
    assert {each.generation for each in fleet.replicas("v2")} == {3}
    assert fleet.record == done, "it starts no rollout"


async def test_version_that_does_not_start_is_rolled_back_and_not_tried_again(
    fleet: RolloutFleet,
) -> None:
    await fleet.deploy()
    watch_floor(fleet)
    fleet.cluster.behaviour = SimulatedBehaviour(
        provisioning_s=(0.0, 0.0), loading_s=(0.1, 0.2), failed_start_share=1.0
    )
    fleet.apply(declare("v2"))
    await fleet.until_state(RolloutState.ABORTED)
    assert fleet.record.cause is RollbackCause.FAILURE
    assert "starts in a row failed" in fleet.record.reason
    num_starts = len(fleet.events("replica_start"))
    await fleet.take_over()
    await fleet.until(lambda: len(fleet.events("controller_leads")) == 2)
    fleet.apply(declare("v2", replicas=3))
    await fleet.until(lambda: len(fleet.events("replica_start")) > num_starts)
    assert not fleet.replicas("v2"), "a replica is added to the stable version"
    fleet.command(CommandKind.PROMOTE)
    await fleet.until(lambda: fleet.events("rollout_refused"))
    fleet.cluster.behaviour = SimulatedBehaviour(provisioning_s=(0.0, 0.0), loading_s=(0.1, 0.2))
    fleet.command(CommandKind.RESUME)
    await fleet.until_state(RolloutState.DONE)


async def test_worse_version_is_rolled_back(fleet: RolloutFleet) -> None:
    await fleet.deploy()
    watch_floor(fleet)
    fleet.gateways.error_factor = 4.0
    fleet.apply(declare("v2"))
    await fleet.until_states("step", "rolling_back", "rolled_back", "cleaning", "aborted")
    assert fleet.record.cause is RollbackCause.GATE
    assert fleet.record.reason.startswith("errors is worse")
    assert fleet.route.rollback is not None
    assert fleet.rollouts.verdict_on(digest_of("v2")) is not None


async def test_golden_set_without_evidence_waits_for_a_person(fleet: RolloutFleet) -> None:
    await fleet.deploy()
    watch_floor(fleet)
    fleet.apply(declare("v2", rollout=PLAN | {"quality": [{"set": "support"}]}))
    await fleet.until_states("checking", "inconclusive")
    assert "golden set support: The store has no golden set" in fleet.record.reason
    assert not fleet.route.share_of(digest_of("v2"))
    fleet.command(CommandKind.RESUME, force=True, reason="there is no set yet")
    await fleet.until_state(RolloutState.DONE)


async def test_version_that_crashes_again_and_again_is_rolled_back(fleet: RolloutFleet) -> None:
    await fleet.start_rollout(auto_promote=False)
    for _ in range(3):
        await fleet.until(lambda: fleet.ready("v2"))
        assert fleet.rollouts.current is not None
        assert not fleet.record.cause
        fleet.cluster.kill(fleet.replicas("v2")[0].name, "it crashed with SIGSEGV")
    await fleet.until_state(RolloutState.ABORTED)
    assert "has crashed 3 times, last: it crashed with SIGSEGV" in fleet.record.reason


async def test_version_that_all_gateways_eject_is_rolled_back(fleet: RolloutFleet) -> None:
    await fleet.start_rollout(auto_promote=False)
    await fleet.until(lambda: fleet.ready("v2"))
    fleet.gateways.ejected_generation = 2
    await fleet.wait(5.0)
    fleet.gateways.ejected_generation = None
    await fleet.wait(20.0)
    assert not fleet.record.cause
    fleet.gateways.ejected_generation = 2
    await fleet.until_state(RolloutState.ABORTED)
    assert "gateways have ejected all its replicas" in fleet.record.reason
    assert "its requests or probes failed: status 500" in fleet.record.reason


async def test_lost_candidate_is_not_started_after_an_abort(fleet: RolloutFleet) -> None:
    await fleet.start_rollout()
    await fleet.stop_controller()
    num_starts = len(fleet.events("replica_start"))
    fleet.abort()
    assert not fleet.route.variants, "the abort needs no controller"
    nodes = {each.node for each in fleet.replicas("v2")}
    for node in nodes:
        fleet.cluster.lose_node(node)
    fleet.lead()
    await fleet.until_state(RolloutState.ABORTED)
    await fleet.until(lambda: fleet.ready("v1") == 2)
    later = sorted(fleet.events("replica_start"), key=lambda event: event.number)[num_starts:]
    assert {event.replica for event in later} <= {f"{POOL}-1-0", f"{POOL}-1-1"}


async def test_of_three_versions_in_ten_seconds_the_last_one_serves(fleet: RolloutFleet) -> None:
    await fleet.deploy()
    watch_floor(fleet)
    for mode in ("v2", "v3", "v4"):
        fleet.apply(declare(mode))
        await fleet.wait(4.0)
    await fleet.until_state(RolloutState.DONE, "v4")
    assert fleet.route.stable == digest_of("v4")
    assert {each.generation for each in fleet.cluster.list_replicas().values()} == {4}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(RolloutState.STARTING, marks=pytest.mark.exhaustive),
        RolloutState.STEP,
        pytest.param(RolloutState.SOAKING, marks=pytest.mark.exhaustive),
    ],
)
async def test_revert_ends_the_rollout_and_keeps_the_stable_replicas(
    fleet: RolloutFleet, state: RolloutState
) -> None:
    await fleet.deploy()
    watch_floor(fleet)
    before = {each.name: each.started_at for each in fleet.replicas("v1")}
    fleet.apply(declare("v2"))
    await fleet.until_state(state)
    fleet.apply(declare("v1"))
    await fleet.until_state(RolloutState.ABORTED)
    assert fleet.record.cause is RollbackCause.REVERTED
    await fleet.until(lambda: not fleet.replicas("v2"))
    assert {each.name: each.started_at for each in fleet.replicas("v1")} == before
    fleet.apply(declare("v2"))
    await fleet.until_state(RolloutState.DONE)


async def test_next_controller_continues_in_every_state(fleet: RolloutFleet) -> None:
    await fleet.deploy()
    watch_floor(fleet)
    fleet.apply(declare("v2"))
    seen: list[RolloutState] = []
    while RolloutState.DONE not in seen:
        await fleet.until(
            lambda: fleet.rollouts.current is not None and fleet.record.state not in seen
        )
        seen.append(fleet.record.state)
        await fleet.take_over()
    assert len(seen) > 3
    states = [each.state for each in fleet.record.transitions]  # of which some may be short
    assert len({*states}) == len(states), "none is entered twice"
    assert {*seen} <= {RolloutState.PLANNED, *states}
    assert {each.attempt for each in fleet.cluster.list_replicas().values()} == {1}
    assert fleet.ready("v2") == 2


@pytest.mark.parametrize("document", ["rollout/chat", "route/chat"])
async def test_lost_document_does_not_stop_the_stable_version(
    fleet: RolloutFleet, document: str
) -> None:
    await fleet.start_rollout()
    await fleet.until(lambda: fleet.route.variants and fleet.follows_route)
    await fleet.stop_controller()
    before, version = {each.name for each in fleet.replicas("v1")}, fleet.route.version
    fleet.lose_document(document)
    fleet.apply(declare("v1"))
    fleet.lead()
    await fleet.until(lambda: not fleet.replicas("v2") and fleet.route.version > version)
    assert {each.name for each in fleet.replicas("v1")} == before
    assert fleet.route.stable == digest_of("v1")


@pytest.mark.parametrize(
    "change",
    ["without-rollouts", pytest.param("without-pool", marks=pytest.mark.exhaustive), "down"],
)
async def test_declaration_without_rollouts_ends_them(fleet: RolloutFleet, change: str) -> None:
    await fleet.start_rollout()
    await fleet.until(lambda: fleet.route.variants and fleet.follows_route)
    version = fleet.route.version
    if change == "without-rollouts":
        fleet.apply(declare("v2", rollout=None))
        await fleet.until(lambda: not fleet.replicas("v1") and fleet.ready("v2") == 2)
        assert not fleet.gateways.pools.versions
        fleet.apply(declare("v2"))
        await fleet.until(lambda: fleet.route.stable == digest_of("v2"))
        assert fleet.rollouts.current is None
    else:
        config = declare("v2", name="other") if change == "without-pool" else declare("v2")
        fleet.apply(config if change == "without-pool" else stop_everything(config))
        await fleet.until(lambda: not (fleet.replicas("v1") or fleet.replicas("v2")))
        assert not fleet.rollouts.version
        if change == "down":
            return
        fleet.apply(declare("v3"))
        await fleet.until(lambda: fleet.ready("v3") == 2)
        assert fleet.route.stable == digest_of("v3"), "a first deployment"
    assert fleet.route.version > version
    assert not fleet.route.variants


async def test_versions_replace_each_other_in_place(fleet: RolloutFleet) -> None:
    plan = PLAN | {"strategy": "rolling", "max_surge": 0, "steps": None, "auto_promote": False}
    await fleet.deploy(declare(rollout=plan))

    def check(observed: ObservedFleet) -> None:
        assert sum(each.state != "exited" for each in observed.replicas) <= 2

    fleet.on_reconciled = check
    fleet.apply(declare("v2", rollout=plan))
    await fleet.until_state(RolloutState.SOAKING)
    await fleet.until(lambda: fleet.ready("v2") == 2)
    fleet.command(CommandKind.ABORT)
    await fleet.until_state(RolloutState.ABORTED)
    await fleet.until(lambda: fleet.ready("v1") == 2)
    fleet.command(CommandKind.RESUME)
    await fleet.until_state(RolloutState.SOAKING)
    await fleet.until(lambda: fleet.record.settled_at is not None)
    fleet.command(CommandKind.PROMOTE, force=True, reason="hotfix")
    await fleet.until_state(RolloutState.DONE)
    assert fleet.route.stable == digest_of("v2")


# --- scaling -------------------------------------------------------------------------------------

HIGH, LOW = 330.0, 60.0
"""Demands in tokens per second, for which four replicas and one are needed."""


def declare_scaled(mode: str = "v1", **plan: object) -> FleetConfig:
    return declare(
        mode,
        replicas=None,
        min_replicas=1,
        max_replicas=6,
        autoscaling={"mode": "on", "tokens_per_s": 100.0, "down_window_s": 60.0},
        rollout=PLAN | plan,
    )


@pytest.fixture
async def scaled(fleet: RolloutFleet, monkeypatch: pytest.MonkeyPatch) -> RolloutFleet:
    """Return a fleet with the replicas for a high demand."""
    monkeypatch.setattr("argosy.fleet.control.fleet_autoscaler.DECISION_INTERVAL_S", 2.0)
    fleet.gateways.tokens_per_s = HIGH
    fleet.apply(declare_scaled())
    fleet.lead()
    await fleet.until(lambda: fleet.ready("v1") == 4)
    fleet.round_s = 5.0
    return fleet


def watch_scaled_floor(fleet: RolloutFleet, floor: int) -> None:
    """Check at each round that enough replicas serve."""

    def check(_: ObservedFleet) -> None:
        serving = fleet.ready("v1") + fleet.ready("v2")
        assert serving >= floor

    fleet.on_reconciled = check


def last_event(fleet: RolloutFleet, kind: str) -> FleetEvent:
    return max(fleet.events(kind), key=lambda event: event.number)


def last_decision(fleet: RolloutFleet) -> str:
    return last_event(fleet, "scaling_decision").reason


async def lower_demand(fleet: RolloutFleet) -> None:
    """Lower the demand, and wait until the first replica is removed."""
    fleet.gateways.tokens_per_s = LOW
    watch_scaled_floor(fleet, 1)
    await fleet.until(lambda: fleet.ready("v1") == 3)


async def test_metrics_outage_during_a_scale_down_holds(scaled: RolloutFleet) -> None:
    await lower_demand(scaled)
    scaled.gateways.has_metrics = False
    await scaled.until(lambda: "metrics are missing" in last_decision(scaled))
    held = len(scaled.replicas("v1"))
    await scaled.wait(200.0)
    assert len(scaled.replicas("v1")) == held
    scaled.gateways.has_metrics = True
    await scaled.until(lambda: scaled.ready("v1") == 1)


async def test_next_controller_continues_a_scale_down(scaled: RolloutFleet) -> None:
    await lower_demand(scaled)
    await scaled.take_over()
    await scaled.until(lambda: scaled.ready("v1") == 1)
    await scaled.wait(30.0)
    assert scaled.ready("v1") == 1


async def test_scale_by_hand_ends_a_scale_down(scaled: RolloutFleet) -> None:
    await lower_demand(scaled)
    scaled.apply(set_replicas(declare_scaled(), "chat", 5))
    await scaled.until(lambda: scaled.ready("v1") == 5)
    assert "Paused, because an operator scaled to 5 by hand" in last_decision(scaled)
    await scaled.wait(200.0)
    assert scaled.ready("v1") == 5
    scaled.apply(declare_scaled())
    await scaled.until(lambda: scaled.ready("v1") == 1)


async def test_pool_that_cannot_start_keeps_what_serves(scaled: RolloutFleet) -> None:
    await lower_demand(scaled)
    scaled.cluster.behaviour = SimulatedBehaviour(
        provisioning_s=(0.0, 0.0), loading_s=(0.1, 0.2), failed_start_share=1.0
    )
    scaled.gateways.tokens_per_s = 2 * HIGH
    watch_scaled_floor(scaled, scaled.ready("v1"))
    num_starts = len(scaled.events("replica_start"))
    await scaled.until(lambda: len(scaled.events("replica_start")) > num_starts + 4)
    scaled.cluster.behaviour = SimulatedBehaviour(provisioning_s=(0.0, 0.0), loading_s=(0.1, 0.2))
    await scaled.until(lambda: scaled.ready("v1") == 6)


async def test_node_that_leaves_during_a_scale_down_is_replaced(scaled: RolloutFleet) -> None:
    await lower_demand(scaled)
    watch_scaled_floor(scaled, 0)
    node = scaled.replicas("v1")[0].node
    scaled.cluster.lose_node(node)
    await scaled.until(lambda: not any(each.node == node for each in scaled.replicas("v1")))
    await scaled.until(lambda: scaled.ready("v1") == 1)
    scaled.gateways.tokens_per_s = HIGH
    await scaled.until(lambda: scaled.ready("v1") == 4)


async def test_scale_down_and_outage_during_a_rollout(scaled: RolloutFleet) -> None:
    """The stable version keeps the replicas for the whole demand, and no metrics promote nothing."""
    second = declare_scaled("v2", auto_promote=False, max_step_s=86_400)
    scaled.apply(second)
    await scaled.until_state(RolloutState.STEP)
    assert scaled.ready("v1") == 4
    scaled.gateways.tokens_per_s = LOW
    watch_scaled_floor(scaled, 1)
    await scaled.until(lambda: scaled.ready("v1") == 1)
    assert scaled.ready("v2") >= 1
    scaled.gateways.has_metrics = False
    await scaled.until(lambda: "no measurement" in last_event(scaled, "rollout_gate").reason)
    scaled.command(CommandKind.PROMOTE)
    await scaled.until(lambda: scaled.events("rollout_refused"))
    assert scaled.record.state is RolloutState.STEP
    scaled.apply(set_replicas(second, "chat", 3))
    await scaled.until(lambda: scaled.ready("v1") == 3)
    scaled.gateways.has_metrics = True
    while scaled.states()[-1] != "done":  # refused while the candidate lacks replicas
        scaled.command(CommandKind.PROMOTE, reason="hotfix", force=True)
        await scaled.wait(20.0)
    await scaled.until(lambda: scaled.ready("v2") == 3 and not scaled.replicas("v1"))
