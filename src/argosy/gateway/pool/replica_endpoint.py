"""State of one replica: connections, load, health, measured speed, and the number of requests that it may get."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import structlog

from argosy.gateway.backends import (
    BackendAdapter,
    BackendKind,
    KvEventAddress,
    LoadReport,
    ResumeMode,
    get_adapter,
)
from argosy.gateway.pool.admin_settings import DEFAULT_ADMIN, AdminSettings
from argosy.gateway.principal import TIERS
from argosy.gateway.upstream import Upstream
from argosy.policy import (
    BLOCK_TOKENS,
    AttemptOutcome,
    EstimatedPrefixIndex,
    EwmaRate,
    PrefixCacheIndex,
    ReplicaHealth,
    ReplicaLoad,
    slot_share,
)
from argosy.protocol import LoadResponse
from argosy.store import ReplicaSetting

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

TIER_RANKS = range(len(TIERS))
DEFAULT_MAX_CONCURRENCY = 256
MIN_PREFILL_TOKENS = 64
"""Minimum prompt length for a measurement of the prefill rate. Shorter prompts give no useful rate."""
PREFILL_HALF_LIFE_TOKENS = 8192.0
DECODE_HALF_LIFE_TOKENS = 256.0
SPEED_MAX_AGE_S = 60.0
"""Time without requests after which measured rates are reset. A slow replica gets no requests to correct them."""
TOKENS_PER_WAITING_REQUEST = 512
"""Assumed prompt tokens per queued request at servers of other backends, which do not report prompt lengths."""
UNDRAIN_WINDOW_S = 60.0
"""Age up to which an operator's decision also ends a drain that began before this gateway knew of it."""


def ignore_change() -> None:
    """Default of the callbacks of a `ReplicaEndpoint`, for a replica without a pool."""


def _new_gateway_header() -> tuple[bytes, bytes]:
    """Return a random header that identifies one gateway at one replica."""
    return b"x-argosy-gateway", secrets.token_hex(8).encode()


