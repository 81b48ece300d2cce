"""Pool of the replicas of one model: availability, capacity, and selection of a replica for a request."""

from __future__ import annotations

import math
import random
import time
from array import array
from binascii import a2b_base64
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import structlog
from msgspec import Raw

from argosy.gateway.backends import derive_cache_salt
from argosy.gateway.pool.replica_endpoint import TIER_RANKS, ReplicaEndpoint, ignore_change
from argosy.gateway.request_fields import BYTES_PER_TOKEN, DEFAULT_OUTPUT_TOKENS, RequestFields
from argosy.policy import (
    BLOCK_BYTES,
    FULL_SCAN_POLICIES,
    ROUTING_POLICIES,
    AdminState,
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
    StatusChange,
    compute_prefix_keys,
    eligible_replicas,
    estimate_cost,
)
from argosy.protocol import differing_parts, unpack_block_names
from argosy.store import ReplicaSetting

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_COMPARED_REPLICAS = 32
"""Maximum number of replicas compared per request. Larger pools are sampled, since each comparison takes 2 µs."""
MAX_STATUS_CHANGES = 500
"""Status changes that each pool keeps."""
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
"""Request fields beside the prompt that change its tokens or separate its cache entries."""


def _nothing_pending() -> bool:
    """Default of `Pool.has_pending_replicas`, for a pool whose replicas have all been probed."""
    return False


class RoutingDecision(NamedTuple):
    """Selected replica of a request, with the estimated costs of all candidates."""

    replica: ReplicaEndpoint
    costs: tuple[RoutingCost, ...]
    """Costs of each candidate."""
    uncached_tokens: int
    """Estimated number of prompt tokens that the replica has to compute."""
    prompt_blocks: float
    """Length of the prompt in blocks of `BLOCK_BYTES`."""
    cached_blocks: list[int]
    """Cached blocks of the prompt, as `PrefixCacheIndex.match_prefix` returns them."""
    block_keys: list[bytes]
    """Keys of the prompt's blocks."""

    def record_cache_hits(self, prompt_tokens: int, cached_tokens: int, block_names: bytes) -> None:
        """Update the prefix index with the replica's report of cached tokens.

        `block_names` are the names of the prompt's KV blocks in base64; empty if the replica does not report them.
        """
        if not self.block_keys:
            return
        names = unpack_block_names(a2b_base64(block_names))
        report = CacheHitReport(
            self.block_keys,
            self.cached_blocks,
            self.prompt_blocks,
            prompt_tokens,
            cached_tokens,
            names,
        )
        self.replica.prefix_index.on_cache_hit_report(report)

    def record_prompt_tokens(self, token_ids: array[int], fields: RequestFields) -> None:
        """Update the prefix index with the prompt's token ids, if the replica reports these instead."""
        if self.block_keys:
            salt = derive_cache_salt(fields, self.replica.adapter)
            self.replica.prefix_index.on_prompt_tokens_report(
                PromptTokensReport(self.block_keys, self.prompt_blocks, salt, token_ids)
            )


