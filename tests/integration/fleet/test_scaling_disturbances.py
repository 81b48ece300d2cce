"""Whatever happens in the middle of a scale-down or a rollout, the pool keeps what its demand needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.rollout_fleet import PLAN, RolloutFleet, declare
from tests.support.simulated_cluster import SimulatedBehaviour

from argosy.deployment import FleetConfig, set_replicas
from argosy.policy.reconciliation import ObservedFleet
from argosy.policy.rollout import CommandKind, RolloutState
from argosy.store import FleetEvent

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
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RolloutFleet]:
    """Return a fleet with the replicas for a high demand."""
    monkeypatch.setattr("argosy.fleet.control.fleet_autoscaler.DECISION_INTERVAL_S", 2.0)
    fleet = RolloutFleet(tmp_path, monkeypatch)
    fleet.gateways.tokens_per_s = HIGH
    fleet.apply(declare_scaled())
    fleet.lead()
    await fleet.until(lambda: fleet.ready("v1") == 4)
    fleet.round_s = 5.0
    yield fleet
    await fleet.close()


def watch_floor(fleet: RolloutFleet, floor: int) -> None:
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
    watch_floor(fleet, 1)
    await fleet.until(lambda: fleet.ready("v1") == 3)


async def test_metrics_outage_during_a_scale_down_holds(fleet: RolloutFleet) -> None:
    await lower_demand(fleet)
    fleet.gateways.has_metrics = False
    await fleet.until(lambda: "metrics are missing" in last_decision(fleet))
    held = len(fleet.replicas("v1"))
    await fleet.wait(200.0)
    assert len(fleet.replicas("v1")) == held
    fleet.gateways.has_metrics = True
    await fleet.until(lambda: fleet.ready("v1") == 1)


async def test_next_controller_continues_a_scale_down(fleet: RolloutFleet) -> None:
    await lower_demand(fleet)
    await fleet.take_over()
    await fleet.until(lambda: fleet.ready("v1") == 1)
    await fleet.wait(30.0)
    assert fleet.ready("v1") == 1


async def test_scale_by_hand_ends_a_scale_down(fleet: RolloutFleet) -> None:
    await lower_demand(fleet)
    fleet.apply(set_replicas(declare_scaled(), "chat", 5))
    await fleet.until(lambda: fleet.ready("v1") == 5)
    assert "Paused, because an operator scaled to 5 by hand" in last_decision(fleet)
    await fleet.wait(200.0)
    assert fleet.ready("v1") == 5
    fleet.apply(declare_scaled())
    await fleet.until(lambda: fleet.ready("v1") == 1)


async def test_pool_that_cannot_start_keeps_what_serves(fleet: RolloutFleet) -> None:
    await lower_demand(fleet)
    fleet.cluster.behaviour = SimulatedBehaviour(
        provisioning_s=(0.0, 0.0), loading_s=(0.1, 0.2), failed_start_share=1.0
    )
    fleet.gateways.tokens_per_s = 2 * HIGH
    watch_floor(fleet, fleet.ready("v1"))
    num_starts = len(fleet.events("replica_start"))
    await fleet.until(lambda: len(fleet.events("replica_start")) > num_starts + 4)
    fleet.cluster.behaviour = SimulatedBehaviour(provisioning_s=(0.0, 0.0), loading_s=(0.1, 0.2))
    await fleet.until(lambda: fleet.ready("v1") == 6)


async def test_node_that_leaves_during_a_scale_down_is_replaced(fleet: RolloutFleet) -> None:
    await lower_demand(fleet)
    watch_floor(fleet, 0)
    node = fleet.replicas("v1")[0].node
    fleet.cluster.lose_node(node)
    await fleet.until(lambda: not any(each.node == node for each in fleet.replicas("v1")))
    await fleet.until(lambda: fleet.ready("v1") == 1)
    fleet.gateways.tokens_per_s = HIGH
    await fleet.until(lambda: fleet.ready("v1") == 4)


async def test_scale_down_and_outage_during_a_rollout(fleet: RolloutFleet) -> None:
    """The stable version keeps the replicas for the whole demand, and no metrics promote nothing."""
    second = declare_scaled("v2", auto_promote=False, max_step_s=86_400)
    fleet.apply(second)
    await fleet.until_state(RolloutState.STEP)
    assert fleet.ready("v1") == 4
    fleet.gateways.tokens_per_s = LOW
    watch_floor(fleet, 1)
    await fleet.until(lambda: fleet.ready("v1") == 1)
    assert fleet.ready("v2") >= 1
    fleet.gateways.has_metrics = False
    await fleet.until(lambda: "no measurement" in last_event(fleet, "rollout_gate").reason)
    fleet.command(CommandKind.PROMOTE)
    await fleet.until(lambda: fleet.events("rollout_refused"))
    assert fleet.record.state is RolloutState.STEP
    fleet.apply(set_replicas(second, "chat", 3))
    await fleet.until(lambda: fleet.ready("v1") == 3)
    fleet.gateways.has_metrics = True
    while fleet.states()[-1] != "done":  # refused while the candidate lacks replicas
        fleet.command(CommandKind.PROMOTE, reason="hotfix", force=True)
        await fleet.wait(20.0)
    await fleet.until(lambda: fleet.ready("v2") == 3 and not fleet.replicas("v1"))
