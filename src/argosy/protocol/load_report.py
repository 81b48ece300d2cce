"""Load report of a native replica: its load, its capacity, and what it is."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.protocol.arithmetic import ArithmeticIdentity
from argosy.protocol.openai_responses import MAX_COUNT

NonNegativeCount = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]

LOAD_SCHEMA_VERSION = 1
"""Version of `LoadResponse`. Later versions only add fields."""

LoadPhase = Literal[
    "starting", "loading", "warming", "ready", "restarting", "draining", "failed", "stopped"
]
"""Lifecycle phase of a replica. `loading` and `warming` are parts of its start."""


class StartupProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Current activity of a starting replica, and the completed fraction of it."""

    activity: str
    fraction: Annotated[float, Meta(ge=0, le=1)]


class LoadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/load`, with the state that a router needs to select a replica."""

    server_load: NonNegativeCount
    """Running generation requests (vLLM's name)."""
    state: str
    models: list[str]
    running: NonNegativeCount
    waiting: NonNegativeCount
    queued_tokens: NonNegativeCount
    """Prompt tokens not computed yet, including those of running prefills."""
    max_seqs: NonNegativeCount
    max_model_len: NonNegativeCount
    block_size: NonNegativeCount
    kv_blocks_total: NonNegativeCount
    kv_blocks_used: NonNegativeCount
    kv_blocks_cached: NonNegativeCount
    step: NonNegativeCount
    step_s: NonNegativeFloat
    prefill_tokens_per_s: NonNegativeFloat = 0.0
    """Measured prefill rate; 0 before the first measurement."""
    decode_s: NonNegativeFloat = 0.0
    """Expected seconds between tokens if one more sequence runs; 0 before the first measurement."""
    other_gateways: list[dict[int, NonNegativeCount]] = []
    """Running requests by tier of each gateway except the one that requests the report."""
    schema_version: NonNegativeCount = LOAD_SCHEMA_VERSION
    """`LOAD_SCHEMA_VERSION` of the replica."""
    phase: str = ""
    """`LoadPhase`, finer than `state` during a start."""
    startup: StartupProgress | None = None
    """Progress of a start; None while the replica serves."""
    build: str = ""
    """Program and version of the replica."""
    model_revision: str = ""
    """Commit of the model on the hub, or the requested revision; empty for a directory."""
    model_digest: Annotated[str, Meta(pattern="^(sha256:[0-9a-f]{64})?$")] = ""
    """SHA-256 digest of the model's files, which were verified when it was loaded. Empty before, or if not known."""
    arithmetic_id: str = ""
    """Id of `arithmetic`; empty before the model is loaded."""
    arithmetic: ArithmeticIdentity | None = None
    """Identity of everything that decides the bytes of outputs. None before the model is loaded."""
    accelerator: str = ""
    """Hardware in use; empty before the model is loaded."""
    zone: str = ""
    """Failure domain of the replica, as given at its start."""
    labels: dict[str, str] = {}
    """Labels of the replica, as given at its start."""
    kv_capacity_tokens: NonNegativeCount = 0
    """Number of tokens that fit into the KV cache if all sequences have `max_model_len`; 0 if unknown.

    With sliding windows, this is less than the blocks times their size, because a token has several blocks."""
    exact: bool = True
    """Whether results do not depend on other requests, bit for bit. Streams of other replicas are not resumed."""
    preemptions_total: NonNegativeCount = 0
    """Sequences preempted to free KV blocks since the engine core started."""
    phase_s_total: dict[str, NonNegativeFloat] = {}
    """Seconds spent in steps since the engine core started, by phase: plan, launch, compute, sample, commit."""
