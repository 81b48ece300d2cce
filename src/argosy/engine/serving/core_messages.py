"""Messages between the replica server and the engine core (msgpack over ZeroMQ)."""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.engine.engine_request import AdapterSource, EngineRequest
from argosy.engine.pooling import PoolingInfo
from argosy.engine.scheduling import Logprob
from argosy.protocol import ApiError, ArithmeticIdentity, ModelDescription, ResourceUsage
from argosy.telemetry import CoreStats

EngineFinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Abort requests. Each request that still runs gets a final delta with finish reason `cancelled`."""

    request_ids: list[str]


class ShedMemory(msgspec.Struct, frozen=True, array_like=True, tag="shed"):
    """Release memory that no request uses, and with `end_requests` also end the requests that cause most of it."""

    end_requests: bool


class SetSleepLevel(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Free memory as soon as no request is unfinished, or allocate it again.

    The core answers with `SleepChanged`.
    """

    level: int
    """1 frees the KV cache and all other memory but the weights, 2 also the weights. 0 frees none."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Load an adapter before its first request. A pinned one stays loaded until `UnloadAdapter`."""

    source: AdapterSource
    is_pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Free the memory of an adapter as soon as no request uses it."""

    digest: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Stop the core loop and exit with status 0."""


class Delta(msgspec.Struct, kw_only=True, array_like=True):
    """Output of one step for one request.

    The delta with `finish_reason` set is the last one of its request and is sent exactly once.
    """

    id: str
    tokens: list[int] = []
    """New tokens. If an end-of-sequence or stop token ended the request, that token is included as the last one."""
    logprobs: list[Logprob] = []
    """Log-probability of each of `tokens` if the request wants them, else empty."""
    prompt_logprobs: list[Logprob] = []
    """Log-probabilities of prompt positions 1, 2, ..., in order, sent as their chunks are computed."""
    finish_reason: EngineFinishReason | None = None
    stop_token: int | None = None
    """End-of-sequence or stop token that ended the request (only with finish reason `stop`)."""
    error: str | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache. Set on the first delta."""
    queue_s: float | None = None
    """Seconds from arrival at the core to the first step that includes the request. Set on the first delta."""
    prompt_block_names: bytes = b""
    """Names of the prompt's first full KV blocks (`protocol.KvEvent`), if they are cached. Set on the first delta."""
    error_code: str | None = None
    """Code of `error` from `protocol.ERROR_CODES`. None stands for `engine_error`."""
    pooled: bytes = b""
    """Vector of a pooled request as float32 in native byte order, or one for each token. Set on the last delta."""
    accepted_drafts: int = 0
    """Number of `tokens` that were drafts."""
    draft_saved_s: float = 0.0
    """Estimated seconds by which drafts made `tokens` arrive earlier. Negative if they cost more than that."""


_STATUS_BY_CODE = {
    **dict.fromkeys(("grammar_dead_end", "grammar_failed", "invalid_adapter"), 400),
    "adapter_load_failed": 503,
}
"""Status of failures that are none of the engine. It is 400 if the request would fail on every replica."""


def failure_status(code: str) -> int:
    """Return the HTTP status for the code of a failure that the core reports."""
    return _STATUS_BY_CODE.get(code, 500)


def check_success(delta: Delta) -> None:
    """Raise an error if a last delta is that of a request that failed.

    Raises:
        ApiError: 500 if the engine failed the request, 400 if the request itself is the cause, 503 if another replica
            may succeed, 499 if it was cancelled.
    """
    if delta.finish_reason == "error":
        reason, code = delta.error or "the engine gave no reason", delta.error_code
        raise ApiError(
            failure_status(code or ""),
            code or "engine_error",
            f"The engine could not finish the request: {reason}.",
        )
    if delta.finish_reason == "cancelled":
        raise ApiError(499, "cancelled", "The request was cancelled before it finished.")


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Start-up progress: the current activity and its completed fraction (0 to 1)."""

    activity: str
    fraction: float


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """Model limits and properties that the core reports when it is ready to serve.

    The replica server uses them to reject requests that cannot be served.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    max_seqs: int
    kv_capacity_tokens: int
    """Number of tokens that fit into the KV cache if all sequences have `max_model_len`."""
    load_s: float
    backend: str
    """Human-readable name of the compute path, e.g. "cpu (avx512_bf16, 2 threads) bfloat16 native"."""
    fingerprint: str
    """Fingerprint of the loaded model files and their arithmetic.

    A request never continues on a core with a different fingerprint.
    """
    accelerator: str = ""
    """Description of the hardware in use."""
    arithmetic: ArithmeticIdentity | None = None
    """Identity of everything that decides the bytes of outputs, the same on any machine. None if unknown."""
    is_exact: bool = True
    """Whether results depend only on their own sequence, bit for bit. Streams of other models cannot be resumed."""
    pooling: PoolingInfo | None = None
    """Properties of a model that computes vectors. None for a model that generates."""
    memory_bound_bytes: int = 0
    """Bound of the core's private memory. 0 sets none."""
    mapped_bytes: int = 0
    """Bytes of the weights that are mapped from files."""
    awake_bytes: int = 0
    """Memory that the core needs while it is awake at most, with the weights that it maps. 0 if unknown."""
    model: ModelDescription | None = None
    """The model as user interfaces show it."""
    no_drafts_reason: str = ""
    """Why no step has drafts. Empty if steps may have them."""
    step_s: float = 0.0
    """Seconds of a step with one token, as the warm-up measured it. 0 without a warm-up."""


class KvChange(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks added to and removed from the prefix cache since the last report.

    Each field holds concatenated block names (`protocol.KvEvent`).
    """

    stored_names: bytes
    removed_names: bytes


class AdapterReport(msgspec.Struct, frozen=True, array_like=True):
    """Adapters in the core's memory after a change."""

    resident: dict[str, int]
    """Bytes by digest."""
    failures: dict[str, tuple[str, str]]
    """Message and error code by digest, of the loads that failed since the last report."""


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """Output of one step and the core's state after it."""

    deltas: list[Delta]
    stats: CoreStats
    kv_change: KvChange | None = None
    """Prefix cache changes since the last report. Sent after prompts are computed, and periodically while decoding."""
    adapters: AdapterReport | None = None


class SleepChanged(msgspec.Struct, frozen=True, array_like=True, tag="slept"):
    """The core has reached another level of sleep, see `SetSleepLevel`."""

    level: int
    seconds: float
    """How long it took to free or allocate the memory."""
    kv_change: KvChange | None = None
    """Prefix cache changes since the last report."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Liveness signal that a separate thread of the core sends every second.

    `busy` with an unchanged `step` means that the core is stalled.
    """

    step: int
    busy: bool
    usage: ResourceUsage = ResourceUsage()


class CoreFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The core cannot start or cannot continue. It exits after this message."""

    message: str


ToCore = (
    EngineRequest
    | AbortRequests
    | ShedMemory
    | SetSleepLevel
    | LoadAdapter
    | UnloadAdapter
    | Shutdown
)
FromCore = LoadProgress | CoreReady | StepOutputs | SleepChanged | Heartbeat | CoreFailed
