"""What the replica server and the engine core say to each other over ZeroMQ (msgpack)."""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.protocol import SamplingParams

EngineFinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="request"):
    """One sequence to generate. `n > 1` travels as n of these: a lead and siblings naming it."""

    id: str
    prompt: list[int]
    resumed_tokens: list[int] = []
    """Tokens already generated elsewhere (resume); the core goes on from there, exactly."""
    params: SamplingParams
    parent_id: str | None = None
    """Id of the request whose prompt this one shares; it forks from there when that is prefilled."""
    cache_domain: str = ""
    """Cache domain: KV blocks are never shared between domains."""
    tenant: str = ""
    tier: int = 1
    """0 is the most urgent."""
    weight: float = 1.0
    timeout_s: float | None = None
    """Seconds after arrival at which the request ends with what there is (`timeout`)."""


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Forget these requests; each still running is answered with a final `cancelled` delta."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Leave the loop and exit with status 0."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token, its rank (1 is the likeliest), and the likeliest tokens."""

    token: int
    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]] = []


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one step gave one request. The delta with `finish` set is its last, sent exactly once."""

    id: str
    tokens: list[int] = []
    """New tokens; an end-of-sequence or stop token that ended it is included (last)."""
    logprobs: list[TokenLogprob] = []
    """One for each of `tokens` when asked for, else empty."""
    prompt_logprobs: list[TokenLogprob] = []
    """For prompt positions 1.. as their chunks are computed, in order."""
    finish_reason: EngineFinishReason | None = None
    stop_token: int | None = None
    """The end-of-sequence or stop token that ended it (finish == "stop")."""
    error: str | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; set on the first delta."""
    queue_s: float | None = None
    """Seconds from arrival at the core to the first step it was part of; set on the first delta."""
    prompt_block_names: bytes = b""
    """Names of the prompt's first full KV blocks (`protocol.kv`), where they are cached; set on the first delta."""


class CoreStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The core's state after a step. `*_total` only grow (they restart from 0 with the core)."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    queued_tokens: int = 0
    """Prompt tokens waiting to be computed, those of running prefills too."""
    step_tokens: int = 0
    step_s: float = 0.0
    schedule_s: float = 0.0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    host_hit_tokens_total: int = 0
    preemptions_total: int = 0
    corrupt_blocks_total: int = 0
    phase_s_total: dict[str, float] = {}
    """Seconds by phase of the step: plan, launch, compute, sample, commit."""
    prefill_tokens_per_s: float = 0.0
    """Measured; 0: not yet."""
    inter_token_s: float = 0.0
    """Seconds between a sequence's tokens, were one more to run; measured, 0: not yet."""


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of start-up: what is being done and how much of it (0 to 1) is done."""

    activity: str
    fraction: float


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The core serves. What the door needs to know to refuse what cannot be served."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    max_seqs: int
    kv_bytes_per_token: int
    parameters: int
    load_s: float
    backend: str
    """Which compute path is in use, for people, e.g. "cpu (avx512_bf16, 2 threads) bfloat16 native"."""
    fingerprint: str
    """Which state of the model's files was loaded. Requests never go on with another one."""
    model_digest: str = ""
    """Tells the model from others, on any machine; empty: nobody knows."""


class KvChange(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks that requests find from now on, or no longer: names (`protocol.kv`), one after the other."""

    stored_names: bytes
    removed_names: bytes


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """What one step gave, and the core's state after it."""

    deltas: list[Delta]
    stats: CoreStats
    kv_change: KvChange | None = None
    """What has changed since it was told last; it is told with each prompt that was computed, and now and then."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Sent each second by a thread of its own: `busy` with an unchanged `step` means stalled."""

    step: int
    busy: bool


class CoreFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The core cannot start or go on; it exits after this."""

    message: str


ToCore = EngineRequest | AbortRequests | Shutdown
FromCore = LoadProgress | CoreReady | StepOutputs | Heartbeat | CoreFailed
