"""Lesson on fair queueing: one tenant floods the gateway's queue, and the others still get their shares."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec

from argosy.lessons.lesson import LessonRun, count_of, describe_parameters, slider
from argosy.policy import QUANTUM_TOKENS, DispatchQueue, QueuedRequest

TENANTS = ("A", "B", "C")
OTHER_REQUESTS = 6
"""Requests of each tenant that does not flood."""
OTHER_COST_TOKENS = 200
TIER = 1


class FairQueueParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the lesson."""

    flood: Annotated[int, slider("Requests of tenant A", 1, 30)] = 20
    flood_cost: Annotated[
        int, slider("Cost of each request of A", 50, 1000, unit="tokens; 200 for B and C", step=50)
    ] = 400
    weight: Annotated[int, slider("Weight of tenant B", 1, 4, unit="times that of A and C")] = 2
    late: Annotated[int, slider("Tenant C arrives after", 0, 12, unit="requests served")] = 4


class FairQueueFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Request that gets a slot, with the state after it. Lists have one value for each of `TENANTS`."""

    step: int
    text: str
    served: int
    """Index of the tenant whose request gets the slot."""
    served_tokens: list[int]
    waiting: list[int]
    fifo_served: int
    """Index of the tenant that would get the slot in the order of arrival."""
    fifo_served_tokens: list[int]


class _Request(QueuedRequest, eq=False):
    """A request that the lesson shows by its number."""

    number: int = 0


def run_fair_queue(parameters: FairQueueParameters) -> LessonRun[FairQueueFrame]:
    """Dispatch all requests, one after the other."""
    weights, costs = [1, parameters.weight, 1], [parameters.flood_cost, *[OTHER_COST_TOKENS] * 2]
    counts = [parameters.flood, OTHER_REQUESTS, OTHER_REQUESTS]
    queue, fifo = DispatchQueue[_Request](), deque[int]()
    served, fifo_served, done = [0] * 3, [0] * 3, [0] * 3

    def push(tenant: int) -> None:
        for number in range(counts[tenant]):
            queue.push(
                _Request(
                    number=number + 1,
                    tier=TIER,
                    tenant=TENANTS[tenant],
                    weight=weights[tenant],
                    cost_tokens=costs[tenant],
                    arrived_at=0.0,
                )
            )
        fifo.extend([tenant] * counts[tenant])

    push(0)
    push(1)
    late = min(parameters.late, len(queue))
    frames: list[FairQueueFrame] = []
    while len(frames) < sum(counts):
        is_late_arrival = len(frames) == late
        if is_late_arrival:
            push(2)
        request = queue.pop(0.0)
        if request is None:
            break
        tenant, other = TENANTS.index(request.tenant), fifo.popleft()
        served[tenant] += costs[tenant]
        fifo_served[other] += costs[other]
        done[tenant] += 1
        backlog = queue.count_by_tenant()
        text = _describe_slot(request, costs[tenant], TENANTS[other])
        if is_late_arrival:
            text = f"Tenant C sends {count_of(counts[2], 'request')}. {text}"
        frames.append(
            FairQueueFrame(
                step=len(frames) + 1,
                text=text,
                served=tenant,
                served_tokens=list(served),
                waiting=[backlog.get(name, 0) for name in TENANTS],
                fifo_served=other,
                fifo_served_tokens=list(fifo_served),
            )
        )
    result = (
        f"Tenant C has all its answers after {_last(frames, fifo=False)} requests, and after "
        f"{_last(frames, fifo=True)} in the order of arrival. While two tenants wait, their tokens per weight differ "
        f"by no more than two rounds of {QUANTUM_TOKENS:g} tokens and the cost of a request of each."
    )
    return LessonRun(parameters=describe_parameters(parameters), frames=frames, result=result)


def _describe_slot(request: _Request, cost_tokens: int, first_tenant: str) -> str:
    """Return who gets the slot, and who would in the order of arrival."""
    other = (
        "this tenant would get it too"
        if first_tenant == request.tenant
        else f"tenant {first_tenant} would get it"
    )
    return (
        f"The slot goes to request {request.number} of tenant {request.tenant}. It costs {cost_tokens} tokens. "
        f"In the order of arrival, {other}."
    )


def _last(frames: list[FairQueueFrame], *, fifo: bool) -> int:
    """Return the step in which the last request of tenant C is served."""
    return max(frame.step for frame in frames if (frame.fifo_served if fifo else frame.served) == 2)
