"""State of one replica: connections, load, health, measured speed, and the number of requests that it may get."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from argosy.gateway.backends import (
    BackendAdapter,
    BackendKind,
    KvEventAddress,
    ResumeMode,
    get_adapter,
)
from argosy.gateway.pool.admin_settings import DEFAULT_ADMIN, AdminSettings
from argosy.gateway.pool.status_events import StatusEvent, new_status_events
from argosy.gateway.principal import TIERS
from argosy.gateway.upstream import Upstream
from argosy.policy import (
    AdminState,
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
    breaker: Breaker = field(default_factory=Breaker)
    backpressure: Backpressure = field(default_factory=Backpressure)
    outage: OutageTracker = field(default_factory=OutageTracker)
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
    is_accepting: bool = field(init=False)
    """Whether the replica accepts new requests. False while it drains and while its kind is unknown."""
    last_failure: str = ""
    """Reason of its last failed probe or request."""
    needs_undrain: bool = False
    """Whether the replica was asked to drain and has to be asked to accept requests again."""
    status_events: deque[StatusEvent] = field(default_factory=new_status_events)
    """Where changes of its status are recorded."""
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
    _reported_status: ReplicaStatus = field(default=ReplicaStatus.STARTING, init=False)
    _observed_status: ReplicaStatus = field(default=ReplicaStatus.STARTING, init=False)
    """Status at the last call of `observe_status`."""
    _status_since: float = field(default=0.0, init=False)
    _taken_out_at: float = field(default=0.0, init=False)
    """Time at which an operator took the replica out of service."""
    _moves_at: float = field(default=0.0, init=False)
    """Time from which the streams of a draining replica move."""
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
        limit = min(share, self.backpressure.concurrency_limit(now))
        if self.outage.is_down:
            limit = min(limit, self.load.in_flight + self.outage.probe_budget(now))
        return int(limit)

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

    def __post_init__(self) -> None:
        self.load = ReplicaLoad(self.name, weight=self.initial_admin.weight)
        self.admin = self.initial_admin
        self.is_accepting = self.kind != "auto"

    @property
    def is_schedulable(self) -> bool:
        """Whether the replica may get new requests, by its own report and by the operators' decision."""
        return self.is_accepting and self.admin.state is AdminState.ACTIVE

    @property
    def grace_ends_at(self) -> float:
        """Time until which requests wait for the replica; infinite while it is up and in service."""
        outage = self.outage
        if self.admin.state is AdminState.ACTIVE:
            return outage.grace_ends_at
        return min(outage.grace_ends_at, self._taken_out_at + outage.grace_s)

    def apply_setting(self, setting: ReplicaSetting | None, now: float, wall_now: float) -> None:
        """Apply an operator's decision, or the settings file alone if there is none.

        Args:
            setting: The decision.
            now: Monotonic time.
            wall_now: Seconds since the epoch, the clock of the decision.
        """
        if setting == self.admin.setting:
            return
        previous, self.admin = self.admin, self.initial_admin.with_setting(setting)
        self.load.weight = self.admin.weight
        if previous.state is AdminState.ACTIVE:
            self._taken_out_at = now
        is_new = setting is not None and wall_now - setting.changed_at < UNDRAIN_WINDOW_S
        self.needs_undrain = self.admin.state is not AdminState.DRAINING and (
            previous.state is AdminState.DRAINING or is_new or self.needs_undrain
        )
        self._moves_at = now + self.admin.move_after_s(wall_now)
        self.observe_status(now)
        self.on_capacity_change()

    def must_move_streams(self, now: float) -> bool:
        """Whether running streams should move to other replicas, because an operator or the replica itself drains."""
        if self.admin.state is AdminState.DRAINING:
            return now >= self._moves_at
        return self._reported_status is ReplicaStatus.DRAINING

    def has_arithmetic(self, arithmetic_id: str) -> bool:
        """Whether the replica may continue output of this arithmetic identity.

        A native replica whose identity is not known yet may; it refuses by itself if it cannot.
        """
        return (
            not arithmetic_id
            or arithmetic_id == self.arithmetic_id
            or (not self.arithmetic_id and self.kind in {"argosy", "auto"})
        )

    def on_load_report(self, report: LoadResponse) -> None:
        """Store the load report of a native replica.

        With another arithmetic identity another process runs at the address, so its cache and its speed are unknown.
        """
        previous, self.report = self.arithmetic_id, report
        if not report.arithmetic_id or report.arithmetic_id == previous:
            return
        self.arithmetic_id = report.arithmetic_id
        if previous:
            self.prefix_index.clear()
            self.reset_speed()
        self.on_arithmetic_change()

    def on_reported_state(self, state: str, now: float) -> None:
        """Apply a state that the replica reported, with the values of `LoadResponse.state`."""
        self._reported_status = ReplicaStatus.from_report(state)
        self.is_accepting = self._reported_status is ReplicaStatus.READY
        if self.is_accepting:
            self.outage.mark_up()
        elif self._reported_status is ReplicaStatus.STARTING:
            self.outage.mark_starting(now)
        else:
            self.outage.mark_down(now)
        self.observe_status(now)

    def observe_status(self, now: float) -> float:
        """Record a change of the status since the last call, and return since when the replica has its status.

        Call it after whatever may have changed the status, and before showing it.
        """
        status = self.status(now)
        if status is not self._observed_status:
            previous, self._observed_status, self._status_since = self._observed_status, status, now
            reason = self.status_reason(now)
            self.status_events.append(StatusEvent(now, self.name, previous, status, reason))
            log.info(
                "replica_status_changed",
                replica=self.name,
                status=status.value,
                previous=previous.value,
                reason=reason,
            )
        return self._status_since

    def status_reason(self, now: float) -> str:
        """Return why the replica has its status; empty if it is ready."""
        report = self.report
        match self.status(now):
            case ReplicaStatus.READY:
                return ""
            case ReplicaStatus.BACKOFF:
                return self.last_failure or "it refused a request as full"
            case ReplicaStatus.EJECTED:
                return f"its requests or probes failed: {self.last_failure}"
            case ReplicaStatus.CORDONED:
                return f"cordoned {self.admin.description}"
            case ReplicaStatus.DRAINING if self.admin.state is AdminState.DRAINING:
                return f"drained {self.admin.description}"
            case ReplicaStatus.DRAINING:
                return "it reports that it drains"
            case ReplicaStatus.STARTING if report is not None and report.startup is not None:
                return f"{report.startup.activity}, {report.startup.fraction:.0%}"
            case ReplicaStatus.STARTING:
                return self.last_failure or "it has not reported that it is ready"
            case _ if self.outage.is_down and self.last_failure:
                return self.last_failure
        return "its engine failed" if report is not None else "it does not serve the model"

    def status(self, now: float) -> ReplicaStatus:
        """Return the status of the replica for metrics and the API."""
        if not self.breaker.is_closed:
            return ReplicaStatus.EJECTED
        if self.outage.is_down and self._reported_status is ReplicaStatus.READY:
            return ReplicaStatus.UNREACHABLE
        if not self.is_accepting:
            return self._reported_status
        if self.admin.state is not AdminState.ACTIVE:
            return ReplicaStatus(self.admin.state)
        is_full = self.backpressure.is_backing_off(now)
        return ReplicaStatus.BACKOFF if is_full else ReplicaStatus.READY

    def on_response_started(self, now: float) -> None:
        """Record that the replica started a response, which ends an outage."""
        if self.outage.is_down and self.is_accepting:
            self.outage.mark_up()
            self.on_capacity_change()
            self.observe_status(now)

    def on_unreachable(self, now: float) -> None:
        """Record that the replica could not be reached or failed its health check.

        While its circuit breaker is closed the failure is ignored, unless the replica has never been up.
        """
        if not (self.breaker.is_closed and self.outage.was_ever_up):
            self.outage.mark_down(now)
        self.observe_status(now)

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
        if outcome in {AttemptOutcome.BACKPRESSURE, AttemptOutcome.FAILURE}:
            self.last_failure = reason
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
                self.prefix_index.clear()  # the replica may have restarted with an empty cache
        self.observe_status(now)
        self.on_capacity_change()