@dataclass(slots=True)
class ReplicaEndpoint:
    """Endpoint of one replica of a model, with its state. Not thread-safe: use it from one event loop."""

    name: str
    kind: BackendKind
    upstream_model: str
    """Name of the model at the replica."""
    upstream: Upstream
    grace_s: InitVar[float] = 30.0
    """How long requests wait for the replica after it went down."""
    health: ReplicaHealth = field(init=False)
    load: ReplicaLoad = field(init=False)
    max_concurrency: int | None = None
    """Configured limit on concurrent requests; None for the limit that the replica reports."""
    resume_mode: ResumeMode = "exact"
    """Best allowed way to resume a stream of this replica."""
    stream_usage: bool = True
    """Whether requests may ask for the usage of streams."""
    priority_scheduling: bool = False
    """Whether the replica schedules by the `priority` of requests."""
    kv_events: KvEventAddress | None = None
    """Configured address of its KV events; None if the replica reports the address, or publishes none."""
    initial_admin: AdminSettings = DEFAULT_ADMIN
    """State and weight in the settings file."""
    admin: AdminSettings = field(init=False)
    """State and weight, as the settings file or an operator decided."""
    on_capacity_change: Callable[[], None] = ignore_change
    """Callback for an increase in free slots."""
    on_arithmetic_change: Callable[[], None] = ignore_change
    """Callback for a new `arithmetic_id`."""
    prefix_index: PrefixCacheIndex = field(default_factory=EstimatedPrefixIndex)
    """Index of its prefix cache, from KV events or estimated from the prompts sent to it."""
    max_model_len: int | None = None
    """Context length in tokens (prompt and output); None until the replica reports it."""
    arithmetic_id: str = ""
    """Id of its arithmetic identity, reported or configured; empty if it is unknown."""
    report: LoadResponse | None = None
    """Latest load report of a native replica."""
    has_reported_speed: bool = False
    """Whether the replica reports its own rates, which are more exact than the gateway's measurements."""
    is_exact: bool = True
    """Whether the replica reports that its results do not depend on other requests, bit for bit."""
    gateway_header: tuple[bytes, bytes] = field(default_factory=_new_gateway_header, init=False)
    """Header by which a native replica distinguishes the requests of this gateway's pool from all others."""
    slot_shares: tuple[int, ...] | None = None
    """Slots that this gateway may use if its next request has tier 0, 1 or 2; None if it may use all."""
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
        return self.health.request_limit(share, self.load.in_flight, now)

    def has_free_slot(self, tier: int, now: float) -> bool:
        """Whether the replica has a free slot for this tier, so that a request starts there with little or no wait."""
        return self.load.in_flight < self.slot_share(tier, now)

    @property
    def adapter(self) -> BackendAdapter:
        """Adapter of the replica's backend, restricted by its configuration."""
        return get_adapter(
            self.kind,
            self.resume_mode if self.is_exact else "none",
            stream_usage=self.stream_usage,
            priority_scheduling=self.priority_scheduling,
        )

    def __post_init__(self, grace_s: float) -> None:
        self.load = ReplicaLoad(self.name, weight=self.initial_admin.weight)
        self.admin = self.initial_admin
        self.health = ReplicaHealth(
            self.name,
            assume_ready=self.kind != "auto",
            grace_s=grace_s,
            admin_state=self.admin.state,
        )

    def apply_setting(self, setting: ReplicaSetting | None, now: float, wall_now: float) -> None:
        """Apply an operator's decision, or the settings file alone if there is none.

        Args:
            setting: The decision.
            now: Monotonic time.
            wall_now: Seconds since the epoch, the clock of the decision.
        """
        if setting == self.admin.setting:
            return
        self.admin = self.initial_admin.with_setting(setting)
        self.load.weight = self.admin.weight
        self.health.on_admin_decision(
            self.admin.state,
            now,
            reason=self.admin.description,
            moves_at=now + self.admin.move_after_s(wall_now),
            is_recent=setting is not None and wall_now - setting.changed_at < UNDRAIN_WINDOW_S,
        )
        self.on_capacity_change()

    def has_arithmetic(self, arithmetic_id: str) -> bool:
        """Whether the replica may continue output of this arithmetic identity.

        A native replica whose identity is not known yet may; it refuses by itself if it cannot.
        """
        return (
            not arithmetic_id
            or arithmetic_id == self.arithmetic_id
            or (not self.arithmetic_id and self.kind in {"argosy", "auto"})
        )

    @property
    def is_native(self) -> bool:
        """Whether the server is an Argosy replica."""
        return self.kind == "argosy"

    def on_native_load(self, report: LoadResponse, now: float) -> None:
        """Apply the load report of a native replica.

        With another arithmetic identity, or fewer steps than before, another process runs at the address, so its cache
        is empty.
        """
        previous, self.report = self.report, report
        is_new_arithmetic = report.arithmetic_id not in {"", self.arithmetic_id}
        is_other_arithmetic = is_new_arithmetic and bool(self.arithmetic_id)
        if is_other_arithmetic or (previous is not None and report.step < previous.step):
            self.prefix_index.clear()
        if is_other_arithmetic:
            self.reset_speed()
        if is_new_arithmetic:
            self.arithmetic_id = report.arithmetic_id
            self.on_arithmetic_change()
        if self.is_exact and not report.exact:
            log.warning("replica_not_exact", replica=self.name)
        self.is_exact, self.max_model_len = report.exact, report.max_model_len or None
        self.has_reported_speed = report.prefill_tokens_per_s > 0
        kv_tokens = report.kv_capacity_tokens or report.kv_blocks_total * report.block_size
        self.prefix_index.resize(kv_tokens // BLOCK_TOKENS)
        load = self.load
        load.running, load.waiting = report.running, report.waiting
        load.queued_tokens, load.max_seqs = report.queued_tokens, report.max_seqs
        load.kv_usage_ratio = report.kv_blocks_used / max(1, report.kv_blocks_total)
        load.prefill_tokens_per_s = report.prefill_tokens_per_s or load.prefill_tokens_per_s
        load.inter_token_s = report.decode_s or load.inter_token_s
        load.reported_at, load.sent_tokens = now, 0
        self.update_slot_shares(report.other_gateways)
        self.on_capacity_change()

    def on_load_report(self, report: LoadReport, now: float) -> None:
        """Apply the load report of another backend than Argosy. Values that it lacks stay unchanged."""
        load = self.load
        load.running = load.running if report.running is None else report.running
        load.waiting = load.waiting if report.waiting is None else report.waiting
        load.kv_usage_ratio = load.kv_usage_ratio if report.kv_used is None else report.kv_used
        load.max_seqs = load.max_seqs if report.capacity is None else report.capacity
        if report.kv_capacity_tokens is not None:
            self.prefix_index.resize(report.kv_capacity_tokens // BLOCK_TOKENS)
        load.queued_tokens = load.waiting * TOKENS_PER_WAITING_REQUEST
        load.reported_at, load.sent_tokens = now, 0
        self.on_capacity_change()

    def on_response_started(self, now: float) -> None:
        """Record that the replica started a response, which ends an outage."""
        if self.health.on_response_started(now):
            self.on_capacity_change()

    def on_request_sent(self, uncached_tokens: int) -> None:
        """Record a request sent to the replica, with the estimated number of its uncached prompt tokens."""
        self.load.in_flight += 1
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

    def update_slot_shares(self, other_gateways: Sequence[Mapping[int, int]]) -> None:
        """Compute the slot shares from the requests that other gateways run at the replica, each by tier."""
        load, slots = self.load, self.slots
        if not other_gateways:
            load.oversubscribed, self.slot_shares = 0, None
            return
        running = load.in_flight + sum(sum(other.values()) for other in other_gateways)
        load.oversubscribed = max(0, running - (load.max_seqs or slots))
        self.slot_shares = tuple(
            [
                min(slots, slot_share(load.max_seqs or slots, other_gateways, tier))
                for tier in TIER_RANKS
            ]
        )

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
    ) -> None:
        """Record the end of a request.

        Args:
            outcome: Class of the end; None if it says nothing about the replica.
            now: Monotonic time.
            retry_after_s: The replica's Retry-After.
            reason: Why the request failed.
        """
        self.load.in_flight -= 1
        if not self.load.in_flight:
            self.load.sent_tokens = 0
        self.health.on_attempt_ended(
            outcome, self.load.in_flight, now, retry_after_s=retry_after_s, reason=reason
        )
        if outcome is not None and self.health.is_ejected:
            self.prefix_index.clear()  # the replica may have restarted with an empty cache
        self.on_capacity_change()
