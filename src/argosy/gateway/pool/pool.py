"""The replicas that answer for a model: which of them may be used, and which one a request gets."""

from __future__ import annotations

import math
import random
from array import array
from binascii import a2b_base64
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Raw

from argosy.gateway.backends import sent_salt
from argosy.gateway.pool.replica_endpoint import RANKS, Replica, nobody_waits
from argosy.gateway.request_fields import BYTES_PER_TOKEN, DEFAULT_OUTPUT, Ask
from argosy.policy import (
    BLOCK_BYTES,
    CHOOSERS,
    SEES_ALL,
    Answered,
    Candidate,
    Cost,
    Hedging,
    LastPlaces,
    Mean,
    Read,
    ReplicaLoad,
    RetryBudget,
    Rule,
    Suspects,
    chain,
    cost,
    usable,
)
from argosy.protocol import unpack_names

COMPARED = 32
"""Of more replicas than that, so many are compared for a request: each takes two millionths of a second."""
LONGEST_AFFINITY_BYTES = 64 * 1024
OUTPUT_HALF_LIFE = 32.0
SHAPING = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "tools",
        "truncate_prompt_tokens",
        "truncation_side",
    }
)
"""Fields beside the prompt that make other tokens of it, or keep them apart."""


def _none() -> bool:
    """For a pool whose replicas have all been asked."""
    return False


class Picked(NamedTuple):
    """The replica for a request, and why."""

    replica: Replica
    costs: tuple[Cost, ...]
    """Of each candidate."""
    uncached: int
    """Prompt tokens that the replica probably has to compute."""
    blocks: float
    """The prompt's length."""
    found: list[int]
    """Of the blocks that the replica has cached: see `Prefixes.find`."""
    keys: list[bytes]
    """Of the prompt's blocks."""

    def answered(self, prompt_tokens: int, cached_tokens: int, prompt_blocks: bytes) -> None:
        """The replica has told how much of the prompt it had, and maybe what it named its blocks (in base64)."""
        if not self.keys:
            return
        names = unpack_names(a2b_base64(prompt_blocks))
        told = Answered(self.keys, self.found, self.blocks, prompt_tokens, cached_tokens, names)
        self.replica.prefixes.answered(told)

    def read(self, ids: array[int], ask: Ask) -> None:
        """The replica has told the prompt's tokens instead."""
        if self.keys:
            salt = sent_salt(ask, self.replica.dialect)
            self.replica.prefixes.read(Read(self.keys, self.blocks, salt, ids))


