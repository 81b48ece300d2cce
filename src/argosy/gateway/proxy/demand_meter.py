"""Demand for each model at one gateway, by the second: what the autoscaler of the fleet needs to know."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from argosy.policy import BATCH_TIER, weighted_tokens
from argosy.policy.placement import PlacementPool, PlacementRequest

MAX_REPORTED_SECONDS = 30

UNSERVED_TOKENS = 1.0
"""Tokens of a request that another model answers, or that is no generation, while the pool is stopped."""

_Pool = PlacementPool[Any]


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand for one model. Tokens are weighted, and those of prompts count whether they are cached or not."""

    model: str
    arrived: Sequence[float]
    """Expected tokens of the requests that arrived in each of the last complete seconds, oldest first."""
    served: Sequence[float]
    """Tokens of the prompts and outputs that were served in each of these seconds."""
    active_requests: int = 0
    """Requests in the queue or at replicas."""
    queued_requests: int = 0
    queued_tokens: float = 0.0
    """Expected tokens of the requests in the queue."""
    queue_age_s: float = 0.0
    """How long the oldest of them has waited."""
    queued_tenants: int = 0
    """Tenants that sent them."""
    queued_tier: int | None = None
    """Rank of the highest tier of them; None if there is none."""
    served_tier: int | None = None
    """Rank of the highest tier with requests that run or arrived lately; None if there is none."""


class DemandReport(msgspec.Struct, frozen=True, kw_only=True):
    """Demand at one gateway."""

    second: int
    """Number of the last complete second, by a clock of the gateway's process."""
    models: Sequence[ModelDemand] = ()


class DemandMeter:
    """Counts the tokens that arrive and are served. Not thread-safe: use it from one event loop.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first_second = math.floor(clock())
        self._seconds: dict[_Pool, deque[list[float]]] = {}
        """Number, arrived and served tokens of the latest seconds in which something happened."""
        self._counted: dict[PlacementRequest, float] = {}
        """Tokens of each request that were counted as served."""

    @property
    def last_second(self) -> int:
        """Number of the last complete second."""
        return math.floor(self._clock()) - 1

    def on_arrived(self, request: PlacementRequest, pool: _Pool) -> None:
        """Count a request that arrived, with the output that is expected of it. Batches are no demand."""
        if request.tier == BATCH_TIER:
            return
        expected_tokens = pool.expected_output_tokens(request)
        self._add(pool, weighted_tokens(request.prompt_tokens, expected_tokens), 0.0)

    def on_progress(self, request: PlacementRequest, pool: _Pool, output_tokens: int) -> None:
        """Count what a request was served since the last call."""
        if request.tier == BATCH_TIER:
            return
        total = weighted_tokens(request.prompt_tokens, output_tokens)
        served = total - self._counted.get(request, 0.0)
        if served > 0.0:
            self._counted[request] = total
            self._add(pool, 0.0, served)

    def on_ended(self, request: PlacementRequest) -> None:
        """Forget a request."""
        self._counted.pop(request, None)

    def remove_pool(self, pool: _Pool) -> None:
        """Forget a pool that gets no more requests."""
        self._seconds.pop(pool, None)

    def read(self, pool: _Pool, unserved_at: float = -math.inf) -> tuple[list[float], list[float]]:
        """Return the tokens that arrived and were served in each of the last complete seconds, oldest first.

        A request that was not placed, at `unserved_at`, counts as one token.
        """
        last = self.last_second
        count = min(MAX_REPORTED_SECONDS, last - self._first_second + 1)
        begin = last - count + 1
        arrived, served = [0.0] * count, [0.0] * count
        if begin <= unserved_at < last + 1:
            arrived[math.floor(unserved_at) - begin] = UNSERVED_TOKENS
        for second, arrived_tokens, served_tokens in self._seconds.get(pool, ()):
            if begin <= second <= last:
                arrived[int(second) - begin] += arrived_tokens
                served[int(second) - begin] += served_tokens
        return arrived, served

    def _add(self, pool: _Pool, arrived: float, served: float) -> None:
        second = math.floor(self._clock())
        seconds = self._seconds.get(pool)
        if seconds is None:
            seconds = self._seconds[pool] = deque(maxlen=MAX_REPORTED_SECONDS + 1)
        if not seconds or seconds[-1][0] != second:
            seconds.append([second, 0.0, 0.0])
        seconds[-1][1] += arrived
        seconds[-1][2] += served
