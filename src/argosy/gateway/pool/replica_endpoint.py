"""One replica: what is known of it, and how many requests it may get."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from argosy.gateway.backends import (
    BackendAdapter,
    BackendKind,
    KvEventAddress,
    ResumeMode,
    get_adapter,
)
from argosy.gateway.principal import TIERS
from argosy.gateway.upstream import Upstream
from argosy.policy import (
    AttemptOutcome,
    Backpressure,
    Breaker,
    EstimatedPrefixIndex,
    EwmaRate,
    OutageTracker,
    PrefixCacheIndex,
    ReplicaLoad,
    ReplicaStatus,
    slot_share,
)

TIER_RANKS = range(len(TIERS))
DEFAULT_MAX_CONCURRENCY = 256
MIN_PREFILL_TOKENS = 64
"""The first token of a shorter prompt says nothing of the rate at which prompts are computed."""
PREFILL_HALF_LIFE_TOKENS = 8192.0
DECODE_HALF_LIFE_TOKENS = 256.0
SPEED_MAX_AGE_S = 60.0
"""How fast a replica was says nothing after it had no request of ours for so long: were it slow, it would get none."""


def ignore_capacity_change() -> None:
    """For a replica that nobody waits for."""


def _new_gateway_header() -> tuple[bytes, bytes]:
    """Nobody else's."""
    return b"x-argosy-gateway", secrets.token_hex(8).encode()


