"""A pool of replicas that start after a while, driven by an autoscaler under a virtual clock.

Never compared with a real pool.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from argosy.policy.autoscaling import (
    ArrivedTokens,
    Autoscaler,
    AutoscalerSettings,
    AutoscalerState,
    PoolObservation,
    ScalingDecision,
)

CAPACITY = 100.0
"""Tokens per second of a replica."""
TICK_S = 5.0


class SimulatedPool:
    """Replicas that start after `startup_s`, and an autoscaler that decides each 5 s what the pool becomes.

    Args:
        settings: Settings of the autoscaler.
        replicas: Replicas that are ready at the beginning.
        startup_s: Time until a started replica is ready; infinite if none ever becomes ready.
    """

    def __init__(
        self, settings: AutoscalerSettings, replicas: int = 1, startup_s: float = 60.0
    ) -> None:
        self.autoscaler = Autoscaler(settings)
        self.now = 1_000_000.0
        self.ready = replicas
        self.desired = replicas
        self.decisions: list[ScalingDecision] = []
        self._startup_s = startup_s
        self._ready_at: list[float] = []
        self._backlog = 0.0
        self._waiting_since = self.now

    def observe(self, tokens_per_s: float, **fields: object) -> PoolObservation:
        """Return the observation of a tick with these arrivals, except for the given fields."""
        observation = PoolObservation(
            at=self.now,
            desired_replicas=self.desired,
            ready_replicas=self.ready,
            arrivals=(ArrivedTokens(tokens_per_s, 1.0),) * int(TICK_S),
            queued_requests=int(self._backlog > 0.0),
            queued_tokens=self._backlog,
            queue_age_s=self.now - self._waiting_since if self._backlog else 0.0,
            running_requests=int(tokens_per_s > 0.0),
            capacity_tokens_per_s=CAPACITY,
            startup_s=min(self._startup_s, 600.0),
            metrics_age_s=1.0,
        )
        return msgspec.structs.replace(observation, **fields)

    def run(
        self, seconds: float, load: float | Callable[[float], float], **fields: object
    ) -> list[int]:
        """Serve a load in tokens per second for a while, and return the number of replicas after each decision.

        Args:
            seconds: Length of the run.
            load: Tokens per second, or a function of the seconds since the beginning of this run.
            fields: Fields of the observations that differ.
        """
        begin = self.now
        counts = []
        while self.now < begin + seconds:
            self.now += TICK_S
            self.ready += sum(at <= self.now for at in self._ready_at)
            self._ready_at = [at for at in self._ready_at if at > self.now]
            tokens_per_s = load(self.now - begin) if callable(load) else load
            self._serve(tokens_per_s)
            decision = self.autoscaler.decide(self.observe(tokens_per_s, **fields))
            self._apply(decision.target)
            self.decisions.append(decision)
            counts.append(decision.target)
        return counts

    def restart_controller(self, *, keeps_state: bool = True) -> None:
        """Replace the autoscaler by one that continues with its stored state, or with none."""
        encoded = msgspec.json.encode(self.autoscaler.state)
        state = msgspec.json.decode(encoded, type=AutoscalerState) if keeps_state else None
        self.autoscaler = Autoscaler(self.autoscaler.settings, state)

    def _serve(self, tokens_per_s: float) -> None:
        had_backlog = self._backlog > 0.0
        arrived = tokens_per_s * TICK_S
        self._backlog = max(0.0, self._backlog + arrived - self.ready * CAPACITY * TICK_S)
        if self._backlog <= arrived:  # what waited before is served
            self._waiting_since = self.now - TICK_S if had_backlog else self.now

    def _apply(self, target: int) -> None:
        for _ in range(target - self.desired):
            self._ready_at.append(self.now + self._startup_s)
        for _ in range(self.desired - target):
            if self._ready_at:
                self._ready_at.pop()
            else:
                self.ready -= 1
        self.desired = target
