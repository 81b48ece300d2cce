"""Number of compute threads: it follows the free CPUs, ignores short bursts, and settles among several engines."""

from __future__ import annotations

import pytest

from argosy.policy.thread_count_policy import (
    SHORTAGE_MEASUREMENTS,
    SURPLUS_MEASUREMENTS,
    ThreadCountPolicy,
)


class Machine:
    """CPUs that engines and busy neighbours share equally, as Linux divides them among runnable threads."""

    def __init__(self, cpus: int, policies: list[ThreadCountPolicy]) -> None:
        self.cpus = cpus
        self.policies = policies
        self.busy_neighbours = 0

    def measure(self, *, at_once: bool) -> list[int]:
        """Let each engine measure its available CPUs, all at once or one after the other. Return their threads."""
        available = [self.available_cpus(policy) for policy in self.policies]
        for number, policy in enumerate(self.policies):
            policy.update(available[number] if at_once else self.available_cpus(policy))
        return [policy.threads for policy in self.policies]

    def available_cpus(self, policy: ThreadCountPolicy) -> float:
        runnable = sum(policy.threads for policy in self.policies) + self.busy_neighbours
        share = min(1.0, self.cpus / runnable)
        return self.cpus - share * (runnable - policy.threads)


def test_threads_follow_a_busy_neighbour() -> None:
    machine = Machine(2, [ThreadCountPolicy(2)])
    assert [machine.measure(at_once=True) for _ in range(9)] == [[2]] * 9
    machine.busy_neighbours = 1
    counts = [machine.measure(at_once=True)[0] for _ in range(20)]
    assert counts == [2] * (SHORTAGE_MEASUREMENTS - 1) + [1] * (21 - SHORTAGE_MEASUREMENTS)
    machine.busy_neighbours = 0
    counts = [machine.measure(at_once=True)[0] for _ in range(20)]
    assert counts == [1] * (SURPLUS_MEASUREMENTS - 1) + [2] * (21 - SURPLUS_MEASUREMENTS)


def test_short_bursts_and_small_loads_change_nothing() -> None:
    policy = ThreadCountPolicy(4)
    assert {policy.update(available) for available in (4.0, 2.0, 4.0, 3.6, 3.6, 3.6, 1.0, 4.0)} == {
        4
    }


def test_threads_drop_to_what_is_available_at_once() -> None:
    policy = ThreadCountPolicy(32)
    assert [policy.update(8.2) for _ in range(4)] == [32, 8, 8, 8]
    assert [policy.update(31.9) for _ in range(SURPLUS_MEASUREMENTS)][-1] == 32


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "in-turn"])
@pytest.mark.parametrize(
    ("cpus", "engines", "neighbours"),
    [(2, 2, 0), (2, 3, 1), (4, 2, 0), (4, 3, 0), (4, 3, 2), (8, 3, 1), (64, 5, 7)],
)
def test_several_engines_settle(cpus: int, engines: int, neighbours: int, at_once: bool) -> None:
    policies = [ThreadCountPolicy(cpus, stagger=number) for number in range(engines)]
    machine = Machine(cpus, policies)
    machine.busy_neighbours = neighbours
    for _ in range(600):
        machine.measure(at_once=at_once)
    settled = [machine.measure(at_once=at_once) for _ in range(1200)]
    assert settled == [settled[0]] * 1200
    assert min(settled[0]) >= 1
    assert sum(settled[0]) <= max(engines, cpus - neighbours + 1)


def test_too_early_raise_doubles_the_wait() -> None:
    policy = ThreadCountPolicy(2)
    waits = []
    for _ in range(3):
        while policy.threads > 1:
            policy.update(1.0)
        waits.append(1)
        while policy.update(2.0) == 1:
            waits[-1] += 1
    assert waits == [SURPLUS_MEASUREMENTS, 2 * SURPLUS_MEASUREMENTS, 4 * SURPLUS_MEASUREMENTS]