@dataclass(slots=True)
class ReplicaEndpoint:
    """One server that answers for a model."""

    name: str
    kind: BackendKind
    upstream_model: str
    """What it calls the model."""
    upstream: Upstream
    breaker: Breaker = field(default_factory=Breaker)
    backpressure: Backpressure = field(default_factory=Backpressure)
    outage: OutageTracker = field(default_factory=OutageTracker)
    load: ReplicaLoad = field(init=False)
    max_concurrency: int | None = None
    """Requests at a time, however many it runs."""
    resume_mode: ResumeMode = "exact"
    stream_usage: bool = True
    """It may be asked for the usage of streams."""
    priority_scheduling: bool = False
    """It computes by what requests say of their urgency."""
    kv_events: KvEventAddress | None = None
    """Where it publishes what it caches; None: it may say so itself."""
    is_accepting: bool = field(init=False)
    """It says that it takes new requests; one that drains does not, nor one whose kind is not known yet."""
    on_capacity_change: Callable[[], None] = ignore_capacity_change
    """Called when there may be room that there was not before."""
    prefix_index: PrefixCacheIndex = field(default_factory=EstimatedPrefixIndex)
    """What it has cached, as it tells itself or as is believed."""
    max_model_len: int | None = None
    """Tokens that a prompt and its answer may have together, once it has told."""
    has_reported_speed: bool = False
    """It measures itself how fast it is, better than can be seen from here."""
    gateway_header: tuple[bytes, bytes] = field(default_factory=_new_gateway_header, init=False)
    """The header by which one of ours knows this gateway's requests, those of this pool, from all others."""
    slot_shares: tuple[int, ...] | None = None
    """Of its seats, those that are this gateway's when the next request is of tier 0, 1, 2; None: all."""
    _last_used_at: float = field(default=0.0, init=False)
    """When something of ours was there last, as far as it was looked."""
    _reported_status: ReplicaStatus = field(default=ReplicaStatus.STARTING, init=False)
    _is_sole_request: bool = field(default=False, init=False)
    """Nothing else has been there since the last request was sent."""
    _prefill_rate: EwmaRate = field(
        default_factory=lambda: EwmaRate(PREFILL_HALF_LIFE_TOKENS), init=False
    )
    _decode_rate: EwmaRate = field(
        default_factory=lambda: EwmaRate(DECODE_HALF_LIFE_TOKENS), init=False
    )

    @property
    def slots(self) -> int:
        """Requests that it gets at a time."""
        told = self.load.max_seqs
        return (
            told or DEFAULT_MAX_CONCURRENCY
            if self.max_concurrency is None
            else min(self.max_concurrency, told or self.max_concurrency)
        )

    def slot_share(self, tier: int, now: float) -> int:
        """Those of them that are this gateway's when its next request is of this tier; none while it is left alone."""
        ours = self.slots if self.slot_shares is None else self.slot_shares[tier]
        most = min(ours, self.backpressure.concurrency_limit(now))
        if self.outage.is_down:
            most = min(most, self.load.in_flight + self.outage.probe_budget(now))
        return int(most)

    def has_free_slot(self, tier: int, now: float) -> bool:
        """Whether one more request of this tier may go there, and would not have to wait there (or hardly)."""
        return self.load.in_flight < self.slot_share(tier, now)

    @property
    def adapter(self) -> BackendAdapter:
        """How it is spoken to."""
        return get_adapter(
            self.kind, self.resume_mode, usage=self.stream_usage, urgency=self.priority_scheduling
        )

    def __post_init__(self) -> None:
        self.load = ReplicaLoad(self.name)
        self.is_accepting = self.kind != "auto"

    def on_reported_state(self, state: str, now: float) -> None:
        """It said how it is, in the words of ours (see `Load`)."""
        self._reported_status = ReplicaStatus.from_report(state)
        self.is_accepting = self._reported_status is ReplicaStatus.READY
        if self.is_accepting:
            self.outage.mark_up()
        elif self._reported_status is ReplicaStatus.STARTING:
            self.outage.mark_starting(now)
        else:
            self.outage.mark_down(now)

    def status(self, now: float) -> ReplicaStatus:
        """Return the replica's status for metrics and the API."""
        if not self.breaker.is_closed:
            return ReplicaStatus.EJECTED
        if self.outage.is_down and self._reported_status is ReplicaStatus.READY:
            return ReplicaStatus.UNREACHABLE
        if not self.is_accepting:
            return self._reported_status
        is_full = self.backpressure.is_backing_off(now)
        return ReplicaStatus.BACKOFF if is_full else ReplicaStatus.READY

    def on_response_started(self) -> None:
        """It has begun to answer a request, or said that it would."""
        if self.outage.is_down and self.is_accepting:
            self.outage.mark_up()
            self.on_capacity_change()

    def on_unreachable(self, now: float) -> None:
        """It could not be reached, or was not well: once means nothing, unless it never was."""
        if not (self.breaker.is_closed and self.outage.was_ever_up):
            self.outage.mark_down(now)

    def on_request_sent(self, uncached_tokens: int) -> None:
        """A request goes there; it probably has so many prompt tokens that are not cached."""
        self.load.in_flight += 1
        self.load.sent_tokens += uncached_tokens
        self._is_sole_request = self.load.in_flight == 1

    def on_first_token(self, latency_s: float, uncached_tokens: int, now: float) -> None:
        """The answer to a prompt with so many uncached tokens began `seconds` after it was sent."""
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
        """The so many tokens of a prompt that was sent then are computed by now, or never will be."""
        if self.load.reported_at < sent_at:  # else the report has said what is left of them
            self.load.sent_tokens = max(0, self.load.sent_tokens - uncached_tokens)

    def update_slot_shares(self, other_gateways: Sequence[Mapping[int, int]]) -> None:
        """Other gateways have so many requests there, by tier."""
        load, most = self.load, self.slots
        if not other_gateways:
            load.oversubscribed, self.slot_shares = 0, None
            return
        there = load.in_flight + sum(sum(other.values()) for other in other_gateways)
        load.oversubscribed = max(0, there - (load.max_seqs or most))
        self.slot_shares = tuple(
            [min(most, slot_share(load.max_seqs or most, other_gateways, t)) for t in TIER_RANKS]
        )

    def on_tokens_streamed(self, tokens: int, duration_s: float) -> None:
        """So many tokens of one sequence, after its first, came in so long; none, too."""
        if duration_s > 0 and not self.has_reported_speed:
            self._decode_rate.add(tokens, duration_s)
            if self._decode_rate.units_per_s > 0:
                self.load.inter_token_s = 1.0 / self._decode_rate.units_per_s

    def expire_speed(self, now: float) -> None:
        """To be called now and then: one that was slow once is tried again."""
        if self.load.in_flight:
            self._last_used_at = now
        elif now - self._last_used_at > SPEED_MAX_AGE_S:
            self._last_used_at = now
            self.reset_speed()

    def reset_speed(self) -> None:
        """Where it counts as slow nobody measures it again; what stood still while it failed made it that, too."""
        if not self.has_reported_speed:
            unknown = ReplicaLoad(self.name)
            self._prefill_rate, self._decode_rate = (
                EwmaRate(PREFILL_HALF_LIFE_TOKENS),
                EwmaRate(DECODE_HALF_LIFE_TOKENS),
            )
            self.load.prefill_tokens_per_s, self.load.inter_token_s = (
                unknown.prefill_tokens_per_s,
                unknown.inter_token_s,
            )

    def on_request_ended(
        self, outcome: AttemptOutcome | None, now: float, retry_after_s: float | None = None
    ) -> None:
        """It is over; None: for a reason that says nothing about the replica."""
        self.load.in_flight -= 1
        if not self.load.in_flight:
            self.load.sent_tokens = 0
        if outcome is AttemptOutcome.BACKPRESSURE:
            self.backpressure.on_rejected(self.load.in_flight, now, retry_after_s)
        elif outcome is AttemptOutcome.SUCCESS:
            self.backpressure.on_accepted()
        if outcome is not None:
            self.breaker.record_outcome(outcome, now)
            if not self.breaker.is_closed:
                self.prefix_index.clear()  # if it was started anew, its cache is gone
        self.on_capacity_change()
