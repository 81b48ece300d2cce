"""Reconciliation under a virtual clock: any history of failures and changes ends in the declared state."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests.support.simulated_cluster import SimulatedBehaviour
from tests.support.virtual_fleet_controller import (
    LAUNCHER,
    FleetSimulation,
)

from argosy.policy.reconciliation import DesiredPool


def pool(name: str, replicas: int, **fields: object) -> DesiredPool:
    desired = DesiredPool(name=name, launcher=LAUNCHER, generation=1, replicas=replicas)
    return msgspec.structs.replace(desired, **fields)


SHARES = st.sampled_from([(1, 0), (0, 1), (2, 1), (0, 2), (1, 1)])
"""Pairs of `max_surge` and `max_unavailable`."""


class FleetMachine(RuleBasedStateMachine):
    """Any order of failures, changes of the declaration, and changes of the controller, with two pools."""

    @initialize(seed=st.integers(0, 1000), gateways=st.integers(0, 2), warm=st.booleans())
    def create(self, seed: int, gateways: int, *, warm: bool) -> None:
        pools = [
            pool("a", 3, spares=1, requires_warm_up=warm),
            pool("b", 2, max_surge=0, max_unavailable=1),
        ]
        self.simulation = FleetSimulation(pools, seed, gateways, cores=seed % 4 or None)
        self.fleet = self.simulation.fleet
        self.generation = 1

    def replica(self, index: int) -> str:
        names = sorted(self.fleet.cluster.list_replicas())
        return names[index % len(names)] if names else ""

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 20.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.simulation.run(seconds)

    @rule(index=st.integers(0, 9), failure=st.sampled_from(["crash", "hang", "engine", "drain"]))
    def fail(self, index: int, failure: str) -> None:
        name = self.replica(index)
        match failure:
            case "crash":
                self.fleet.cluster.kill(name, "it crashed with SIGSEGV")
            case "drain":
                self.fleet.cluster.drain(name)
            case _:
                self.fleet.cluster.hang(name, engine_only=failure == "engine")
        self.simulation.reconcile()

    @rule(
        name=st.sampled_from("ab"),
        replicas=st.integers(0, 4),
        spares=st.integers(0, 2),
        shares=SHARES,
    )
    def scale(self, name: str, replicas: int, spares: int, shares: tuple[int, int]) -> None:
        declared = self.fleet.pools.get(name) or pool(name, 2)
        self.fleet.declare(
            msgspec.structs.replace(
                declared,
                replicas=replicas,
                spares=spares,
                max_surge=shares[0],
                max_unavailable=shares[1],
            ),
            self.fleet.candidates.get(name),
        )
        self.simulation.reconcile()

    @rule(name=st.sampled_from("ab"), back=st.integers(0, 2), broken=st.booleans())
    def change_generation(self, name: str, back: int, *, broken: bool) -> None:
        """Change to a new generation, or back to an older one."""
        if name not in self.fleet.pools or name in self.fleet.candidates:
            return
        if back == 0:
            self.generation += 1
        generation = max(1, self.generation - back)
        if broken and back == 0:
            self.fleet.broken.add((name, generation))
        self.fleet.declare(msgspec.structs.replace(self.fleet.pools[name], generation=generation))
        self.simulation.reconcile()

    @rule(name=st.sampled_from("ab"))
    def remove_pool(self, name: str) -> None:
        self.fleet.remove(name)
        self.simulation.reconcile()

    @rule(
        name=st.sampled_from("ab"),
        stable=st.integers(0, 3),
        candidate=st.integers(0, 3),
        broken=st.booleans(),
    )
    def divide(self, name: str, stable: int, candidate: int, *, broken: bool) -> None:
        """Divide a pool between its version and a new one, or change the division."""
        pool = self.fleet.pools.get(name)
        if pool is None:
            return
        second = self.fleet.candidates.get(name)
        if second is None:
            self.generation += 1
            second = msgspec.structs.replace(pool, generation=self.generation, spares=0)
            second = msgspec.structs.replace(second, max_unavailable=max(1, pool.max_unavailable))
            if broken:
                self.fleet.broken.add((name, self.generation))
        self.fleet.declare(
            msgspec.structs.replace(pool, replicas=stable),
            msgspec.structs.replace(second, replicas=candidate),
        )
        self.simulation.reconcile()

    @rule(name=st.sampled_from("ab"), is_promoted=st.booleans())
    def unite(self, name: str, *, is_promoted: bool) -> None:
        """End the division in favour of one of the versions."""
        second = self.fleet.candidates.get(name)
        if second is not None:
            self.fleet.declare(second if is_promoted else self.fleet.pools[name])
        self.simulation.reconcile()

    @rule(node=st.sampled_from(["node-0", "node-1"]), restored=st.booleans())
    def lose_node(self, node: str, *, restored: bool) -> None:
        self.fleet.cluster.lose_node(node)
        self.simulation.reconcile()
        if restored:
            self.fleet.cluster.restore_node(node)

    @rule(reason=st.sampled_from(["", "connection refused"]))
    def change_reachability_of_launcher(self, reason: str) -> None:
        self.fleet.cluster.unreachable_reason = reason

    @rule(index=st.integers(0, 1), reachable=st.booleans())
    def change_reachability_of_gateway(self, index: int, *, reachable: bool) -> None:
        if self.fleet.gateways:
            gateway = self.fleet.gateways[index % len(self.fleet.gateways)]
            gateway.is_reachable = reachable

    @rule(wrong=st.booleans())
    def change_health_signal(self, *, wrong: bool) -> None:
        """Let all health checks fail from now on, or succeed again."""
        self.fleet.set_health_signal(is_wrong=wrong)

    @rule(seconds=st.sampled_from([5.0, 100.0]))
    def suspend_controller(self, seconds: float) -> None:
        self.fleet.advance(self.fleet.now + seconds)
        self.simulation.reconcile()

    @rule()
    def take_over(self) -> None:
        self.simulation.take_over()

    @rule(failed=st.sampled_from([0.0, 0.5]), slow=st.sampled_from([0.0, 0.5]))
    def change_behaviour(self, failed: float, slow: float) -> None:
        self.fleet.cluster.behaviour = SimulatedBehaviour(
            failed_start_share=failed, slow_start_share=slow, lifetime_s=100.0, hang_share=0.3
        )

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            with self.simulation:
                self.simulation.settle()


@pytest.mark.parametrize(
    "number",
    [20, pytest.param(1000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)])],
)
def test_any_history_ends_in_declared_state(number: int) -> None:
    run_state_machine_as_test(
        FleetMachine, settings=settings(max_examples=number, stateful_step_count=25)
    )


def test_fleet_follows_a_fixed_history() -> None:
    """Replace, scale, break and repair a fleet in one fixed order."""
    surging, replacing = pool("a", 3, spares=1), pool("b", 2, max_surge=0, max_unavailable=1)
    with FleetSimulation([surging, replacing], seed=1) as simulation:
        fleet = simulation.fleet
        simulation.settle()
        for changed in (surging, replacing):
            fleet.declare(msgspec.structs.replace(changed, generation=2))
        simulation.settle()
        for replica, engine_only in (("a-2-0", False), ("b-2-1", True)):
            fleet.cluster.hang(replica, engine_only=engine_only)
            simulation.settle()
        fleet.cluster.unreachable_reason = "connection refused"
        fleet.declare(msgspec.structs.replace(surging, generation=3, replicas=2))
        simulation.run(10.0)
        simulation.settle()
        fleet.advance(fleet.now + 100.0)
        simulation.reconcile()
        fleet.set_health_signal(is_wrong=True)
        simulation.run(200.0)
        simulation.settle()


@pytest.mark.parametrize(("max_unavailable", "spares"), [(1, 0), (0, 1)])
def test_replacement_makes_room_where_old_replicas_occupy_all_gpus(
    max_unavailable: int, spares: int
) -> None:
    declared = pool("a", 4 - spares, spares=spares, max_unavailable=max_unavailable)
    with FleetSimulation([declared], accelerators=2) as simulation:
        simulation.settle()
        simulation.fleet.declare(msgspec.structs.replace(declared, generation=2))
        simulation.settle()
