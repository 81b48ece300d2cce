"""Questions to the planner: a load, its objectives, and the hardware to consider. All values are checked here."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from argosy.twin.hardware import CapacityError, Precision

SECONDS_OF_A_DAY = 86_400
HOURS_OF_A_MONTH = 730
MAX_PERCENTILE = 99.9
"""Highest percentile that a plan simulates: it needs ten requests above it."""
MAX_RATE = 1e9
MAX_TOKENS = 10_000_000
DEFAULT_ACCELERATORS = (
    "l40s",
    "a100_sxm",
    "h100_sxm",
    "h200_sxm",
    "b200_sxm",
    "mi300x",
)


class LatencyObjective(msgspec.Struct, frozen=True):
    """Limit of a percentile of a latency."""

    metric: Literal["ttft", "tpot", "e2e"]
    percentile: float
    limit_ms: float

    def __str__(self) -> str:
        return f"p{self.percentile:g} {self.metric.upper()} below {self.limit_ms:,g} ms"


class CapacityQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Load with its objectives, and the hardware to consider."""

    model: str
    """Name of a model, or path of its config.json."""
    peak_requests_s: float = 0.0
    """Requests per second at the peak."""
    concurrent_requests: float = 0.0
    """Requests in flight at the peak, in place of their rate."""
    mean_share: float = 0.35
    """Mean load of a day, as a share of the peak."""
    prompt_tokens: int = 1000
    output_tokens: int = 250
    spread: float = 0.6
    """Standard deviation of the logarithm of the lengths. Conversations have 0.9, and 0 means equal lengths."""
    burstiness: float = 1.2
    """Coefficient of variation of the times between requests. 1 is a Poisson process."""
    prefix_hits: float = 0.0
    """Share of the prompts' tokens that the prefix cache has."""
    objectives: tuple[LatencyObjective, ...] = ()
    accelerators: tuple[str, ...] = DEFAULT_ACCELERATORS
    engine: str = "vllm"
    weights: tuple[Precision, ...] = ("bf16", "fp8")
    tensor_parallel: tuple[int, ...] = ()
    """Accelerators of a replica. Empty for 1, 2, 4 and 8."""
    spares: int = 1
    """Replicas beside those that the load needs (N+1)."""
    zones: int = 1
    """Zones over which replicas are spread. The load is served if one of several is lost."""
    spot_share: float = 0.0
    """Share of the replicas on interruptible capacity."""
    max_accelerators: int | None = None
    """Accelerators of one kind that can be had."""
    seed: int = 0

    def check(self) -> None:
        """Raise CapacityError for a question without a sensible answer. It names the bound."""
        if not (self.peak_requests_s or self.concurrent_requests):
            raise CapacityError(
                "the load is 0 requests: 0 accelerators serve it, and a pool with `min_replicas: 0` costs nothing"
                " while it is idle; give --users, --requests-per-minute or --concurrent above 0 for a plan"
            )
        _check_range("the load", self.peak_requests_s, 0, MAX_RATE)
        _check_range("the number of concurrent requests", self.concurrent_requests, 0, MAX_RATE)
        _check_range("the prompt", self.prompt_tokens, 1, MAX_TOKENS)
        _check_range("the output", self.output_tokens, 1, MAX_TOKENS)
        _check_range("the spread of lengths", self.spread, 0, 3)
        _check_range("the burstiness", self.burstiness, 0.1, 30)
        _check_range("the share of prefix hits", self.prefix_hits, 0, 1)
        _check_range("the mean share of the peak", self.mean_share, 0.001, 1)
        _check_range("the share of spot capacity", self.spot_share, 0, 1)
        _check_range("the number of spares", self.spares, 0, 10_000)
        _check_range("the number of zones", self.zones, 1, 100)
        for objective in self.objectives:
            if not 0 < objective.percentile <= MAX_PERCENTILE:
                raise CapacityError(
                    f"no plan can promise p{objective.percentile:g}: a percentile is above 0 and at most"
                    f" {MAX_PERCENTILE:g} here, since some request is always the slowest"
                )
            _check_range(f"the limit of {objective.metric}", objective.limit_ms, 0.001, 1e9)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise CapacityError(f"{name} is {value:g}; give a number from {low:g} to {high:g}")


def parse_objective(metric: Literal["ttft", "tpot", "e2e"], text: str) -> LatencyObjective:
    """Parse a limit such as `p99:800` or `800` in milliseconds, where p99 is the default.

    Raises:
        CapacityError: The text has another form.
    """
    name, colon, limit = text.rpartition(":")
    try:
        percentile = float(name.strip().lower().removeprefix("p")) if colon else 99.0
        return LatencyObjective(metric, percentile, float(limit))
    except ValueError:
        raise CapacityError(
            f"{text!r} is not a limit; write it like p99:800, for 800 ms at the 99th percentile"
        ) from None


def daily_rate(users: float, requests_each: float, peak_factor: float) -> float:
    """Return the peak rate of requests per second of daily users.

    Args:
        users: Users of a day.
        requests_each: Requests of each on a day.
        peak_factor: Peak rate divided by the mean rate of the day.
    """
    _check_range("the number of users", users, 0, 1e11)
    _check_range("the number of requests of a user", requests_each, 0, 1e6)
    _check_range("the peak factor", peak_factor, 1, 1000)
    return users * requests_each * peak_factor / SECONDS_OF_A_DAY
