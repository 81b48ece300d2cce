"""Fluid simulation of a pool under an autoscaler: loads, replicas that start, and reversals of the replica count."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaler_peers import PoolState

Load = NDArray[np.float64]
"""Work that arrives in each second, in seconds of one replica."""
HOURS = 6
OBJECTIVE_S = 2
PATIENCE_S = 60


class Scaler(Protocol):
    """An autoscaler in the simulation."""

    wakes_from_zero: bool
    """Whether it starts the first replica for a waiting request; otherwise something else does."""

    def decide(self, state: PoolState) -> int | None:
        """Return the number of replicas, or None between two decisions."""


def make_loads(seconds: int, seed: int) -> dict[str, Load]:
    """Return the loads by shape."""
    rng = np.random.default_rng(seed)
    t = np.arange(seconds)
    share = t / seconds
    hour = seconds / HOURS

    def add_noise(mean: Load, dispersion: float) -> Load:
        return np.maximum(0.0, mean + rng.normal(0.0, 1.0, seconds) * np.sqrt(mean * dispersion))

    def by_minute(variation: float) -> Load:
        k = variation**-2
        return np.repeat(rng.gamma(k, 1.0 / k, seconds // 60 + 1), 60)[:seconds]

    bursts = np.zeros(seconds)
    at = 0
    while at < seconds:
        at += int(rng.exponential(240))
        length = int(rng.exponential(45)) + 5
        bursts[at : at + length] = 1.0
        at += length
    day = 1.0 - 0.5 * np.cos(2.0 * np.pi * share)
    small_day = np.interp(share, [0, 0.3, 0.45, 0.8, 0.9, 1], [0.67, 0.67, 1.1, 1.46, 1.2, 0.7])
    crowds: Load = (
        ((share > 2 / 6) & (share < 2.167 / 6)) | ((share > 4 / 6) & (share < 4.5 / 6))
    ).astype(float)
    ramp_hours = np.array([0, 1, 1.5, 3.5, 4, 6])
    idle_hours = np.array([0, 0.833, 0.8333, 2, 2.0003, 3.333, 3.3336, 4.444, 4.4447, 6])
    active = np.interp(t, idle_hours * hour, [0, 0, 4, 4, 0, 0, 8, 8, 0, 0])
    return {
        "steady": add_noise(8.0 * by_minute(0.15), 0.25),
        "day of a large fleet": add_noise(8.0 * day * by_minute(0.1), 0.25),
        "day of a small fleet": add_noise(8.0 * small_day**1.6, 0.25),
        "code bursts": add_noise(2.0 + 18.0 * bursts, 0.4),
        "flash crowd": add_noise(4.0 + 12.0 * crowds, 0.25),
        "ramp": add_noise(np.interp(t, ramp_hours * hour, [3, 3, 15, 15, 3, 3]), 0.25),
        "square wave": add_noise(4.0 + 8.0 * (t % 1200 >= 600).astype(float), 0.25),
        "idle gaps": add_noise(active, 0.25) * (active > 0.0),
    }


class Change(NamedTuple):
    """Change of the replica count."""

    second: int
    desired: int
    direction: int


class Outcome(NamedTuple):
    """Result of one simulation."""

    attainment: float
    """Part of the work that was done in time."""
    replica_hours: float
    changes: list[Change]
    lowest: int
    """Fewest replicas that were ready or starting."""
    demand: Load
    """Demand in each second: the work that arrived, and the queue divided by `PATIENCE_S`."""


def simulate(load: Load, scaler: Scaler, startup_s: int, minimum: int) -> Outcome:
    """Serve a load with the replicas that a scaler decides about."""
    work = load.tolist()
    ready = max(minimum, math.ceil(math.fsum(work[:600]) / 600 / 0.7))
    starting: deque[int] = deque()
    """When the starting replicas are ready."""
    queue: deque[tuple[int, float]] = deque()
    """Arrival and remaining amount of the work that waits."""
    queued = attained = 0.0
    replica_s = 0
    changes: list[Change] = []
    demand: list[float] = []
    lowest = ready
    for second, arrived in enumerate(work):
        while starting and starting[0] <= second:
            starting.popleft()
            ready += 1
        if arrived > 0.0:
            queue.append((second, arrived))
            queued += arrived
        free = float(ready)
        while queue and free > 1e-12:
            at, amount = queue.popleft()
            done = min(free, amount)
            free -= done
            queued -= done
            if second - at <= OBJECTIVE_S:
                attained += done
            if amount - done > 1e-12:
                queue.appendleft((at, amount - done))
        while queue and second - queue[0][0] > PATIENCE_S:
            queued -= queue.popleft()[1]
        queued = max(queued, 0.0) if queue else 0.0
        demand.append(arrived + queued / PATIENCE_S)
        desired = ready + len(starting)
        replica_s += desired
        age_s = float(second - queue[0][0]) if queue else 0.0
        state = PoolState(second, arrived, queued, age_s, ready - free, ready, desired)
        target = scaler.decide(state)
        if not desired and queued and not (scaler.wakes_from_zero or target):
            target = 1
        if target is None or target == desired:
            continue
        changes.append(Change(second, target, 1 if target > desired else -1))
        if target > desired:
            starting.extend([second + startup_s] * (target - desired))
        else:
            while len(starting) and ready + len(starting) > target:
                starting.pop()
            ready = min(ready, target)
        lowest = min(lowest, target)
    return Outcome(attained / math.fsum(work), replica_s / 3600, changes, lowest, np.array(demand))


def find_reversals(changes: list[Change], startup_s: int) -> list[tuple[Change, Change]]:
    """Return the pairs of changes in opposite directions that follow each other within two start-up times."""
    limit_s = 2 * max(startup_s, 300)
    return [
        (first, second)
        for first, second in itertools.pairwise(changes)
        if first.direction != second.direction and second.second - first.second <= limit_s
    ]


def is_unfounded(reversal: tuple[Change, Change], demand: Load) -> bool:
    """Return whether the demand of 60 s did not change by a twentieth in the direction of the second change.

    The demand at the second change is compared with the most (before a decrease) or least (before an increase) from a
    minute before the first change on.
    """
    first, second = reversal
    begin = max(0, first.second - 119)
    means = np.convolve(demand[begin : second.second + 1], np.ones(60) / 60, "valid")
    if not len(means):
        return True
    if second.direction < 0:
        return bool(means[-1] > 0.95 * means.max())
    # A burst of seconds moves the mean of a minute only later.
    latest = max(means[-1], demand[max(0, second.second - 9) : second.second + 1].mean())
    return bool(latest < 1.05 * means.min())
