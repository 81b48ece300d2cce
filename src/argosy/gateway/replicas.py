"""The replicas of a model: what is known of each, whether it may be used, and which one a request gets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from argosy.gateway.ask import BYTES_PER_TOKEN, Ask
from argosy.gateway.upstream import Upstream
from argosy.policy import (
    BLOCK_BYTES,
    Breaker,
    Chooser,
    Outcome,
    PrefixIndex,
    ReplicaLoad,
    RetryBudget,
    RouteRequest,
    chain,
    usable,
)

Kind = Literal["argosy", "openai"]
"""Ours, whose streams can be carried on anywhere; or any other OpenAI-compatible server."""

LONGEST_AFFINITY_BYTES = 64 * 1024


@dataclass(slots=True)
class Replica:
    """One server that answers for a model."""

    name: str
    kind: Kind
    model: str
    """What it calls the model."""
    upstream: Upstream
    breaker: Breaker = field(default_factory=Breaker)
    load: ReplicaLoad = field(init=False)
    taking: bool = True
    """It says that it takes new requests; a replica that drains does not."""

    def __post_init__(self) -> None:
        self.load = ReplicaLoad(self.name)

    def sent(self, tokens: int) -> None:
        """A request with so many prompt tokens goes there."""
        self.load.in_flight += 1
        self.load.sent_tokens += tokens

    def ended(
        self, outcome: Outcome | None, now: float, retry_after_s: float | None = None
    ) -> None:
        """It is over; None: for a reason that says nothing about the replica."""
        self.load.in_flight -= 1
        if outcome is not None:
            self.breaker.record(outcome, now, retry_after_s)


class Pool:
    """The replicas that answer for one public model name."""

    def __init__(self, model: str, replicas: list[Replica], chooser: Chooser) -> None:
        self.model = model
        self.replicas = {replica.name: replica for replica in replicas}
        self.retries = RetryBudget()
        self._chooser = chooser
        self._index = PrefixIndex()

    def pick(self, ask: Ask, domain: str, tried: set[str], now: float) -> Replica | None:
        """The replica for a request: one that was not tried yet, if there is any. None: nothing to serve."""
        healthy = usable({n: r.breaker for n, r in self.replicas.items() if r.taking})
        fresh = [name for name in healthy if name not in tried] or healthy
        warm = [name for name in fresh if not self.replicas[name].breaker.cooling(now)] or fresh
        if not warm:
            return None
        keys = chain(
            f"{domain}\0{self.model}".encode(), ask.prompt[:LONGEST_AFFINITY_BYTES], BLOCK_BYTES
        )
        hits = {
            name: count * BLOCK_BYTES // BYTES_PER_TOKEN
            for name, count in self._index.hits(keys).items()
        }
        request = RouteRequest(
            prompt_tokens=ask.prompt_tokens,
            output_tokens=ask.output_tokens,
            key=ask.session or (keys[0].hex() if keys else ""),
            hits=hits,
        )
        loads = [self.replicas[name].load for name in warm]
        draw = random.random()  # noqa: S311 - spreads load, guards nothing
        chosen = self.replicas[self._chooser.choose(request, loads, draw, now).name]
        self._index.sent(chosen.name, keys)
        return chosen
