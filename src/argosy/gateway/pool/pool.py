"""The replicas that answer for a model: which of them may be used, and which one a request gets."""

from __future__ import annotations

import math
import random
from array import array
from binascii import a2b_base64
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Raw

from argosy.gateway.backends import derive_cache_salt
from argosy.gateway.pool.replica_endpoint import TIER_RANKS, ReplicaEndpoint, ignore_capacity_change
from argosy.gateway.request_fields import BYTES_PER_TOKEN, DEFAULT_OUTPUT_TOKENS, RequestFields
from argosy.policy import (
    BLOCK_BYTES,
    FULL_SCAN_POLICIES,
    ROUTING_POLICIES,
    CacheHitReport,
    EwmaMean,
    Hedging,
    PoisonRequestTracker,
    PromptTokensReport,
    RecentPlacements,
    ReplicaLoad,
    RetryBudget,
    RoutingCandidate,
    RoutingCost,
    RoutingPolicyName,
    compute_prefix_keys,
    eligible_replicas,
    estimate_cost,
)
from argosy.protocol import unpack_block_names

MAX_COMPARED_REPLICAS = 32
"""Of more replicas than that, so many are compared for a request: each takes two millionths of a second."""
MAX_AFFINITY_BYTES = 64 * 1024
OUTPUT_HALF_LIFE_SAMPLES = 32.0
PREFIX_KEY_FIELDS = frozenset(
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


def _nothing_pending() -> bool:
    """For a pool whose replicas have all been asked."""
    return False


class RoutingDecision(NamedTuple):
    """The replica for a request, and why."""

    replica: ReplicaEndpoint
    costs: tuple[RoutingCost, ...]
    """Of each candidate."""
    uncached_tokens: int
    """Prompt tokens that the replica probably has to compute."""
    prompt_blocks: float
    """The prompt's length."""
    cached_blocks: list[int]
    """Of the blocks that the replica has cached: see `Prefixes.find`."""
    block_keys: list[bytes]
    """Of the prompt's blocks."""

    def record_cache_hits(self, prompt_tokens: int, cached_tokens: int, block_names: bytes) -> None:
        """The replica has told how much of the prompt it had, and maybe what it named its blocks (in base64)."""
        if not self.block_keys:
            return
        names = unpack_block_names(a2b_base64(block_names))
        told = CacheHitReport(
            self.block_keys,
            self.cached_blocks,
            self.prompt_blocks,
            prompt_tokens,
            cached_tokens,
            names,
        )
        self.replica.prefix_index.on_cache_hit_report(told)

    def record_prompt_tokens(self, token_ids: array[int], fields: RequestFields) -> None:
        """The replica has told the prompt's tokens instead."""
        if self.block_keys:
            salt = derive_cache_salt(fields, self.replica.adapter)
            self.replica.prefix_index.on_prompt_tokens_report(
                PromptTokensReport(self.block_keys, self.prompt_blocks, salt, token_ids)
            )


class Pool:
    """The replicas that answer for one public model name."""

    def __init__(
        self,
        model: str,
        replicas: list[ReplicaEndpoint],
        routing_policy: RoutingPolicyName = "least-cost",
        hedging: Hedging | None = None,
    ) -> None:
        self.model = model
        self.routing_policy = routing_policy
        self.replicas = {replica.name: replica for replica in replicas}
        self.retry_budget = RetryBudget()
        self.poison_requests = PoisonRequestTracker()
        self.hedging = hedging
        """None: it does not."""
        self.active_requests = 0
        """That are on their way here: they wait, or run on one of the replicas."""
        self.has_pending_replicas: Callable[[], bool] = _nothing_pending
        """Whether replicas are looked for, or asked how they are, that may soon be used."""
        self._removed_may_recover_until = -math.inf
        """How long it makes sense to wait for those that were removed: others may take their places."""
        self._on_capacity_change: Callable[[], None] = ignore_capacity_change
        self._chooser = ROUTING_POLICIES[routing_policy]()
        self._recent_placements = RecentPlacements()
        self._mean_output_tokens = EwmaMean(OUTPUT_HALF_LIFE_SAMPLES, DEFAULT_OUTPUT_TOKENS)

    @property
    def max_model_len(self) -> int | None:
        """The most tokens that any of its replicas takes; None: no one has told."""
        told = [r.max_model_len for r in self.replicas.values() if r.max_model_len is not None]
        return max(told, default=None)

    def set_capacity_listener(self, listener: Callable[[], None]) -> None:
        """Have `changed` called when a replica may have room that it had not before."""
        self._on_capacity_change = listener
        for replica in self.replicas.values():
            replica.on_capacity_change = listener

    def add(self, replica: ReplicaEndpoint) -> None:
        """From now on there is this one, too, in place of one of its name: it gets requests once it is well."""
        replica.is_accepting = False
        replica.on_capacity_change = self._on_capacity_change
        self.replicas[replica.name] = replica

    def remove(self, name: str, now: float) -> ReplicaEndpoint:
        """It gets no request any more; what runs there goes on."""
        replica = self.replicas.pop(name)
        replica.outage.mark_down(now)
        self._removed_may_recover_until = max(
            self._removed_may_recover_until, replica.outage.grace_ends_at
        )
        return replica

    def set_routing_policy(
        self, routing_policy: RoutingPolicyName, hedging: Hedging | None
    ) -> None:
        """Choose by this rule from now on, and race silent replicas like this; what stays the same goes on."""
        if routing_policy != self.routing_policy:
            self.routing_policy, self._chooser = routing_policy, ROUTING_POLICIES[routing_policy]()
        if hedging is None or self.hedging is None or hedging.after_s != self.hedging.after_s:
            self.hedging = hedging

    def eligible_replicas(self) -> list[ReplicaEndpoint]:
        """The replicas that may be used at all."""
        taking = [replica for replica in self.replicas.values() if replica.is_accepting]
        if [replica for replica in taking if replica.breaker.open_until is not None]:
            return [
                self.replicas[name]
                for name in eligible_replicas({r.name: r.breaker for r in taking})
            ]
        return taking

    def is_available(self) -> bool:
        """Whether one of those is there, as far as is known."""
        return any(not replica.outage.is_down for replica in self.eligible_replicas())

    def may_recover(self, now: float) -> bool:
        """Whether there is a replica, or may be one soon."""
        return (
            any(now < replica.outage.grace_ends_at for replica in self.replicas.values())
            or now < self._removed_may_recover_until
            or self.has_pending_replicas()
        )

    def retry_after_s(self, now: float) -> float:
        """For how long all of them are full, as they say; 0 where one does not."""
        return min(
            (each.backpressure.retry_after_s(now) for each in self.eligible_replicas()), default=0.0
        )

    def reachable_loads(self) -> list[ReplicaLoad]:
        """What is known of those that are there."""
        return [replica.load for replica in self.eligible_replicas() if not replica.outage.is_down]

    def replicas_with_free_slots(self, tier: int, now: float) -> list[ReplicaEndpoint]:
        """Those that may be used now: they have room, and have not just said that they are full."""
        return [replica for replica in self.eligible_replicas() if replica.has_free_slot(tier, now)]

    def has_healthy(self, tier: int, now: float) -> bool:
        """Whether one of those has not just failed: such are used for want of others only."""
        return any(
            replica.breaker.is_closed for replica in self.replicas_with_free_slots(tier, now)
        )

    def free_slots(self, now: float) -> tuple[list[int], int]:
        """How many seats are free for each tier on those that may be used now, full or not, and how many all have.

        Of seats that other gateways share, those that are this one's, whatever comes next.
        """
        free, alike, all_seats = [0 for _ in TIER_RANKS], 0, 0
        for replica in self.eligible_replicas():
            ours, busy = replica.slot_share(TIER_RANKS[-1], now), replica.load.in_flight
            all_seats += ours
            if replica.slot_shares is None:
                alike += max(0, ours - busy)
                continue
            for tier in TIER_RANKS:
                free[tier] += max(0, replica.slot_share(tier, now) - busy)
        return [those + alike for those in free], all_seats

    def on_dispatched(self, now: float) -> None:
        """A request went to a replica: what may be tried again, and twice, is a part of those that do."""
        self.retry_budget.record_request(now)
        if self.hedging is not None:
            self.hedging.record_request(now)

    def on_completed(self, output_tokens: float) -> None:
        """An answer came to its end after so many tokens, each of its choices on average."""
        self._mean_output_tokens.add(output_tokens)

    def select_replica(
        self,
        fields: RequestFields,
        cache_domain: str,
        tier: int,
        excluded: Collection[str],
        now: float,
    ) -> RoutingDecision | None:
        """The replica for a request, not one of `tried`. None: there is no room for it now.

        One that fails and is in use for want of others gets it only where no other has room.
        """
        salt = _prefix_salt(cache_domain, self.model, fields.raw)
        keys = compute_prefix_keys(salt, fields.raw_prompt[:MAX_AFFINITY_BYTES], BLOCK_BYTES)
        left = self._selectable_replicas(keys, tier, excluded, now)
        if not left:
            return None
        found, candidates, output = {}, [], self.expected_output_tokens(fields)
        for replica in left:
            found[replica.name] = held = replica.prefix_index.match_prefix(keys)
            cached = len(held) * BLOCK_BYTES // BYTES_PER_TOKEN
            uncached = max(0, fields.estimated_prompt_tokens - cached)
            costs = estimate_cost(replica.load, uncached, output, now)
            candidates.append(RoutingCandidate(replica.load, uncached, costs))
        key = fields.session_id or (keys[0].hex() if keys else "")
        draw = random.random()  # noqa: S311 - spreads load, guards nothing
        chosen = self._chooser.select(candidates, key, draw, now)
        replica = self.replicas[chosen.load.name]
        replica.prefix_index.on_prompt_sent(keys)
        if len(self.replicas) > MAX_COMPARED_REPLICAS:
            self._recent_placements.record_placement(keys, replica.name)
        replica.outage.on_dispatched(now)
        return RoutingDecision(
            replica,
            costs=tuple([candidate.cost for candidate in candidates]),
            uncached_tokens=chosen.uncached_tokens,
            prompt_blocks=len(fields.raw_prompt) / BLOCK_BYTES,
            cached_blocks=found[replica.name],
            block_keys=keys,
        )

    def _selectable_replicas(
        self, block_keys: Sequence[bytes], tier: int, excluded: Collection[str], now: float
    ) -> list[ReplicaEndpoint]:
        """Those that a prompt may go to; of very many, only some of those that have not just failed."""
        alive, left = self.eligible_replicas(), list[ReplicaEndpoint]()
        for some in (self._sample_replicas(alive, block_keys), alive):
            left = [
                each for each in some if each.name not in excluded and each.has_free_slot(tier, now)
            ]
            well = [each for each in left if each.breaker.is_closed]
            if well:
                return well
        return left

    def _sample_replicas(
        self, eligible: Sequence[ReplicaEndpoint], block_keys: Sequence[bytes]
    ) -> list[ReplicaEndpoint]:
        """Of very many, some by chance, and who had the most of the prompt last; none where all can be compared."""
        if len(eligible) <= MAX_COMPARED_REPLICAS or self.routing_policy in FULL_SCAN_POLICIES:
            return []
        start = random.randrange(len(eligible))  # noqa: S311 - spreads load, guards nothing
        drawn = [
            *eligible[start : start + MAX_COMPARED_REPLICAS],
            *eligible[: max(0, start + MAX_COMPARED_REPLICAS - len(eligible))],
        ]
        last = self._recent_placements.find_replica(block_keys)
        drawn += [each for each in eligible if each.name == last]
        return list({each.name: each for each in drawn}.values())

    def expected_output_tokens(self, fields: RequestFields) -> int:
        """Tokens of its answer, going by those of others."""
        mean = round(self._mean_output_tokens.value)
        return fields.choice_count * (
            mean if fields.max_output_tokens is None else min(mean, fields.max_output_tokens)
        )


def _prefix_salt(cache_domain: str, model: str, raw: Mapping[str, Raw]) -> bytes:
    """Differs where equal prompts become other tokens, or may not share them."""
    salt = f"{cache_domain}\0{model}".encode()
    for name in sorted(PREFIX_KEY_FIELDS.intersection(raw)):
        salt += b"\0%b\0%b" % (name.encode(), raw[name])
    return salt
