"""The engine's settings: plain data, and the one pure function that fills in what was left open."""

from __future__ import annotations

from typing import Literal

import msgspec

BatchingMode = Literal["continuous", "dynamic", "static"]
DType = Literal["auto", "bfloat16", "float32", "float16"]
IntFormat = Literal["int8", "int4"]
WeightFormat = Literal["int8", "int4", "fp8"]
"""How the large matrices may be held instead of in the dtype; fp8 is for CUDA devices."""


COMPUTE_ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}
"""Set where torch computes, before it loads, unless the environment says otherwise: threads that wait for
each other spin for some ten microseconds, then sleep (docs/decisions/0004-short-spin.md)."""


DEFAULT_PACK_CACHE_BYTES = 32 << 30
"""Disk that packed weights of all checkpoints together may take unless told otherwise."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person may set; None and "auto" are filled in by `resolve`."""

    model: str
    """A directory in Hugging Face layout, or a repository name on the hub."""
    revision: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType = "auto"
    quantize: WeightFormat | None = None
    """Round weights to this format as they are loaded; None keeps them in the dtype."""
    threads: int | None = None
    colocated_replicas: int = 0
    """Other replicas on the same CPUs, or the same GPU: those and their free memory are divided by default."""
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output; at most what the model was made for."""
    max_seqs: int = 64
    """Most sequences running at once."""
    max_step_tokens: int = 1024
    """Token budget of one step."""
    max_prefill_fraction: float = 0.25
    """Most of the budget that prefills may take while decodes run."""
    batching: BatchingMode = "continuous"
    max_batch_wait_s: float = 0.05
    """How long `dynamic` batching waits for a fuller batch."""
    max_steps_in_flight: int | None = None
    """Steps under way while the next one is planned; by default what suits the device."""
    block_size: int = 16
    num_blocks: int | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """How keys and values are held: as the model computes, or rounded to 8 bits (CUDA devices only)."""
    kv_memory_bytes: int | None = None
    """Memory for the KV cache; by default a fraction of what is free."""
    host_kv_bytes: int = 0
    """Host memory for evicted KV blocks; 0 is none."""
    pack_cache_bytes: int = DEFAULT_PACK_CACHE_BYTES
    """Disk for packed weights, which replicas share and later starts find done; 0 is none."""
    prefix_cache: bool = True
    watermark: float = 0.01
    """Part of the blocks kept free for running sequences to grow into."""
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    """A core that is busy and makes no step for this long is restarted."""
    max_load_attempts: int = 3
    warmup: bool = True


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What `resolve` found for this model on this device."""

    max_model_len: int
    max_seqs: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    host_blocks: int


DEFAULT_KV_MEMORY_FRACTION = 0.4
"""Part of a CPU's free memory that the KV cache takes unless told otherwise: computing takes some, too."""


def resolve_limits(
    config: EngineConfig,
    *,
    model_max_len: int,
    kv_bytes_per_token: int,
    free_bytes: int,
    kv_memory_fraction: float,
) -> EngineLimits:
    """Settle every open number. Raises ValueError (with the remedy) when the settings cannot be met.

    Sizes are in bytes; `free_bytes` is what the device has left once the weights are loaded, and
    `kv_share` the part of it that the KV cache takes unless told otherwise.
    """
    max_model_len = min(config.max_model_len or model_max_len, model_max_len)
    if config.max_model_len and config.max_model_len > model_max_len:
        msg = f"max_model_len {config.max_model_len} exceeds the model's {model_max_len}; set it to at most that"
        raise ValueError(msg)
    block_bytes = kv_bytes_per_token * config.block_size
    blocks_per_seq = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        memory = config.kv_memory_bytes or int(free_bytes * kv_memory_fraction)
        most_useful = blocks_per_seq * config.max_seqs * 2
        num_blocks = min(memory // block_bytes, most_useful)
    if num_blocks < 1:
        msg = f"no memory for one KV block of {block_bytes} bytes; raise kv_memory_bytes or free some memory"
        raise ValueError(msg)
    return EngineLimits(
        max_model_len=min(max_model_len, num_blocks * config.block_size),
        max_seqs=config.max_seqs,
        max_step_tokens=max(config.max_step_tokens, config.max_seqs),
        block_size=config.block_size,
        num_blocks=num_blocks,
        host_blocks=config.host_kv_bytes // block_bytes,
    )
