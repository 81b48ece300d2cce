"""State of one replica: connections, load, health, measured speed, and the number of requests that it may get."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

import structlog

from argosy.deployment import BackendKind, KvEventAddress, ResumeMode
from argosy.gateway.backends import BackendAdapter, LoadReport, get_adapter
from argosy.gateway.upstream import Upstream
from argosy.model_store import DIGEST_PREFIX
from argosy.policy import (
    BLOCK_TOKENS,
    AdminState,
    ReplicaHealth,
    ReplicaLoad,
)
from argosy.policy.placement import PlacementReplica
from argosy.protocol import LoadResponse
from argosy.store import ReplicaSetting

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")
TOKENS_PER_WAITING_REQUEST = 512
"""Assumed prompt tokens per queued request at servers of other backends, which do not report prompt lengths."""
FULL_KV_USAGE_RATIO = 0.95
UNDRAIN_WINDOW_S = 60.0
"""Age up to which an operator's decision also ends a drain that began before this gateway knew of it."""


class AdminSettings(NamedTuple):
    """Effective decisions about one replica."""

    state: AdminState = AdminState.ACTIVE
    weight: float = 1.0
    setting: ReplicaSetting | None = None
    """Latest decision of an operator; None if only the settings file applies."""

    def with_setting(self, setting: ReplicaSetting | None) -> AdminSettings:
        """Return the settings file's values with those of an operator's decision in their place."""
        if setting is None:
            return self
        return AdminSettings(
            self.state if setting.state is None else AdminState(setting.state),
            self.weight if setting.weight is None else setting.weight,
            setting,
        )

    @property
    def description(self) -> str:
        """Name of the operator who decided, with the reason."""
        if self.setting is None:
            return "by the settings file"
        reason = f": {self.setting.reason}" if self.setting.reason else ""
        return f"by {self.setting.changed_by}{reason}"

    def move_after_s(self, wall_now: float) -> float:
        """Return the seconds until streams of a draining replica move, at a time in seconds since the epoch."""
        setting = self.setting
        return 0.0 if setting is None else setting.changed_at + setting.grace_s - wall_now


DEFAULT_ADMIN = AdminSettings()
"""Replica in service with the same share as others."""


def ignore_change() -> None:
    """Default of the callbacks of a `ReplicaEndpoint`, for a replica without a pool."""


def _new_gateway_header() -> tuple[bytes, bytes]:
    """Return a random header that identifies one gateway at one replica."""
    return b"x-argosy-gateway", secrets.token_hex(8).encode()