class Pool:
    """Replicas of one public model name. Not thread-safe: use it from one event loop."""

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
        self.status_changes = deque[StatusChange](maxlen=MAX_STATUS_CHANGES)
        """Recent status changes of the replicas."""
        self._settings: Mapping[str, ReplicaSetting] = {}
        """Operators' decisions by replica name, also for replicas that are not in the pool at the moment."""
        for replica in replicas:
            replica.health.on_status_change = self._on_status_change
            replica.on_arithmetic_change = self._log_mixed_arithmetic
        self._logged_arithmetics: set[str] = set()
        """Arithmetic identities that the last warning named."""
        self.retry_budget = RetryBudget()
        self.poison_requests = PoisonRequestTracker()
        self.hedging = hedging
        """Hedging policy; None if the pool sends no hedged requests."""
        self.active_requests = 0
        """Number of requests for this pool, queued or running."""
        self.has_pending_replicas: Callable[[], bool] = _nothing_pending
        """Function that returns whether discovery or first probes may soon add usable replicas."""
        self._removed_may_recover_until = -math.inf
        """Time until which requests wait for replacements of removed replicas."""
        self._on_capacity_change: Callable[[], None] = ignore_change
        self._policy = ROUTING_POLICIES[routing_policy]()
        self._recent_placements = RecentPlacements()
        self._mean_output_tokens = EwmaMean(OUTPUT_HALF_LIFE_SAMPLES, DEFAULT_OUTPUT_TOKENS)

    @property
    def max_model_len(self) -> int | None:
        """Largest context length of the replicas in tokens; None if no replica reported one."""
        lengths = [r.max_model_len for r in self.replicas.values() if r.max_model_len is not None]
        return max(lengths, default=None)

    def set_capacity_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a replica may have more free slots than before."""
        self._on_capacity_change = listener
        for replica in self.replicas.values():
            replica.on_capacity_change = listener

    def add(self, replica: ReplicaEndpoint) -> None:
        """Add a replica, in place of one with its name. The replica gets requests once a probe finds it ready."""
        replica.health.on_report_required()
        replica.on_capacity_change = self._on_capacity_change
        replica.on_arithmetic_change = self._log_mixed_arithmetic
        replica.health.on_status_change = self._on_status_change
        replica.apply_setting(self._settings.get(replica.name), time.monotonic(), time.time())
        self.replicas[replica.name] = replica

    def remove(self, name: str, now: float) -> ReplicaEndpoint:
        """Remove a replica and return it. Its running requests continue."""
        replica = self.replicas.pop(name)
        replica.health.on_removed(now)
        self._removed_may_recover_until = max(
            self._removed_may_recover_until, replica.health.grace_ends_at
        )
        return replica

    def apply_settings(
        self, settings: Mapping[str, ReplicaSetting], now: float, wall_now: float
    ) -> None:
        """Apply the operators' decisions, by replica name. They replace all earlier ones."""
        self._settings = settings
        for replica in self.replicas.values():
            replica.apply_setting(settings.get(replica.name), now, wall_now)

    def apply_setting(self, setting: ReplicaSetting, now: float, wall_now: float) -> None:
        """Apply one operator's decision, beside the earlier ones about other replicas."""
        self.apply_settings({**self._settings, setting.replica: setting}, now, wall_now)

    def count_room_for_moves(self, arithmetic_id: str, now: float) -> int:
        """Count the free slots of healthy replicas to which streams of this arithmetic may move."""
        return sum(
            max(0, replica.slot_share(TIER_RANKS[-1], now) - replica.load.in_flight)
            for replica in self.eligible_replicas()
            if replica.arithmetic_id == arithmetic_id
            and not replica.health.is_ejected
            and not replica.health.is_down
        )

    def set_routing_policy(
        self, routing_policy: RoutingPolicyName, hedging: Hedging | None
    ) -> None:
        """Change the routing policy and the hedging policy. An unchanged policy keeps its state."""
        if routing_policy != self.routing_policy:
            self.routing_policy, self._policy = (
                routing_policy,
                ROUTING_POLICIES[routing_policy](),
            )
        if hedging is None or self.hedging is None or hedging.after_s != self.hedging.after_s:
            self.hedging = hedging

    def eligible_replicas(self) -> list[ReplicaEndpoint]:
        """Return the replicas that may get requests and are not ejected by their circuit breakers."""
        schedulable = [r for r in self.replicas.values() if r.health.is_schedulable]
        if [replica for replica in schedulable if replica.health.is_ejected]:
            breakers = {replica.name: replica.health.breaker for replica in schedulable}
            return [self.replicas[name] for name in eligible_replicas(breakers)]
        return schedulable

    def group_by_arithmetic(self) -> dict[str, list[ReplicaEndpoint]]:
        """Return the replicas by arithmetic identity. A stream is resumed only within its group.

        Replicas whose identity is unknown are left out.
        """
        groups: dict[str, list[ReplicaEndpoint]] = {}
        for replica in self.replicas.values():
            if replica.arithmetic_id:
                groups.setdefault(replica.arithmetic_id, []).append(replica)
        return groups

    def is_available(self) -> bool:
        """Whether an eligible replica is not known to be down."""
        return any(not replica.health.is_down for replica in self.eligible_replicas())

    @property
    def is_out_of_service(self) -> bool:
        """Whether operators decided that no replica gets requests."""
        states = {replica.admin.state for replica in self.replicas.values()}
        return bool(states) and AdminState.ACTIVE not in states

    def may_recover(self, now: float) -> bool:
        """Whether a replica is available or may be soon, so that requests wait instead of failing."""
        return (
            any(now < replica.health.grace_ends_at for replica in self.replicas.values())
            or now < self._removed_may_recover_until
            or self.has_pending_replicas()
        )

    def retry_after_s(self, now: float) -> float:
        """Return the time in seconds for which all eligible replicas report to be full; 0 if one does not."""
        return min(
            (replica.health.retry_after_s(now) for replica in self.eligible_replicas()),
            default=0.0,
        )

    def reachable_loads(self) -> list[ReplicaLoad]:
        """Return the loads of the eligible replicas that are not down."""
        return [replica.load for replica in self.eligible_replicas() if not replica.health.is_down]

    def replicas_with_free_slots(self, tier: int, now: float) -> list[ReplicaEndpoint]:
        """Return the eligible replicas with a free slot for this tier, without those in backoff."""
        return [replica for replica in self.eligible_replicas() if replica.has_free_slot(tier, now)]

    def has_healthy(self, tier: int, now: float) -> bool:
        """Whether a replica with a free slot has a closed circuit breaker. Others are used only if there is none."""
        return any(
            not replica.health.is_ejected for replica in self.replicas_with_free_slots(tier, now)
        )

    def free_slots(self, now: float) -> tuple[list[int], int]:
        """Count the free slots and all slots of this gateway at the eligible replicas.

        Returns:
            The free slots for each tier, and the number of all slots. At replicas shared with other gateways, both
            count only this gateway's share.
        """
        free_by_tier, free_for_all, total = [0 for _ in TIER_RANKS], 0, 0
        for replica in self.eligible_replicas():
            slots, in_flight = replica.slot_share(TIER_RANKS[-1], now), replica.load.in_flight
            total += slots
            if replica.slot_shares is None:
                free_for_all += max(0, slots - in_flight)
                continue
            for tier in TIER_RANKS:
                free_by_tier[tier] += max(0, replica.slot_share(tier, now) - in_flight)
        return [free + free_for_all for free in free_by_tier], total

    def on_dispatched(self, now: float) -> None:
        """Record a dispatched request. Retries and hedged requests are limited to a part of these."""
        self.retry_budget.record_request(now)
        if self.hedging is not None:
            self.hedging.record_request(now)

    def on_completed(self, output_tokens: float) -> None:
        """Record a completed response with its mean number of output tokens per choice."""
        self._mean_output_tokens.add(output_tokens)

    def select_replica(
        self,
        fields: RequestFields,
        cache_domain: str,
        tier: int,
        excluded: Collection[str],
        now: float,
    ) -> RoutingDecision | None:
        """Select the replica for a request with the pool's routing policy.

        A replica whose circuit breaker is not closed is selected only if no other has a free slot. `excluded` are
        the names of replicas that must not be selected.

        Returns:
            The decision; None if no replica has a free slot now.
        """
        salt = _prefix_salt(cache_domain, self.model, fields.raw)
        keys = compute_prefix_keys(salt, fields.raw_prompt[:MAX_AFFINITY_BYTES], BLOCK_BYTES)
        selectable = self._selectable_replicas(keys, tier, excluded, now)
        if not selectable:
            return None
        matches, candidates, output_tokens = {}, [], self.expected_output_tokens(fields)
        for replica in selectable:
            matches[replica.name] = match = replica.prefix_index.match_prefix(keys)
            cached = len(match) * BLOCK_BYTES // BYTES_PER_TOKEN
            if match:  # the keys differ if the tools do
                cached += fields.estimated_tool_tokens
            uncached = max(0, fields.estimated_prompt_tokens - cached)
            cost = estimate_cost(replica.load, uncached, output_tokens, now)
            candidates.append(RoutingCandidate(replica.load, uncached, cost))
        affinity_key = fields.session_id or (keys[0].hex() if keys else "")
        draw = random.random()  # noqa: S311 - spreads load, has no security purpose
        chosen = self._policy.select(candidates, affinity_key, draw, now)
        replica = self.replicas[chosen.load.name]
        replica.prefix_index.on_prompt_sent(keys)
        if len(self.replicas) > MAX_COMPARED_REPLICAS:
            self._recent_placements.record_placement(keys, replica.name)
        replica.health.on_dispatched(now)
        return RoutingDecision(
            replica,
            costs=tuple([candidate.cost for candidate in candidates]),
            uncached_tokens=chosen.uncached_tokens,
            prompt_blocks=len(fields.raw_prompt) / BLOCK_BYTES,
            cached_blocks=matches[replica.name],
            block_keys=keys,
        )

    def _selectable_replicas(
        self, block_keys: Sequence[bytes], tier: int, excluded: Collection[str], now: float
    ) -> list[ReplicaEndpoint]:
        """Return the replicas that may get a prompt, if possible only those with a closed circuit breaker.

        In a large pool the result comes from a sample, unless no replica of the sample qualifies.
        """
        eligible, selectable = self.eligible_replicas(), list[ReplicaEndpoint]()
        for group in (self._sample_replicas(eligible, block_keys), eligible):
            selectable = [
                replica
                for replica in group
                if replica.name not in excluded and replica.has_free_slot(tier, now)
            ]
            healthy = [replica for replica in selectable if not replica.health.is_ejected]
            if healthy:
                return healthy
        return selectable

    def _sample_replicas(
        self, eligible: Sequence[ReplicaEndpoint], block_keys: Sequence[bytes]
    ) -> list[ReplicaEndpoint]:
        """Return a random sample of a large pool, and the replica that last got most of the prompt.

        The list is empty if all replicas can be compared.
        """
        if len(eligible) <= MAX_COMPARED_REPLICAS or self.routing_policy in FULL_SCAN_POLICIES:
            return []
        start = random.randrange(len(eligible))  # noqa: S311 - spreads load, has no security purpose
        sample = [
            *eligible[start : start + MAX_COMPARED_REPLICAS],
            *eligible[: max(0, start + MAX_COMPARED_REPLICAS - len(eligible))],
        ]
        recent_name = self._recent_placements.find_replica(block_keys)
        sample += [replica for replica in eligible if replica.name == recent_name]
        return list({replica.name: replica for replica in sample}.values())

    def _on_status_change(self, change: StatusChange) -> None:
        self.status_changes.append(change)
        log.info(
            "replica_status_changed",
            replica=change.replica,
            status=change.status.value,
            previous=change.previous.value,
            reason=change.reason,
        )

    def _log_mixed_arithmetic(self) -> None:
        """Warn if the replicas have several arithmetic identities, once for each set of identities."""
        groups = self.group_by_arithmetic()
        if len(groups) > 1 and groups.keys() != self._logged_arithmetics:
            reports = [group[0].report for group in groups.values()]
            known = [report.arithmetic for report in reports if report and report.arithmetic]
            log.warning(
                "pool_arithmetic_mixed",
                model=self.model,
                replicas={name: [each.name for each in group] for name, group in groups.items()},
                differs=differing_parts(known),
                remedy="start all replicas with the same settings, version and hardware, or serve them as two models",
            )
        self._logged_arithmetics = set(groups)

    def expected_output_tokens(self, fields: RequestFields) -> int:
        """Estimate the output tokens of a request from the mean of completed responses and its own limit."""
        mean = round(self._mean_output_tokens.value)
        return fields.choice_count * (
            mean if fields.max_output_tokens is None else min(mean, fields.max_output_tokens)
        )


def _prefix_salt(cache_domain: str, model: str, raw: Mapping[str, Raw]) -> bytes:
    """Return a salt that differs if equal prompts have different tokens or must not share cache entries."""
    salt = f"{cache_domain}\0{model}".encode()
    for name in sorted(PREFIX_KEY_FIELDS.intersection(raw)):
        salt += b"\0%b\0%b" % (name.encode(), raw[name])
    return salt
