"""Division of costs: a total into parts that sum to it exactly, and the cost of hardware into service and idle time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)


def allocate(total: int, weights: Sequence[int]) -> list[int]:
    """Divide a total in proportion to weights, by the method of the largest remainder.

    The parts are integers that sum to the total. Of equal remainders the first counts. If all weights are zero, the
    first part is the total.

    Raises:
        ValueError: There are no weights, or the total or a weight is negative.
    """
    if not weights or total < 0 or min(weights) < 0:
        raise ValueError("Give a total and at least one weight, none of them negative.")
    weight_sum = sum(weights)
    if not weight_sum:
        return [total, *[0] * (len(weights) - 1)]
    parts = [total * weight // weight_sum for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda index: -(total * weights[index] % weight_sum)
    )
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


class HardwareUse(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the replicas of a model, and its cost."""

    replica_ms: int = 0
    """Milliseconds that their processes ran, summed over the replicas."""
    busy_ms: int = 0
    """Part of `replica_ms` with at least one request."""
    nano_dollars: int = 0


def attribute_cost(hardware: HardwareUse, service: Mapping[K, int]) -> tuple[dict[K, int], int]:
    """Divide the cost of hardware: of busy time among owners, in proportion to their service, and of idle time.

    Idle time is never spread over the owners. Without any service the whole cost is idle.

    Args:
        hardware: The cost, and the share of the time that was busy.
        service: Weighted tokens by owner.

    Returns:
        Nano-dollars by owner, and of idle time. They sum to the cost.
    """
    idle_ms = max(0, hardware.replica_ms - hardware.busy_ms)
    busy, idle = allocate(hardware.nano_dollars, (hardware.busy_ms, idle_ms))
    if not any(service.values()):
        return {}, busy + idle
    parts = allocate(busy, list(service.values()))
    return dict(zip(service, parts, strict=True)), idle
