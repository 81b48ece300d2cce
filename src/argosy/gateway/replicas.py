"""The replicas of a model: what is known of each, whether it may be used, and which one a request gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from argosy.gateway.ask import BYTES_PER_TOKEN, Ask
from argosy.gateway.dialects import Carry, Dialect, Kind, dialect_of
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

LONGEST_AFFINITY_BYTES = 64 * 1024
DEFAULT_MOST = 256


def _nothing() -> None:
    """For a replica that nobody waits for."""


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
    most: int = DEFAULT_MOST
    """Requests at a time, as long as it does not say itself."""
    carry: Carry = "exact"
    stream_usage: bool = True
    """It may be asked for the usage of streams."""
    max_model_len: int = 0
    """Tokens of context; 0: unknown."""
    taking: bool = field(init=False)
    """It says that it takes new requests; one that drains does not, nor one whose kind is not known yet."""
    on_change: Callable[[], None] = _nothing
    """Called when there may be room that there was not before."""

    @property
    def has_room(self) -> bool:
        """Whether one more request would not have to wait there (or hardly)."""
        return self.load.in_flight < (self.load.capacity or self.most)

    @property
    def dialect(self) -> Dialect:
        """How it is spoken to."""
        return dialect_of(self.kind, self.carry, usage=self.stream_usage)

    def __post_init__(self) -> None:
        self.load = ReplicaLoad(self.name)
        self.taking = self.kind != "auto"

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
        self.on_change()


class Pool:
    """The replicas that answer for one public model name."""

    def __init__(self, model: str, replicas: list[Replica], chooser: Chooser) -> None:
        self.model = model
        self.replicas = {replica.name: replica for replica in replicas}
        self.retries = RetryBudget()
        self._chooser = chooser
        self._index = PrefixIndex()

    @property
    def on_change(self) -> Callable[[], None]:
        """Called when a replica may have room that it had not before."""
        return next(iter(self.replicas.values())).on_change

    @on_change.setter
    def on_change(self, changed: Callable[[], None]) -> None:
        for replica in self.replicas.values():
            replica.on_change = changed

    def alive(self) -> list[str]:
        """Names of the replicas that may be used at all."""
        return usable({n: r.breaker for n, r in self.replicas.items() if r.taking})

    def room(self, now: float) -> list[str]:
        """Names of those that may be used now: they have room, and have not just said that they are full."""
        return [
            name
            for name in self.alive()
            if self.replicas[name].has_room and not self.replicas[name].breaker.cooling(now)
        ]

    def pick(self, ask: Ask, domain: str, tried: Collection[str], now: float) -> Replica | None:
        """The replica for a request, not one of `tried`. None: there is no room for it now."""
        warm = [name for name in self.room(now) if name not in tried]
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
