"""State of one replica as placement sees it: load, health, measured speed, and the number of requests it may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from argosy.policy.breaker import AttemptOutcome
from argosy.policy.concurrency_slots import slot_share
from argosy.policy.fair_queue import BATCH_TIER
from argosy.policy.prefix_cache_index import EstimatedPrefixIndex, PrefixCacheIndex
from argosy.policy.replica_health import ReplicaHealth
from argosy.policy.routing import ReplicaLoad
from argosy.policy.smoothing import EwmaRate
from argosy.protocol import adapter_digest_prefix

TIER_RANKS = range(BATCH_TIER + 1)
DEFAULT_MAX_CONCURRENCY = 256
MIN_PREFILL_TOKENS = 64
"""Minimum prompt length for a measurement of the prefill rate. Shorter prompts give no useful rate."""
PREFILL_HALF_LIFE_TOKENS = 8192.0
DECODE_HALF_LIFE_TOKENS = 256.0
SPEED_MAX_AGE_S = 60.0
"""Time without requests after which measured rates are reset. A slow replica gets no requests to correct them."""


@dataclass(slots=True, eq=False)
class PlacementReplica:
    """Replica of a pool, without its connections."""

    name: str
    health: ReplicaHealth = field(init=False)
    load: ReplicaLoad = field(init=False)
    max_concurrency: int | None = field(default=None, kw_only=True)
    """Configured limit on concurrent requests; None for the limit that the replica reports."""
    prefix_index: PrefixCacheIndex = field(default_factory=EstimatedPrefixIndex, kw_only=True)
    """Index of its prefix cache, from KV events or estimated from the prompts sent to it."""
    arithmetic_id: str = field(default="", kw_only=True)
    """Id of its arithmetic identity, reported or configured; empty if it is unknown."""
    has_reported_speed: bool = field(default=False, kw_only=True)
    """Whether the replica reports its own rates, which are more exact than the gateway's measurements."""
    is_exact: bool = field(default=True, kw_only=True)
    """Whether the replica reports that its results do not depend on other requests, bit for bit."""
    slot_shares: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Slots that this gateway may use if its next request has tier 0, 1, 2 or 3; None if it may use all."""
    adapters: dict[str, int] = field(default_factory=dict, init=False)
    """Sizes in bytes of the adapters that it has or was sent requests for since the report, by digest or its prefix."""
    adapter_bytes_per_s: float = field(default=0.0, init=False)
    """Reported rate of loading adapters; 0 if it is unknown."""
    _last_used_at: float = field(default=0.0, init=False)
    """Time at which `expire_speed` last saw a running request or reset the rates."""
    _is_sole_request: bool = field(default=False, init=False)
    """Whether the last request was sent while no other request was running."""
    _prefill_rate: EwmaRate = field(
        default_factory=lambda: EwmaRate(PREFILL_HALF_LIFE_TOKENS), init=False
    )
    _decode_rate: EwmaRate = field(
        default_factory=lambda: EwmaRate(DECODE_HALF_LIFE_TOKENS), init=False
    )

    def __post_init__(self) -> None:
        self.health = ReplicaHealth(self.name)
        self.load = ReplicaLoad(self.name)

    @property
    def is_native(self) -> bool:
        """Whether the replica runs Argosy's own server, which can resume any stream from its token ids."""
        return True

    @property
    def may_be_native(self) -> bool:
        """Whether the replica is native, or may turn out to be."""
        return self.is_native

    @property
    def resumes_exactly(self) -> bool:
        """Whether a stream of this replica can move to another one of its arithmetic without losing a token."""
        return self.is_native and self.is_exact and bool(self.arithmetic_id)

    def has_adapter(self, digest: str) -> bool:
        """Whether the replica has an adapter loaded, or loads it for another request."""
        return digest in self.adapters or adapter_digest_prefix(digest) in self.adapters

    def adapter_size(self, digest: str) -> int:
        """Return the reported size of an adapter in bytes; 0 if it is unknown."""
        return self.adapters.get(adapter_digest_prefix(digest), 0)

    # --- room for requests -----------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Concurrency slots: the maximum number of running requests, configured or reported."""
        max_seqs = self.load.max_seqs
        return (
            max_seqs or DEFAULT_MAX_CONCURRENCY
            if self.max_concurrency is None
            else min(self.max_concurrency, max_seqs or self.max_concurrency)
        )

    def slot_share(self, tier: int, now: float) -> int:
        """Return the slots that this gateway may use if its next request has this tier.

        Backpressure and an outage reduce the number. During a backoff it is 0.
        """
        share = self.slots if self.slot_shares is None else self.slot_shares[tier]
        return self.health.request_limit(share, self.load.slots_in_use, now)

    def has_free_slot(self, tier: int, now: float) -> bool:
        """Whether the replica has a free slot for this tier, so that a request starts there with little or no wait."""
        return self.load.slots_in_use < self.slot_share(tier, now)

    def count_slots_for(self, sequence_count: int, tier: int, now: float) -> int:
        """Return the slots that a request with this many sequences takes if it is sent now.

        It starts as soon as one slot is free, and takes no more than the replica has. A native replica runs as many
        sequences as it has room for, and the others later, so that there it takes only what is free.
        """
        slots = min(sequence_count, self.slots)
        if self.is_native:
            slots = min(slots, self.slot_share(tier, now) - self.load.slots_in_use)
        return max(1, slots)

    def has_arithmetic(self, arithmetic_id: str) -> bool:
        """Whether the replica may continue output of this arithmetic identity.

        A native replica whose identity is not known yet may; it refuses by itself if it cannot.
        """
        return (
            not arithmetic_id
            or arithmetic_id == self.arithmetic_id
            or (not self.arithmetic_id and self.may_be_native)
        )

    def update_slot_shares(self, other_gateways: Sequence[Mapping[int, int]]) -> None:
        """Compute the slot shares from the requests that other gateways run at the replica, each by tier."""
        load, slots = self.load, self.slots
        if not other_gateways:
            load.oversubscribed, self.slot_shares = 0, None
            return
        running = load.slots_in_use + sum(sum(other.values()) for other in other_gateways)
        load.oversubscribed = max(0, running - (load.max_seqs or slots))
        self.slot_shares = tuple(
            [
                min(slots, slot_share(load.max_seqs or slots, other_gateways, tier))
                for tier in TIER_RANKS
            ]
        )

    # --- attempts --------------------------------------------------------------------------------

    def on_request_sent(self, uncached_tokens: int, slots: int = 1) -> None:
        """Record a request sent to the replica, with its estimated uncached prompt tokens and the slots it takes."""
        self.load.in_flight += 1
        self.load.extra_slots += slots - 1
        self.load.sent_tokens += uncached_tokens
        self._is_sole_request = self.load.in_flight == 1

    def on_first_token(self, latency_s: float, uncached_tokens: int, now: float) -> None:
        """Record a first token, `latency_s` after a prompt with `uncached_tokens` was sent."""
        load = self.load
        load.ttft.add(latency_s, now)
        if (
            self._is_sole_request
            and uncached_tokens >= MIN_PREFILL_TOKENS
            and not self.has_reported_speed
        ):
            self._prefill_rate.add(uncached_tokens, latency_s)
            load.prefill_tokens_per_s = self._prefill_rate.units_per_s or load.prefill_tokens_per_s

    def on_prefill_done(self, uncached_tokens: int, sent_at: float) -> None:
        """Record that the prompt sent at `sent_at` was computed or cancelled, which ends its wait in the queue."""
        if self.load.reported_at < sent_at:  # a later report already covers these tokens
            self.load.sent_tokens = max(0, self.load.sent_tokens - uncached_tokens)

    def on_tokens_streamed(self, tokens: int, duration_s: float) -> None:
        """Record that a sequence got `tokens` more tokens (may be 0) within `duration_s` after its first token."""
        if duration_s > 0 and not self.has_reported_speed:
            self._decode_rate.add(tokens, duration_s)
            if self._decode_rate.units_per_s > 0:
                self.load.inter_token_s = 1.0 / self._decode_rate.units_per_s

    def expire_speed(self, now: float) -> None:
        """Reset the measured rates if the replica was unused for long, so that a slow one is tried again.

        Call it periodically.
        """
        if self.load.in_flight:
            self._last_used_at = now
        elif now - self._last_used_at > SPEED_MAX_AGE_S:
            self._last_used_at = now
            self.reset_speed()

    def reset_speed(self) -> None:
        """Reset the measured prefill and decode rates.

        A replica that looks slow receives no traffic, so its estimate would never recover. Stalls during an outage
        skew the estimate too.
        """
        if not self.has_reported_speed:
            initial = ReplicaLoad(self.name)
            self._prefill_rate, self._decode_rate = (
                EwmaRate(PREFILL_HALF_LIFE_TOKENS),
                EwmaRate(DECODE_HALF_LIFE_TOKENS),
            )
            self.load.prefill_tokens_per_s, self.load.inter_token_s = (
                initial.prefill_tokens_per_s,
                initial.inter_token_s,
            )

    def on_request_ended(
        self,
        outcome: AttemptOutcome | None,
        now: float,
        retry_after_s: float | None = None,
        reason: str = "",
        *,
        slots: int = 1,
    ) -> None:
        """Record the end of a request.

        Args:
            outcome: Class of the end; None if it says nothing about the replica.
            now: Monotonic time.
            retry_after_s: The replica's Retry-After.
            reason: Why the request failed.
            slots: Slots that it took.
        """
        load = self.load
        load.in_flight -= 1
        load.extra_slots -= slots - 1
        if not load.in_flight:
            load.sent_tokens = 0
        self.health.on_attempt_ended(
            outcome,
            load.slots_in_use,
            now,
            retry_after_s=retry_after_s,
            reason=reason,
        )
        if outcome is not None and self.health.is_ejected:
            self.prefix_index.clear()  # the replica may have restarted with an empty cache
