"""Measure the placement core: the time of its decisions, and what giving way changes, under a virtual clock.

    python -m benchmarks.placement

cost: microseconds for all decisions about one request, with 10, 100 and 1,000 replicas.
waiting: microseconds to end a request and place the next one while 10,000 wait, and to look for streams that pause.
long: 300 streams of 2,000 tokens of one free tenant on two replicas, and then requests of other tenants. Shows times to
first token by tier. For four tenants of the free tier it shows Jain's index and the largest difference of service.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np

from argosy.policy import AttemptOutcome, WakeAt, weighted_tokens
from argosy.policy.placement import (
    Arrived,
    Attempt,
    AttemptAnswered,
    AttemptEnded,
    AttemptEnding,
    Event,
    GivingWay,
    Pause,
    PlacementCore,
    PlacementLimits,
    PlacementPool,
    PlacementReplica,
    PlacementRequest,
    QueueLimits,
    RequestEnded,
    RequestState,
    Send,
    Tick,
)

TOKENS_PER_S = 50
STEP_S = 0.1
TIERS = ("premium", "standard", "free")


class World:
    """Virtual replicas that give each stream 50 tokens per second."""

    def __init__(self, replicas: int, slots: int, giving_way: GivingWay | None) -> None:
        self.now = 0.0
        limits = PlacementLimits(QueueLimits(max_requests=100_000, timeout_s=600.0))
        self.core = PlacementCore(limits, random.Random(1))
        members = [PlacementReplica(f"r{i:04}", arithmetic_id="same") for i in range(replicas)]
        for replica in members:
            replica.load.max_seqs, replica.load.reported_at = slots, math.inf
            replica.health.on_reported_state("ready", 0.0)
        self.pool = PlacementPool("m", members, giving_way=giving_way)
        self.left: dict[PlacementRequest, int] = {}
        """Output tokens that are still to come, of each request."""
        self.arrived_at: dict[PlacementRequest, float] = {}
        self.waits_s: dict[int, list[float]] = defaultdict(list)
        """Times to first token by tier."""
        self.service: dict[str, float] = defaultdict(float)
        """Weighted tokens by tenant."""
        self.pauses = 0
        self.num_refused = 0
        self.wake_at = math.inf
        self._numbers = itertools.count()

    def handle(self, event: Event) -> None:
        for effect in self.core.handle(event, self.now):
            match effect:
                case Send(request, attempt):
                    request.record_sent(attempt, self.now)
                case WakeAt(at):
                    self.wake_at = at
                case Pause(request, attempt):
                    self.pauses += 1
                    self._end(request, attempt, AttemptEnding.PAUSED)
                case _:
                    self.num_refused += 1
                    self.handle(RequestEnded(effect.request))
                    del self.left[effect.request]

    def arrive(self, tenant: str, tier: int, tokens: int) -> PlacementRequest:
        number = next(self._numbers)
        request = PlacementRequest(
            str(number),
            100,
            tenant=tenant,
            tier=tier,
            weight=1.0,
            compute_block_keys=lambda: [b"%016d" % (number % 50)],
            compute_digest=lambda: b"%d" % number,
            max_output_tokens=tokens,
        )
        self.left[request], self.arrived_at[request] = tokens, self.now
        self.handle(Arrived(request, self.pool))
        return request

    def begin(self, request: PlacementRequest) -> None:
        """Let the first token of a request arrive."""
        (attempt,) = request.attempts
        self.handle(AttemptAnswered(request, attempt, is_stream=True, arithmetic_id="same"))
        attempt.record_first_token(self.now, is_resumed=request.output_tokens > 0)
        if request in self.arrived_at:
            self.waits_s[request.tier].append(self.now - self.arrived_at.pop(request))

    def complete(self, request: PlacementRequest) -> None:
        (attempt,) = request.attempts
        self._end(request, attempt, AttemptEnding.COMPLETED)
        self.handle(RequestEnded(request))
        self.left.pop(request, None)

    def _end(self, request: PlacementRequest, attempt: Attempt, ending: AttemptEnding) -> None:
        is_complete = ending is AttemptEnding.COMPLETED
        self.handle(
            AttemptEnded(
                request,
                attempt,
                ending,
                AttemptOutcome.SUCCESS if is_complete else None,
                output_tokens=request.output_tokens,
                tokens_per_choice=request.output_tokens if is_complete else None,
            )
        )

    def step(self) -> None:
        """Let a tenth of a second pass, in which every stream gets its tokens."""
        end = self.now + STEP_S
        while self.wake_at <= end:
            self.now, self.wake_at = max(self.now, self.wake_at), math.inf
            self.handle(Tick())
        self.now = end
        for request in tuple(self.left):
            if request.state is RequestState.SENT:
                self.begin(request)
            elif request.state is RequestState.STREAMING:
                tokens = min(self.left[request], int(TOKENS_PER_S * STEP_S))
                self.left[request] -= tokens
                service = weighted_tokens(0, tokens)
                self.service[request.tenant] += service
                self.core.record_progress(request, request.output_tokens + tokens, service)
                if not self.left[request]:
                    self.complete(request)


def time_us(action: Callable[[], object], count: int) -> float:
    """Return the mean time of an action, the least of three rounds."""
    rounds = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(count):
            action()
        rounds.append(1e6 * (time.perf_counter() - begin) / count)
    return round(min(rounds), 1)


def measure_cost(replicas: int) -> dict[str, object]:
    """Measure all decisions about a request in a pool that is half full."""
    world = World(replicas, 8, GivingWay())
    for number in range(4 * replicas):
        world.begin(world.arrive(f"t{number % 10}", 1, 100))

    def place_one() -> None:
        request = world.arrive("t", 1, 100)
        world.begin(request)
        world.complete(request)

    cost = time_us(place_one, 2000 if replicas <= 100 else 300)
    return {"kind": "cost", "replicas": replicas, "request_us": cost}


def measure_waiting(replicas: int, waiting: int) -> dict[str, object]:
    """Measure the next placement, and the search for streams that pause, in a full pool."""
    world = World(replicas, 8, GivingWay())
    for number in range(8 * replicas + waiting):
        request = world.arrive(f"t{number % 100}", number % 3, 100_000)
        if request.attempts:
            world.begin(request)
    running = [request for request in world.left if request.attempts]
    ends = iter(running)
    next_us = time_us(lambda: world.complete(next(ends)), min(200, 2 * replicas))
    world.now = 60.0
    give_way_us = []
    for _ in range(20):
        world.now += STEP_S
        begin = time.perf_counter()
        world.handle(Tick())
        give_way_us.append(1e6 * (time.perf_counter() - begin))
    return {
        "kind": "waiting",
        "replicas": replicas,
        "waiting": waiting,
        "next_us": next_us,
        "look_for_pauses_us": round(float(np.median(give_way_us)), 1),
    }


def measure_long_streams(giving_way: GivingWay | None) -> dict[str, object]:
    """Let 300 long streams of one tenant take two replicas, and then others arrive."""
    world = World(2, 32, giving_way)
    for _ in range(300):
        world.arrive("greedy", 2, 2000)
    agenda: list[tuple[float, int, partial[PlacementRequest]]] = []
    order = itertools.count()
    for second in range(120):
        at = 5.0 + second
        for tier in (0, 1, 1):
            heapq.heappush(agenda, (at, next(order), partial(world.arrive, TIERS[tier], tier, 100)))
    for _ in range(100):
        for tenant in ("free-1", "free-2", "free-3"):
            heapq.heappush(agenda, (5.0, next(order), partial(world.arrive, tenant, 2, 500)))
    while world.now < 125.0:
        while agenda and agenda[0][0] <= world.now:
            heapq.heappop(agenda)[2]()
        if 5.0 <= world.now < 5.0 + STEP_S:
            world.service.clear()
        world.step()
    free = [world.service[name] for name in ("greedy", "free-1", "free-2", "free-3")]
    return {
        "kind": "long",
        "giving_way": giving_way is not None,
        **{
            f"{TIERS[tier]}_ttft_p95_s": round(float(np.percentile(world.waits_s[tier], 95)), 2)
            for tier in (0, 1)
        },
        "jain_free": round(sum(free) ** 2 / (4 * sum(each**2 for each in free)), 4),
        "service_difference": round(max(free) - min(free)),
        "pauses": world.pauses,
        "refused": world.num_refused,
    }


def main() -> None:
    """Measure, and print a row for each measurement."""
    for replicas in (10, 100, 1000):
        print(json.dumps(measure_cost(replicas)))
    for replicas in (10, 1000):
        print(json.dumps(measure_waiting(replicas, 10_000)))
    for giving_way in (None, GivingWay()):
        print(json.dumps(measure_long_streams(giving_way)))


if __name__ == "__main__":
    main()
