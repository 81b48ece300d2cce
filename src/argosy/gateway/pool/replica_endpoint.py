"""One replica: what is known of it, and how many requests it may get."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from argosy.gateway.backends import Carry, Dialect, Kind, KvAddress, dialect_of
from argosy.gateway.principal import TIERS
from argosy.gateway.upstream import Upstream
from argosy.policy import (
    Absence,
    Backpressure,
    Breaker,
    Outcome,
    Prefixes,
    PrefixIndex,
    Rate,
    ReplicaLoad,
    part,
)

RANKS = range(len(TIERS))
DEFAULT_MOST = 256
LEAST_PREFILL = 64
"""The first token of a shorter prompt says nothing of the rate at which prompts are computed."""
PREFILL_HALF_LIFE = 8192.0
DECODE_HALF_LIFE = 256.0
RESTED_S = 60.0
"""How fast a replica was says nothing after it had no request of ours for so long: were it slow, it would get none."""
RETURNING = frozenset({"starting", "restarting"})
"""States of a replica of ours that will take requests."""


def nobody_waits() -> None:
    """For a replica that nobody waits for."""


def _a_name() -> tuple[bytes, bytes]:
    """Nobody else's."""
    return b"x-argosy-gateway", secrets.token_hex(8).encode()


@dataclass(slots=True)
class Replica:
    """One server that answers for a model."""

    name: str
    kind: Kind
    model: str
    """What it calls the model."""
    upstream: Upstream
    breaker: Breaker = field(default_factory=Breaker)
    backpressure: Backpressure = field(default_factory=Backpressure)
    absence: Absence = field(default_factory=Absence)
    load: ReplicaLoad = field(init=False)
    most: int | None = None
    """Requests at a time, however many it runs."""
    carry: Carry = "exact"
    stream_usage: bool = True
    """It may be asked for the usage of streams."""
    priority_scheduling: bool = False
    """It computes by what requests say of their urgency."""
    kv_events: KvAddress | None = None
    """Where it publishes what it caches; None: it may say so itself."""
    taking: bool = field(init=False)
    """It says that it takes new requests; one that drains does not, nor one whose kind is not known yet."""
    on_change: Callable[[], None] = nobody_waits
    """Called when there may be room that there was not before."""
    prefixes: Prefixes = field(default_factory=PrefixIndex)
    """What it has cached, as it tells itself or as is believed."""
    max_model_len: int | None = None
    """Tokens that a prompt and its answer may have together, once it has told."""
    tells_speed: bool = False
    """It measures itself how fast it is, better than can be seen from here."""
    sender: tuple[bytes, bytes] = field(default_factory=_a_name, init=False)
    """The header by which one of ours knows this gateway's requests, those of this pool, from all others."""
    parts: tuple[int, ...] | None = None
    """Of its seats, those that are this gateway's when the next request is of tier 0, 1, 2; None: all."""
    _used_at: float = field(default=0.0, init=False)
    """When something of ours was there last, as far as it was looked."""
    _alone: bool = field(default=False, init=False)
    """Nothing else has been there since the last request was sent."""
    _prefill: Rate = field(default_factory=lambda: Rate(PREFILL_HALF_LIFE), init=False)
    _decode: Rate = field(default_factory=lambda: Rate(DECODE_HALF_LIFE), init=False)

    @property
    def seats(self) -> int:
        """Requests that it gets at a time."""
        told = self.load.capacity
        return told or DEFAULT_MOST if self.most is None else min(self.most, told or self.most)

    def part(self, tier: int, now: float) -> int:
        """Those of them that are this gateway's when its next request is of this tier; none while it is left alone."""
        ours = self.seats if self.parts is None else self.parts[tier]
        most = min(ours, self.backpressure.most(now))
        if self.absence.away:
            most = min(most, self.load.in_flight + self.absence.more(now))
        return int(most)

    def has_room(self, tier: int, now: float) -> bool:
        """Whether one more request of this tier may go there, and would not have to wait there (or hardly)."""
        return self.load.in_flight < self.part(tier, now)

    @property
    def dialect(self) -> Dialect:
        """How it is spoken to."""
        return dialect_of(
            self.kind, self.carry, usage=self.stream_usage, urgency=self.priority_scheduling
        )

    def __post_init__(self) -> None:
        self.load = ReplicaLoad(self.name)
        self.taking = self.kind != "auto"

    def says(self, state: str, now: float) -> None:
        """It said how it is, in the words of ours (see `Load`)."""
        self.taking = state == "ready"
        if self.taking:
            self.absence.there()
        elif state in RETURNING:
            self.absence.coming(now)
        else:
            self.absence.lost(now)

    def answers(self) -> None:
        """It has begun to answer a request, or said that it would."""
        if self.absence.away and self.taking:
            self.absence.there()
            self.on_change()

    def lost(self, now: float) -> None:
        """It could not be reached, or was not well: once means nothing, unless it never was."""
        if not (self.breaker.closed and self.absence.met):
            self.absence.lost(now)

    def sent(self, tokens: int) -> None:
        """A request goes there; it probably has so many prompt tokens that are not cached."""
        self.load.in_flight += 1
        self.load.sent_tokens += tokens
        self._alone = self.load.in_flight == 1

    def first_token(self, seconds: float, tokens: int, now: float) -> None:
        """The answer to a prompt with so many uncached tokens began `seconds` after it was sent."""
        load = self.load
        load.latency.add(seconds, now)
        if self._alone and tokens >= LEAST_PREFILL and not self.tells_speed:
            self._prefill.add(tokens, seconds)
            load.prefill_rate = self._prefill.per_s or load.prefill_rate

    def computed(self, tokens: int, since: float) -> None:
        """The so many tokens of a prompt that was sent then are computed by now, or never will be."""
        if self.load.reported_at < since:  # else the report has said what is left of them
            self.load.sent_tokens = max(0, self.load.sent_tokens - tokens)

    def shared_with(self, others: Sequence[Mapping[int, int]]) -> None:
        """Other gateways have so many requests there, by tier."""
        load, most = self.load, self.seats
        if not others:
            load.over, self.parts = 0, None
            return
        there = load.in_flight + sum(sum(other.values()) for other in others)
        load.over = max(0, there - (load.capacity or most))
        self.parts = tuple([min(most, part(load.capacity or most, others, t)) for t in RANKS])

    def streamed(self, tokens: int, seconds: float) -> None:
        """So many tokens of one sequence, after its first, came in so long; none, too."""
        if seconds > 0 and not self.tells_speed:
            self._decode.add(tokens, seconds)
            if self._decode.per_s > 0:
                self.load.decode_s = 1.0 / self._decode.per_s

    def look_after(self, now: float) -> None:
        """To be called now and then: one that was slow once is tried again."""
        if self.load.in_flight:
            self._used_at = now
        elif now - self._used_at > RESTED_S:
            self._used_at = now
            self.forget_speed()

    def forget_speed(self) -> None:
        """Where it counts as slow nobody measures it again; what stood still while it failed made it that, too."""
        if not self.tells_speed:
            unknown = ReplicaLoad(self.name)
            self._prefill, self._decode = Rate(PREFILL_HALF_LIFE), Rate(DECODE_HALF_LIFE)
            self.load.prefill_rate, self.load.decode_s = unknown.prefill_rate, unknown.decode_s

    def ended(
        self, outcome: Outcome | None, now: float, retry_after_s: float | None = None
    ) -> None:
        """It is over; None: for a reason that says nothing about the replica."""
        self.load.in_flight -= 1
        if not self.load.in_flight:
            self.load.sent_tokens = 0
        if outcome is Outcome.BACKPRESSURE:
            self.backpressure.refused(self.load.in_flight, now, retry_after_s)
        elif outcome is Outcome.SUCCESS:
            self.backpressure.answered()
        if outcome is not None:
            self.breaker.record(outcome, now)
            if not self.breaker.closed:
                self.prefixes.clear()  # if it was started anew, its cache is gone
        self.on_change()
