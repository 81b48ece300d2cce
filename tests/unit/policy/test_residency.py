"""Residency: cases by hand, and simulated nodes on which no model starves, thrashes or exceeds the memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.fair_queue import PROMOTE_AFTER_S
from argosy.policy.residency import (
    MIN_AWAKE_RELOADS,
    MIN_IDLE_RELOADS,
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


def idle(name: str, idle_since: float = 0.0, **fields: object) -> ResidentModel:
    return model(name, AWAKE, idle_since=idle_since, **fields)


def free(name: str, waiting_s: float, longest_wait_s: float, **fields: object) -> ResidentModel:
    fields |= {"waiting_s": waiting_s, "longest_wait_s": longest_wait_s, "waiting_tier": 2}
    return model(name, ASLEEP, **fields)


@pytest.mark.parametrize(
    ("models", "memory", "wakes", "sleeps", "misfits"),
    [
        pytest.param([model("a", waiting_s=1), idle("b")], 20, "a", "", "", id="room for both"),
        pytest.param([model("a"), idle("b")], 20, "", "", "", id="no request, no wake"),
        pytest.param([model("a", waiting_s=1), idle("b")], 12, "", "b", "", id="idle one leaves"),
        pytest.param(
            [model("a", waiting_s=1), idle("b", 99.5, since=99.0)],
            12,
            "",
            "",
            "",
            id="idle too soon",
        ),
        pytest.param(
            [model("a", waiting_s=1), idle("b", 98.0, since=99.0)], 12, "", "b", "", id="just woken"
        ),
        pytest.param(
            [free("a", 900, 9.0), model("b", AWAKE, served_tier=1)], 12, "", "", "", id="free flood"
        ),
        pytest.param(
            [free("a", 900, 9.0), idle("b", served_tier=0)], 12, "", "", "", id="paid lately"
        ),
        pytest.param(
            [free("a", 1, 31.0), idle("b", served_tier=0)], 12, "", "b", "", id="promoted"
        ),
        pytest.param(
            [free("a", 1, 31.0), idle("b", since=75.0, served_tier=0)],
            *(12, "", "", ""),
            id="promoted too often",
        ),
        pytest.param(
            [free("a", 1, 31.0), model("b", AWAKE, served_tier=1)],
            12,
            "",
            "",
            "",
            id="paid and busy",
        ),
        pytest.param(
            [model("a", waiting_s=1, waiting_tier=1), model("b", AWAKE, served_tier=2)],
            *(12, "", "b", ""),
            id="paying ones take the memory of free ones",
        ),
        pytest.param(
            [free("a", 900, 9.0), model("b", waiting_s=1, waiting_tier=1), model("c", FALLING)],
            *(22, "b", "", ""),
            id="paying ones wake first",
        ),
        pytest.param(
            [
                free("a", 9, 9.0, awake_bytes=30),
                free("b", 1, 1.0),
                model("c", AWAKE, awake_bytes=29, served_tier=1),
            ],
            *(49, "b", "", ""),
            id="no queue behind a model for which nobody leaves",
        ),
        pytest.param(
            [idle("a", served_tier=0), idle("b", rate=9), model("c", waiting_s=1)],
            *(22, "", "b", ""),
            id="lower tiers leave first",
        ),
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
        pytest.param([idle("a", 99.0, keep_alive_s=0.0)], 99, "", "a", "", id="at once"),
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
        pytest.param(
            [model("a", AWAKE, awake_bytes=30), idle("b")], 20, "", "a", "a", id="never awake"
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
    tiers: list[int] = field(default_factory=list)
    """Tier of the requests for each model; standard if it is empty."""
    now: float = 0.0
    states: list[Residency] = field(default_factory=list)
    since: list[float] = field(default_factory=list)
    queues: list[list[float]] = field(default_factory=list)
    idle_since: list[float | None] = field(default_factory=list)
    wakes: list[list[float]] = field(default_factory=list)
    recent: list[list[float]] = field(default_factory=list)
    """Times of the requests of the last minute for each model."""
    waits: list[float] = field(default_factory=list)
    """Waits of the requests that have been served."""

    def __post_init__(self) -> None:
        count = len(self.sizes)
        self.states = [AWAKE if n in self.pinned else ASLEEP for n in range(count)]
        self.since, self.idle_since = [0.0] * count, [0.0] * count
        self.queues, self.wakes = [[] for _ in range(count)], [[] for _ in range(count)]
        self.tiers, self.recent = self.tiers or [1] * count, [[] for _ in range(count)]

    def models(self) -> list[ResidentModel]:
        return [
            model(
                str(n),
                self.states[n],
                since=self.since[n],
                awake_bytes=self.sizes[n],
                reload_s=self.reloads[n],
                waiting_s=self.now - queue[0] + STEP_S if queue else 0.0,
                longest_wait_s=self.now - queue[0] if queue else 0.0,
                waiting_tier=self.tiers[n],
                served_tier=self.tiers[n] if self.recent[n] else None,
                rate=len(self.recent[n]) / 60.0,
                idle_since=self.idle_since[n],
                is_pinned=n in self.pinned,
            )
            for n, queue in enumerate(self.queues)
        ]

    def step(self, arrivals: set[int]) -> None:
        for n, queue in enumerate(self.queues):
            if n in arrivals:
                queue.append(self.now)
                self.recent[n].append(self.now)
            if self.recent[n] and self.now - self.recent[n][0] > 60.0:
                del self.recent[n][0]
            if self.states[n] is WAKING and self.now - self.since[n] >= self.reloads[n]:
                self.states[n], self.since[n] = AWAKE, self.now
            elif self.states[n] is FALLING:
                self.states[n], self.since[n] = ASLEEP, self.now
            if self.states[n] is AWAKE and queue:
                self.waits.append(self.now - queue.pop(0))
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
            reload_s, awake_s = max(MIN_RELOAD_S, self.reloads[n]), self.now - self.since[n]
            idle_since = self.idle_since[n]
            idle_s = -1.0 if idle_since is None else min(self.now - idle_since, awake_s)
            assert awake_s >= MIN_AWAKE_RELOADS * reload_s or idle_s >= MIN_IDLE_RELOADS * reload_s
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
    assert (
        max(node.waits, default=0.0)
        <= num_steps * STEP_S + backlog_s + count * turn_s * num_steps / 4
    )


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


def draw_arrivals(pattern: str, rng: random.Random, now: float, count: int) -> set[int]:
    """Draw the models that get a request in a step, about one a second, as `benchmarks.sleep` does."""
    weights = [1.0 if pattern == "uniform" else 1.0 / (rank + 1) for rank in range(count)]
    share = STEP_S
    if pattern == "bursts":  # of 10 s for one model, with pauses of 10 s
        weights = [float(int(now / 20.0) % count == rank) for rank in range(count)]
        share = 2.0 * STEP_S if now % 20.0 < 10.0 else 0.0
    return set(rng.choices(range(count), weights)) if rng.random() < share else set()


@pytest.mark.parametrize(
    ("pattern", "max_per_minute"), [("uniform", 40), ("zipf", 40), ("bursts", 4)]
)
@pytest.mark.parametrize("reload_s", [0.5, 3.0])
def test_six_models_in_the_memory_of_two_do_not_thrash(
    pattern: str, max_per_minute: int, reload_s: float
) -> None:
    """Ten minutes: wakings stay below the bound of the hysteresis, and each one serves requests that waited."""
    count, num_awake, seconds = 6, 2, 600.0
    node = Node([reload_s] * count, [10] * count, set(), num_awake * 10 + count - num_awake)
    rng, num_requests = random.Random(1), 0
    while node.now < seconds or any(node.queues):
        arrivals = draw_arrivals(pattern, rng, node.now, count) if node.now < seconds else set()
        num_requests += len(arrivals)
        node.step(arrivals)
    wakes = sum(map(len, node.wakes))
    bound = num_awake * seconds / ((1.0 + MIN_IDLE_RELOADS) * reload_s)
    assert len(node.waits) == num_requests > 200, "none is lost"
    assert wakes <= min(bound, sum(wait > 0.0 for wait in node.waits)) + num_awake
    assert 60.0 * wakes / seconds <= max_per_minute
    turn_s = (1.0 + MIN_AWAKE_RELOADS) * reload_s + 2 * STEP_S
    assert max(node.waits) <= count / num_awake * turn_s + reload_s


def test_free_flood_does_not_put_a_paying_model_to_sleep() -> None:
    """The paying model has a request each 5 s, and the free one all the time. The free one gets some turns."""
    node = Node([0.5, 0.5], [10, 10], set(), 11, [0, 2])
    while node.now < 600.0:
        node.step({0, 1} if node.now % 5.0 == 0.0 else {1})
    paid, free = map(len, node.wakes)
    assert 1 <= free <= paid <= 600.0 / PROMOTE_AFTER_S[2] + 1
