"""The replicas of a model: what is known of each, whether it may be used, and which one a request gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from argosy.gateway.ask import BYTES_PER_TOKEN, Ask
from argosy.gateway.upstream import Upstream
from argosy.policy import (
    BLOCK_BYTES,
    Breaker,
    Chooser,
    Cost,
    Outcome,
    PrefixIndex,
    Rate,
    ReplicaLoad,
    RetryBudget,
    RouteRequest,
    chain,
    cost,
    usable,
)

Kind = Literal["argosy", "openai"]
"""Ours, whose streams can be carried on anywhere; or any other OpenAI-compatible server."""

LONGEST_AFFINITY_BYTES = 64 * 1024
DEFAULT_MOST = 256
LEAST_PREFILL = 64
"""The first token of a shorter prompt says nothing of the rate at which prompts are computed."""
PREFILL_HALF_LIFE = 8192.0
DECODE_HALF_LIFE = 256.0


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
    taking: bool = True
    """It says that it takes new requests; a replica that drains does not."""
    on_change: Callable[[], None] = _nothing
    """Called when there may be room that there was not before."""
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    """What it probably has cached."""
    max_model_len: int | None = None
    """Tokens that a prompt and its answer may have together, once it has told."""
    tells_speed: bool = False
    """It measures itself how fast it is, better than can be seen from here."""
    _alone: bool = field(default=False, init=False)
    """Nothing else has been there since the last request was sent."""
    _prefill: Rate = field(default_factory=lambda: Rate(PREFILL_HALF_LIFE), init=False)
    _decode: Rate = field(default_factory=lambda: Rate(DECODE_HALF_LIFE), init=False)

    @property
    def seats(self) -> int:
        """Requests that it runs at a time."""
        return self.load.capacity or self.most

    @property
    def has_room(self) -> bool:
        """Whether one more request would not have to wait there (or hardly)."""
        return self.load.in_flight < self.seats

    def __post_init__(self) -> None:
        self.load = ReplicaLoad(self.name)

    def sent(self, tokens: int) -> None:
        """A request with so many prompt tokens goes there."""
        self.load.in_flight += 1
        self.load.sent_tokens += tokens
        self._alone = self.load.in_flight == 1

    def first_token(self, seconds: float, tokens: int, now: float) -> None:
        """The answer to a prompt with so many uncached tokens began `seconds` after it was sent."""
        self.load.latency.add(seconds, now)
        if self._alone and tokens >= LEAST_PREFILL and not self.tells_speed:
            self._prefill.add(tokens, seconds)
            self.load.prefill_rate = self._prefill.per_s or self.load.prefill_rate

    def streamed(self, tokens: int, seconds: float) -> None:
        """So many tokens of one sequence, after its first, came in so long."""
        if tokens > 0 and seconds > 0 and not self.tells_speed:
            self._decode.add(tokens, seconds)
            self.load.decode_s = 1.0 / self._decode.per_s

    def ended(
        self, outcome: Outcome | None, now: float, retry_after_s: float | None = None
    ) -> None:
        """It is over; None: for a reason that says nothing about the replica."""
        self.load.in_flight -= 1
        if outcome is not None:
            self.breaker.record(outcome, now, retry_after_s)
            if not self.breaker.closed:
                self.prefixes.clear()  # if it was started anew, its cache is gone
        self.on_change()


class Picked(NamedTuple):
    """The replica for a request, and what each candidate would have cost."""

    replica: Replica
    costs: tuple[Cost, ...]


class Pool:
    """The replicas that answer for one public model name."""

    def __init__(
        self, model: str, replicas: list[Replica], chooser: Chooser, rule: str = ""
    ) -> None:
        self.model = model
        self.rule = rule
        """Name of the chooser."""
        self.replicas = {replica.name: replica for replica in replicas}
        self.retries = RetryBudget()
        self._chooser = chooser

    @property
    def max_model_len(self) -> int | None:
        """The most tokens that any of its replicas takes; None: no one has told."""
        told = [r.max_model_len for r in self.replicas.values() if r.max_model_len is not None]
        return max(told, default=None)

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

    def loads(self) -> list[ReplicaLoad]:
        """What is known of those."""
        return [self.replicas[name].load for name in self.alive()]

    def room(self, now: float) -> list[str]:
        """Names of those that may be used now: they have room, and have not just said that they are full."""
        return [
            name
            for name in self.alive()
            if self.replicas[name].has_room and not self.replicas[name].breaker.cooling(now)
        ]

    def seats(self, now: float) -> tuple[int, int]:
        """How many seats are free on those that may be used now, full or not, and how many they have."""
        able = [self.replicas[name] for name in self.alive()]
        able = [replica for replica in able if not replica.breaker.cooling(now)]
        free = sum(max(0, replica.seats - replica.load.in_flight) for replica in able)
        return free, sum(replica.seats for replica in able)

    def pick(self, ask: Ask, domain: str, tried: Collection[str], now: float) -> Picked | None:
        """The replica for a request, not one of `tried`. None: there is no room for it now."""
        warm = [name for name in self.room(now) if name not in tried]
        if not warm:
            return None
        keys = chain(
            f"{domain}\0{self.model}".encode(), ask.prompt[:LONGEST_AFFINITY_BYTES], BLOCK_BYTES
        )
        hits = {
            name: len(self.replicas[name].prefixes.find(keys)) * BLOCK_BYTES // BYTES_PER_TOKEN
            for name in warm
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
        chosen.prefixes.sent(keys)
        return Picked(chosen, tuple(cost(request, load, now) for load in loads))
