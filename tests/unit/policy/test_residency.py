"""Residency: cases by hand, and simulated nodes on which no model starves, thrashes or exceeds the memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.residency import (
    MIN_AWAKE_RELOADS,
    MIN_RELOAD_S,
    Residency,
    ResidentModel,
    decide_residency,
)

AWAKE, ASLEEP, WAKING = Residency.AWAKE, Residency.ASLEEP, Residency.WAKING
FALLING = Residency.FALLING_ASLEEP


def model(name: str, residency: Residency = ASLEEP, **fields: object) -> ResidentModel:
    defaults = {"since": 0.0, "awake_bytes": 10, "asleep_bytes": 1, "reload_s": 1.0}
    return ResidentModel(name=name, residency=residency, **(defaults | fields))  # type: ignore[arg-type]


def idle(name: str, since: float = 0.0, **fields: object) -> ResidentModel:
    return model(name, AWAKE, idle_since=since, **fields)


@pytest.mark.parametrize(
    ("models", "memory", "wakes", "sleeps", "misfits"),
    [
        pytest.param([model("a", waiting_s=1), idle("b")], 20, "a", "", "", id="room for both"),
        pytest.param([model("a"), idle("b")], 20, "", "", "", id="no request, no wake"),
        pytest.param([model("a", waiting_s=1), idle("b")], 12, "", "b", "", id="idle one leaves"),
        pytest.param(
            [model("a", waiting_s=1), model("b", AWAKE, since=98.0)], 12, "", "", "", id="too young"
        ),
        pytest.param(
            [model("a", waiting_s=1), model("b", AWAKE, since=97.0)], 12, "", "b", "", id="old"
        ),
        pytest.param(
            [model("a", waiting_s=1), idle("b", is_pinned=True)], 12, "", "", "a", id="pin"
        ),
        pytest.param([model("a", waiting_s=1), model("b", FALLING)], 12, "", "", "", id="leaving"),
        pytest.param(
            [model("a", waiting_s=1), model("b", waiting_s=2), model("c", FALLING)],
            *(22, "b", "", ""),
            id="longest wait first, and the second waits for what is being freed",
        ),
        pytest.param(
            [model("a", waiting_s=3, reload_s=9), model("b", waiting_s=1)],
            *(12, "b", "", ""),
            id="waiting seconds count by the reload",
        ),
        pytest.param(
            [model("a", waiting_s=1), idle("b", rate=5), idle("c", rate=4, reload_s=2), idle("d")],
            *(31, "", "d", ""),
            id="least rate times reload",
        ),
        pytest.param(
            [model("a", waiting_s=1, awake_bytes=27), idle("b"), idle("c", awake_bytes=19)],
            *(31, "", "b,c", ""),
            id="as many as needed",
        ),
        pytest.param(
            [
                model("a", waiting_s=1, awake_bytes=19),
                idle("b", 1.0),
                idle("c", 2.0, awake_bytes=25),
            ],
            *(36, "", "c", ""),
            id="none that is not needed",
        ),
        pytest.param(
            [
                model("a", waiting_s=9, awake_bytes=30),
                model("b", waiting_s=1),
                model("c", AWAKE, since=99.0),
            ],
            *(32, "", "", ""),
            id="a small one does not overtake",
        ),
        pytest.param(
            [idle("a", keep_alive_s=100.0), idle("b", 1.0, keep_alive_s=100.0)],
            None,
            "",
            "a",
            "",
            id="keep-alive",
        ),
        pytest.param([idle("a", since=99.0, keep_alive_s=0.0)], 99, "", "a", "", id="at once"),
        pytest.param(
            [idle("a", is_pinned=True, keep_alive_s=0.0)], 99, "", "", "", id="pinned for ever"
        ),
        pytest.param([model("a", is_pinned=True)], 99, "a", "", "", id="pinned ones wake up"),
        pytest.param(
            [idle("a", 1.0), idle("b", 2.0), model("c", AWAKE)], 25, "", "a", "", id="too full"
        ),
        pytest.param(
            [model("a", waiting_s=1, awake_bytes=30), idle("b")], 20, "", "", "a", id="too large"
        ),
        pytest.param([model("a", WAKING, waiting_s=1)], 99, "", "", "", id="already waking"),
    ],
)
def test_decision(
    models: list[ResidentModel], memory: int | None, wakes: str, sleeps: str, misfits: str
) -> None:
    decision = decide_residency(models, memory, 100.0)
    names = (",".join(each) for each in (decision.wakes, decision.sleeps, decision.misfits))
    assert tuple(names) == (wakes, sleeps, misfits)


STEP_S = 0.25


@dataclass
class Node:
    """Simulated node, on which a model serves one request in each step."""

    reloads: list[float]
    sizes: list[int]
    pinned: set[int]
    memory: int
    now: float = 0.0
    states: list[Residency] = field(default_factory=list)
    since: list[float] = field(default_factory=list)
    queues: list[list[float]] = field(default_factory=list)
    idle_since: list[float | None] = field(default_factory=list)
    wakes: list[list[float]] = field(default_factory=list)
    longest_wait: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.sizes)
        self.states = [AWAKE if n in self.pinned else ASLEEP for n in range(count)]
        self.since, self.idle_since = [0.0] * count, [0.0] * count
        self.queues, self.wakes = [[] for _ in range(count)], [[] for _ in range(count)]

    def models(self) -> list[ResidentModel]:
        return [
            model(
                str(n),
                self.states[n],
                since=self.since[n],
                awake_bytes=self.sizes[n],
                reload_s=self.reloads[n],
                waiting_s=sum(self.now - at + STEP_S for at in self.queues[n]),
                idle_since=self.idle_since[n],
                is_pinned=n in self.pinned,
            )
            for n in range(len(self.sizes))
        ]

    def step(self, arrivals: set[int]) -> None:
        for n, queue in enumerate(self.queues):
            if n in arrivals:
                queue.append(self.now)
            if self.states[n] is WAKING and self.now - self.since[n] >= self.reloads[n]:
                self.states[n], self.since[n] = AWAKE, self.now
            elif self.states[n] is FALLING:
                self.states[n], self.since[n] = ASLEEP, self.now
            if self.states[n] is AWAKE and queue:
                self.longest_wait = max(self.longest_wait, self.now - queue.pop(0))
            if queue or n in arrivals:
                self.idle_since[n] = None
            elif self.idle_since[n] is None:
                self.idle_since[n] = self.now
        decision = decide_residency(self.models(), self.memory, self.now)
        for name in decision.wakes:
            n = int(name)
            self.states[n], self.since[n] = WAKING, self.now
            self.wakes[n].append(self.now)
        for name in decision.sleeps:
            n = int(name)
            assert n not in self.pinned
            min_awake_s = MIN_AWAKE_RELOADS * max(MIN_RELOAD_S, self.reloads[n])
            assert self.idle_since[n] is not None or self.now - self.since[n] >= min_awake_s
            self.states[n], self.since[n] = FALLING, self.now
        assert sum(each.bytes_in_use for each in self.models()) <= self.memory
        self.now += STEP_S


@given(st.data())
def test_nobody_starves_or_exceeds_the_memory(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    sizes = data.draw(st.lists(st.integers(2, 10), min_size=count, max_size=count))
    reloads = data.draw(
        st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0]), min_size=count, max_size=count)
    )
    pinned = {0} if data.draw(st.booleans()) else set[int]()
    largest = max(size for n, size in enumerate(sizes) if n not in pinned)
    memory = largest + sum(sizes[n] for n in pinned) + count + data.draw(st.integers(0, 10))
    node = Node(reloads, sizes, pinned, memory)
    rng = data.draw(st.randoms(use_true_random=False))
    loads = [rng.choice([0.0, 0.05, 0.5, 1.0]) for _ in range(count)]
    num_steps = 60
    for _ in range(num_steps):
        node.step({n for n, load in enumerate(loads) if rng.random() < load})
    turn_s = max(reloads) + MIN_AWAKE_RELOADS * max(reloads) + 4 * STEP_S
    backlog_s = num_steps * STEP_S * count
    while any(node.queues):
        node.step(set())
        assert node.now < 2 * num_steps * STEP_S + backlog_s + 4 * count * turn_s * num_steps / 4
    assert node.longest_wait <= num_steps * STEP_S + backlog_s + count * turn_s * num_steps / 4


@given(st.integers(2, 6), st.sampled_from([0.5, 1.0, 2.0]))
def test_two_busy_models_on_memory_for_one_spend_most_of_the_time_awake(
    count: int, reload_s: float
) -> None:
    """Each has requests all the time, which is where models thrash that evict without hysteresis."""
    node = Node([reload_s] * count, [10] * count, set(), 10 + count)
    turn_s = (MIN_AWAKE_RELOADS + 1) * reload_s
    for _ in range(400):
        node.step(set(range(count)))
    changes = sum(map(len, node.wakes))
    assert changes <= node.now / turn_s + 1
    assert all(len(wakes) >= int(changes / count) - 1 for wakes in node.wakes), "turns are fair"