@dataclass(slots=True, eq=False)
class ReplicaEndpoint(PlacementReplica):
    """A replica with its connections and its reports. Not thread-safe: use it from one event loop."""

    kind: BackendKind
    upstream_model: str
    """Name of the model at the replica."""
    upstream: Upstream
    grace_s: InitVar[float] = 30.0
    """How long requests wait for the replica after it went down."""
    resume_mode: ResumeMode = "exact"
    """Best allowed way to resume a stream of this replica."""
    stream_usage: bool = True
    """Whether requests may ask for the usage of streams."""
    priority_scheduling: bool = False
    """Whether the replica schedules by the `priority` of requests."""
    kv_events: KvEventAddress | None = None
    """Configured address of its KV events; None if the replica reports the address, or publishes none."""
    adapter_root: str = ""
    """Folder of the server's machine with adapters, by the digits of their digests; empty if unknown."""
    initial_admin: AdminSettings = DEFAULT_ADMIN
    """State and weight in the settings file."""
    admin: AdminSettings = field(init=False)
    """State and weight, as the settings file or an operator decided."""
    on_capacity_change: Callable[[], None] = ignore_change
    """Called after a change that is no part of an attempt and may give the replica more room."""
    on_arithmetic_change: Callable[[], None] = ignore_change
    """Callback for a new `arithmetic_id`."""
    max_model_len: int | None = None
    """Context length in tokens (prompt and output); None until the replica reports it."""
    tasks: frozenset[str] | None = None
    """Tasks of the model, like `generate` or `embed`; None if the replica does not report them."""
    report: LoadResponse | None = None
    """Latest load report of a native replica."""
    cache_resets: int = field(default=0, init=False)
    """How often another process was found at the address of a native replica, so that its cache was empty."""
    adapter_loads: dict[str, asyncio.Task[str]] = field(default_factory=dict, init=False)
    """Load calls for adapters at a server of another engine, by digest, those used last at the end. They return why
    they failed."""
    gateway_header: tuple[bytes, bytes] = field(default_factory=_new_gateway_header, init=False)
    """Header by which a native replica distinguishes the requests of this gateway's pool from all others."""

    def __post_init__(self, grace_s: float) -> None:
        self.load = ReplicaLoad(self.name, weight=self.initial_admin.weight)
        self.admin = self.initial_admin
        self.health = ReplicaHealth(
            self.name,
            assume_ready=self.kind != "auto",
            grace_s=grace_s,
            admin_state=self.admin.state,
        )

    @property
    def is_native(self) -> bool:
        """Whether the server is an Argosy replica."""
        return self.kind == "argosy"

    @property
    def may_be_native(self) -> bool:
        """Whether the server is an Argosy replica, or of a kind that is not detected yet."""
        return self.kind in {"argosy", "auto"}

    @property
    def may_load_adapters(self) -> bool:
        """Whether the server loads adapters (LoRA), or may turn out to."""
        has_call = bool(self.adapter.adapter_load_path and self.adapter_root)
        return self.may_be_native or has_call

    def has_adapter(self, digest: str) -> bool:
        """Whether the replica has an adapter loaded, or loads it for another request."""
        if self.is_native:
            return PlacementReplica.has_adapter(self, digest)
        return digest in self.adapter_loads

    @property
    def loaded_adapters(self) -> list[str]:
        """Digests of the adapters that a server of another engine was let load, those used last at the end."""
        return [
            digest
            for digest, load in self.adapter_loads.items()
            if load.done() and not (load.cancelled() or load.exception() or load.result())
        ]

    def adapter_path(self, digest: str) -> str:
        """Return the folder of an adapter on the server's machine."""
        return f"{self.adapter_root}/{digest.removeprefix(DIGEST_PREFIX)}"

    @property
    def adapter(self) -> BackendAdapter:
        """Adapter of the replica's backend, restricted by its configuration."""
        return get_adapter(
            self.kind,
            self.resume_mode if self.is_exact else "none",
            stream_usage=self.stream_usage,
            priority_scheduling=self.priority_scheduling,
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

    @property
    def is_cache_full(self) -> bool:
        """Whether the KV cache has no block left that is neither used nor cached, as far as the replica reports it."""
        report = self.report
        if report is None:
            return self.load.kv_usage_ratio >= FULL_KV_USAGE_RATIO
        used = report.kv_blocks_used + report.kv_blocks_cached
        return used >= FULL_KV_USAGE_RATIO * report.kv_blocks_total

    @property
    def model_digest(self) -> str:
        """Digest of the model, if the replica has verified one."""
        return "" if self.report is None else self.report.model_digest

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
            self.cache_resets += 1
        if is_other_arithmetic:
            self.reset_speed()
        if is_new_arithmetic:
            self.arithmetic_id = report.arithmetic_id
            self.on_arithmetic_change()
        if self.is_exact and not report.exact:
            log.warning("replica_not_exact", replica=self.name)
        self.is_exact, self.max_model_len = report.exact, report.max_model_len or None
        self.has_reported_speed = report.prefill_tokens_per_s > 0 or report.decode_s > 0
        kv_tokens = report.kv_capacity_tokens or report.kv_blocks_total * report.block_size
        self.prefix_index.resize(kv_tokens // BLOCK_TOKENS)
        load = self.load
        load.running, load.waiting = report.running, report.waiting
        load.queued_tokens, load.max_seqs = report.queued_tokens, report.max_seqs
        load.kv_usage_ratio = report.kv_blocks_used / max(1, report.kv_blocks_total)
        load.prefill_tokens_per_s = report.prefill_tokens_per_s or load.prefill_tokens_per_s
        load.inter_token_s = report.decode_s or load.inter_token_s
        load.reported_at, load.sent_tokens = now, 0
        self.adapters = {each.digest: each.size_bytes for each in report.adapters}
        self.adapter_bytes_per_s = report.adapter_load_bytes_per_s
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