class Pool:
    """The replicas that answer for one public model name."""

    def __init__(
        self,
        model: str,
        replicas: list[Replica],
        rule: Rule = "least-cost",
        hedging: Hedging | None = None,
    ) -> None:
        self.model = model
        self.rule = rule
        self.replicas = {replica.name: replica for replica in replicas}
        self.retries = RetryBudget()
        self.suspects = Suspects()
        self.hedging = hedging
        """None: it does not."""
        self.requests = 0
        """That are on their way here: they wait, or run on one of the replicas."""
        self.awaits: Callable[[], bool] = _none
        """Whether replicas are looked for, or asked how they are, that may soon be used."""
        self._gone_until = -math.inf
        """How long it makes sense to wait for those that were removed: others may take their places."""
        self._changed: Callable[[], None] = nobody_waits
        self._chooser = CHOOSERS[rule]()
        self._places = LastPlaces()
        self._outputs = Mean(OUTPUT_HALF_LIFE, DEFAULT_OUTPUT)

    @property
    def max_model_len(self) -> int | None:
        """The most tokens that any of its replicas takes; None: no one has told."""
        told = [r.max_model_len for r in self.replicas.values() if r.max_model_len is not None]
        return max(told, default=None)

    def watch(self, changed: Callable[[], None]) -> None:
        """Have `changed` called when a replica may have room that it had not before."""
        self._changed = changed
        for replica in self.replicas.values():
            replica.on_change = changed

    def add(self, replica: Replica) -> None:
        """From now on there is this one, too, in place of one of its name: it gets requests once it is well."""
        replica.taking = False
        replica.on_change = self._changed
        self.replicas[replica.name] = replica

    def remove(self, name: str, now: float) -> Replica:
        """It gets no request any more; what runs there goes on."""
        replica = self.replicas.pop(name)
        replica.absence.lost(now)
        self._gone_until = max(self._gone_until, replica.absence.until)
        return replica

    def go_by(self, rule: Rule, hedging: Hedging | None) -> None:
        """Choose by this rule from now on, and race silent replicas like this; what stays the same goes on."""
        if rule != self.rule:
            self.rule, self._chooser = rule, CHOOSERS[rule]()
        if hedging is None or self.hedging is None or hedging.after_s != self.hedging.after_s:
            self.hedging = hedging

    def alive(self) -> list[Replica]:
        """The replicas that may be used at all."""
        taking = [replica for replica in self.replicas.values() if replica.taking]
        if [replica for replica in taking if replica.breaker.open_until is not None]:
            return [self.replicas[name] for name in usable({r.name: r.breaker for r in taking})]
        return taking

    def serves(self) -> bool:
        """Whether one of those is there, as far as is known."""
        return any(not replica.absence.away for replica in self.alive())

    def worth_waiting(self, now: float) -> bool:
        """Whether there is a replica, or may be one soon."""
        return (
            any(now < replica.absence.until for replica in self.replicas.values())
            or now < self._gone_until
            or self.awaits()
        )

    def full_s(self, now: float) -> float:
        """For how long all of them are full, as they say; 0 where one does not."""
        return min((each.backpressure.full_s(now) for each in self.alive()), default=0.0)

    def loads(self) -> list[ReplicaLoad]:
        """What is known of those that are there."""
        return [replica.load for replica in self.alive() if not replica.absence.away]

    def room(self, tier: int, now: float) -> list[Replica]:
        """Those that may be used now: they have room, and have not just said that they are full."""
        return [replica for replica in self.alive() if replica.has_room(tier, now)]

    def has_well(self, tier: int, now: float) -> bool:
        """Whether one of those has not just failed: such are used for want of others only."""
        return any(replica.breaker.closed for replica in self.room(tier, now))

    def seats(self, now: float) -> tuple[list[int], int]:
        """How many seats are free for each tier on those that may be used now, full or not, and how many all have.

        Of seats that other gateways share, those that are this one's, whatever comes next.
        """
        free, alike, all_seats = [0 for _ in RANKS], 0, 0
        for replica in self.alive():
            ours, busy = replica.part(RANKS[-1], now), replica.load.in_flight
            all_seats += ours
            if replica.parts is None:
                alike += max(0, ours - busy)
                continue
            for tier in RANKS:
                free[tier] += max(0, replica.part(tier, now) - busy)
        return [those + alike for those in free], all_seats

    def went(self, now: float) -> None:
        """A request went to a replica: what may be tried again, and twice, is a part of those that do."""
        self.retries.request(now)
        if self.hedging is not None:
            self.hedging.request(now)

    def answered(self, tokens: float) -> None:
        """An answer came to its end after so many tokens, each of its choices on average."""
        self._outputs.add(tokens)

    def pick(
        self, ask: Ask, domain: str, tier: int, tried: Collection[str], now: float
    ) -> Picked | None:
        """The replica for a request, not one of `tried`. None: there is no room for it now.

        One that fails and is in use for want of others gets it only where no other has room.
        """
        salt = _salt(domain, self.model, ask.fields)
        keys = chain(salt, ask.prompt[:LONGEST_AFFINITY_BYTES], BLOCK_BYTES)
        left = self._left(keys, tier, tried, now)
        if not left:
            return None
        found, candidates, output = {}, [], self.expected(ask)
        for replica in left:
            found[replica.name] = held = replica.prefixes.find(keys)
            cached = len(held) * BLOCK_BYTES // BYTES_PER_TOKEN
            uncached = max(0, ask.prompt_tokens - cached)
            costs = cost(replica.load, uncached, output, now)
            candidates.append(Candidate(replica.load, uncached, costs))
        key = ask.session or (keys[0].hex() if keys else "")
        draw = random.random()  # noqa: S311 - spreads load, guards nothing
        chosen = self._chooser.choose(candidates, key, draw, now)
        replica = self.replicas[chosen.load.name]
        replica.prefixes.sent(keys)
        if len(self.replicas) > COMPARED:
            self._places.went(keys, replica.name)
        replica.absence.asked(now)
        return Picked(
            replica,
            costs=tuple([candidate.cost for candidate in candidates]),
            uncached=chosen.uncached,
            blocks=len(ask.prompt) / BLOCK_BYTES,
            found=found[replica.name],
            keys=keys,
        )

    def _left(
        self, keys: Sequence[bytes], tier: int, tried: Collection[str], now: float
    ) -> list[Replica]:
        """Those that a prompt may go to; of very many, only some of those that have not just failed."""
        alive, left = self.alive(), list[Replica]()
        for some in (self._drawn(alive, keys), alive):
            left = [each for each in some if each.name not in tried and each.has_room(tier, now)]
            well = [each for each in left if each.breaker.closed]
            if well:
                return well
        return left

    def _drawn(self, alive: Sequence[Replica], keys: Sequence[bytes]) -> list[Replica]:
        """Of very many, some by chance, and who had the most of the prompt last; none where all can be compared."""
        if len(alive) <= COMPARED or self.rule in SEES_ALL:
            return []
        start = random.randrange(len(alive))  # noqa: S311 - spreads load, guards nothing
        drawn = [*alive[start : start + COMPARED], *alive[: max(0, start + COMPARED - len(alive))]]
        last = self._places.find(keys)
        drawn += [each for each in alive if each.name == last]
        return list({each.name: each for each in drawn}.values())

    def expected(self, ask: Ask) -> int:
        """Tokens of its answer, going by those of others."""
        mean = round(self._outputs.value)
        return ask.choices * (mean if ask.max_output is None else min(mean, ask.max_output))


def _salt(domain: str, model: str, fields: Mapping[str, Raw]) -> bytes:
    """Differs where equal prompts become other tokens, or may not share them."""
    salt = f"{domain}\0{model}".encode()
    for name in sorted(SHAPING.intersection(fields)):
        salt += b"\0%b\0%b" % (name.encode(), fields[name])
    return salt
