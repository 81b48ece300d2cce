"""The autoscalers of Knative (KPA) and Kubernetes (HPA), written from their documentation, for comparison.

KPA: https://knative.dev/docs/serving/autoscaling/kpa-specific and .../autoscaling-concepts. Each 2 s it divides the
mean concurrency of 60 s (stable) and of 6 s (panic) by 70 % of what a replica shall have at once. Panic begins when the
second result is twice the ready replicas, and lasts until this was not so for 60 s. In panic it does not scale down.
The option `scale-down-delay` takes the largest result of that time.

HPA: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale, section Algorithm details. Each
15 s it multiplies the replicas with the ratio of metric and target, unless that is within 10 % of 1. Replicas that
start count as idle. It scales up to twice or by 4 at most, and down to the largest result of 300 s.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

CONCURRENCY = 10.0
"""Running and waiting requests of a replica that works at its capacity."""
TARGET = 0.7 * CONCURRENCY


class PoolState(NamedTuple):
    """State of the simulated pool at the end of a second."""

    second: int
    arrived: float
    """Work that arrived in this second, in seconds of one replica."""
    queued: float
    """Work that waits."""
    queue_age_s: float
    served: float
    """Work done in this second."""
    ready: int
    desired: int
    """Ready and starting replicas."""

    @property
    def concurrency(self) -> float:
        """Requests that run or wait."""
        return CONCURRENCY * (self.served + self.queued)


class _Mean:
    """Mean of the newest values."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float:
        return math.fsum(self._values) / len(self._values)


class _Maximum:
    """Largest result of a time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._results: deque[tuple[int, int]] = deque()

    def of(self, second: int, result: int) -> int:
        """Add a result, and return the largest one."""
        while self._results and self._results[-1][1] <= result:
            self._results.pop()
        self._results.append((second, result))
        while second - self._results[0][0] > self._window_s:
            self._results.popleft()
        return self._results[0][1]


class Kpa:
    """Knative Pod Autoscaler with a `scale-down-delay`, whose default is 0 s."""

    wakes_from_zero = False
    """Knative's activator does."""

    def __init__(self, minimum: int, maximum: int, scale_down_delay_s: float) -> None:
        self._minimum, self._maximum = minimum, maximum
        self._stable, self._panic = _Mean(60), _Mean(6)
        self._delay = _Maximum(scale_down_delay_s)
        self._panic_at = -math.inf
        self._panic_replicas = 0

    def decide(self, state: PoolState) -> int | None:
        """Return the number of replicas, or None between two decisions."""
        self._stable.add(state.concurrency)
        self._panic.add(state.concurrency)
        if state.second % 2:
            return None
        ready = max(state.ready, 1)
        stable, panic = (
            min(max(math.ceil(mean.value / TARGET), ready // 2), 1000 * ready)
            for mean in (self._stable, self._panic)
        )
        if panic >= 2 * ready:
            self._panic_at = state.second
        if state.second - self._panic_at < 60:
            self._panic_replicas = max(self._panic_replicas, stable, panic)
            desired = self._panic_replicas
        else:
            self._panic_replicas = 0
            desired = stable
        desired = min(max(desired, self._minimum), self._maximum)
        return self._delay.of(state.second, desired)


class Hpa:
    """Horizontal Pod Autoscaler on the mean concurrency of each replica. It cannot scale to zero."""

    wakes_from_zero = False

    def __init__(self, minimum: int, maximum: int) -> None:
        self._minimum, self._maximum = max(minimum, 1), maximum
        self._metric = _Mean(30)
        self._stabilization = _Maximum(300.0)

    def decide(self, state: PoolState) -> int | None:
        """Return the number of replicas, or None between two decisions."""
        self._metric.add(state.concurrency)
        if state.second % 15:
            return None
        current, metric = state.desired, self._metric.value
        ratio = metric / (max(state.ready, 1) * TARGET)
        if ratio > 1.0 and state.ready < current:
            ratio = max(1.0, metric / (current * TARGET))
        wanted = current if abs(ratio - 1.0) <= 0.1 else math.ceil(metric / TARGET)
        stabilized = self._stabilization.of(state.second, wanted)
        if wanted < current:
            wanted = min(current, stabilized)
        wanted = min(wanted, max(2 * current, current + 4))
        return min(max(wanted, self._minimum), self._maximum)
