"""Limits that the settings of an engine leave open, for one model on one device."""

from __future__ import annotations

from dataclasses import replace

from argosy.engine.engine_config import EngineConfig
from argosy.engine.scheduling import KvCacheGroups, SchedulerLimits

MAX_SNAPSHOT_FRACTION = 0.5
"""Largest fraction of the memory of the KV cache that snapshots of recurrent states take."""
MAX_SNAPSHOTS_PER_SEQUENCE = 4
"""Largest number of snapshots for each of `max_seqs`: the newest one, the prompt's, and those of earlier turns."""


def step_limits(
    config: EngineConfig,
    *,
    max_model_len: int,
    kv_windows: tuple[int | None, ...],
    ridge_tokens: int = 0,
    generates: bool = True,
) -> SchedulerLimits:
    """Return the limits of steps, with a single KV block.

    Args:
        config: The settings.
        max_model_len: Context length.
        kv_windows: Sliding window of each KV cache group.
        ridge_tokens: Number of tokens whose computation takes as long as reading the weights.
        generates: Whether the model generates text, and does not compute vectors.
    """
    # Without a KV cache, a sequence is computed in one step.
    min_step_tokens = config.max_seqs if kv_windows else max(config.max_seqs, max_model_len)
    return SchedulerLimits(
        max_seqs=config.max_seqs,
        max_step_tokens=max(config.max_step_tokens, min_step_tokens),
        block_size=config.block_size,
        num_blocks=1,
        # Without decodes, prefills leave no room for them.
        max_prefill_fraction=config.max_prefill_fraction if generates else 1.0,
        watermark=config.watermark,
        prefix_cache=config.prefix_cache,
        ridge_tokens=ridge_tokens,
        kv_windows=kv_windows,
        is_chunked=bool(kv_windows),
        max_model_len=max_model_len,
    )


def resolve_limits(
    config: EngineConfig,
    limits: SchedulerLimits,
    *,
    block_bytes: int,
    state_bytes: int = 0,
    free_bytes: int,
    kv_memory_fraction: float,
) -> SchedulerLimits:
    """Size the KV cache.

    Args:
        config: The settings.
        limits: Limits of steps, with the context length of the model.
        block_bytes: Bytes of a KV block.
        state_bytes: Bytes of the recurrent state of a sequence, 0 without one.
        free_bytes: Device memory after loading the weights.
        kv_memory_fraction: Default fraction of `free_bytes`.

    Raises:
        ValueError: The settings cannot be met. The message says what to change.
    """
    model_max_len = limits.max_model_len
    max_model_len = min(config.max_model_len or model_max_len, model_max_len)
    if config.max_model_len and config.max_model_len > model_max_len:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's {model_max_len}; set it to that or less"
        )
    if not limits.kv_windows:
        return replace(limits, num_blocks=0, max_model_len=max_model_len)
    groups = KvCacheGroups(limits.kv_windows, config.block_size)
    free_bytes = max(0, free_bytes - config.max_seqs * state_bytes)
    kv_bytes = config.kv_memory_bytes or int(free_bytes * kv_memory_fraction)
    state_snapshots = None
    if state_bytes:
        state_snapshots = _count_snapshots(config, kv_bytes, state_bytes)
        kv_bytes -= state_snapshots * state_bytes
    num_blocks = config.num_blocks
    if num_blocks is None:
        max_useful_blocks = groups.count_blocks(max_model_len) * config.max_seqs * 2
        num_blocks = min(kv_bytes // block_bytes, max_useful_blocks)
    max_model_len = groups.max_tokens(num_blocks, max_model_len)
    if max_model_len < 1:
        min_bytes = len(limits.kv_windows) * block_bytes
        raise ValueError(
            f"no memory for one KV block of {min_bytes} bytes; raise kv_memory_bytes or free some memory"
        )
    return replace(
        limits,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        host_blocks=config.host_kv_bytes // block_bytes,
        state_snapshots=state_snapshots,
    )


def _count_snapshots(config: EngineConfig, kv_bytes: int, state_bytes: int) -> int:
    """Return the number of snapshots of recurrent states that share the memory of the KV cache."""
    if not config.prefix_cache:
        return 0
    affordable = int(kv_bytes * MAX_SNAPSHOT_FRACTION) // state_bytes
    return min(affordable, MAX_SNAPSHOTS_PER_SEQUENCE * config.max_seqs)
