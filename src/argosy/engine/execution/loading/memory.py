"""Memory of a model on one device: an estimate before it is loaded, and the limits that settings leave open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from argosy.engine.engine_config import EngineConfig, WeightFormat
from argosy.engine.execution.architectures.architecture import GenericArchitecture
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.loading.model_selection import AnyArchitecture
from argosy.engine.scheduling import (
    MAX_DRAFTED_STEP_TOKENS,
    KvCacheGroups,
    SchedulerLimits,
)

if TYPE_CHECKING:
    from argosy.engine.execution.checkpoint_formats.reader import StoredIntegers

MIN_KV_TOKENS = 1024
"""Tokens for which the KV cache must have room, unless the settings state its size."""
SMALLER_CONTEXTS = (32768, 8192, 2048)
"""Contexts that an error proposes."""
MAX_PROPOSALS = 3
_MIB = 1024 * 1024
_BYTES_PER_WEIGHT: dict[WeightFormat, float] = {
    "int8": 1 + 4 / 256,
    "int4": 0.5 + 1 / 32 + 4 / 256,
    "fp8": 1.0,
}
"""Bytes of a weight with its share of the scales."""
_ACTIVATION_BYTES = 4
_LOGIT_COPIES = 4
"""Copies of the logits during sampling: logits, probabilities, their order and cumulative sums."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of a loaded model in bytes."""

    weight_bytes: int
    kv_bytes: int
    """Smallest useful KV cache, or the one that the settings state. 0 for a model without one."""
    working_bytes: int
    """Activations of the largest step, logits and tables of the rotary embedding."""
    state_bytes: int = 0
    """Recurrent states of all sequences that can run at once."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.working_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """All that the need for memory depends on."""

    architecture: AnyArchitecture
    config: EngineConfig
    dtype_bytes: int
    kv_dtype_bytes: int
    stored: StoredIntegers | None = None
    """Stored integers that are computed with unless the settings quantize."""

    def estimate(self) -> MemoryEstimate:
        """Estimate the memory."""
        return MemoryEstimate(
            self._weight_bytes(),
            self._kv_bytes(),
            self._working_bytes(),
            self.config.max_seqs * self.architecture.state_bytes,
        )

    def limit_context(self, max_model_len: int) -> MemoryNeeds:
        """Return the needs with a smaller context."""
        return replace(
            self,
            architecture=replace(self.architecture, max_model_len=max_model_len),
            config=msgspec.structs.replace(self.config, max_model_len=max_model_len),
        )

    def change(self, **settings: object) -> MemoryNeeds:
        """Return the needs with other settings."""
        return replace(self, config=msgspec.structs.replace(self.config, **settings))

    def _weight_bytes(self) -> int:
        architecture = self.architecture
        quantize = None if self.config.quantize == "none" else self.config.quantize
        matrix = architecture.vocab_size * architecture.hidden_size
        has_head = architecture.has_head
        num_stored = 1 if architecture.tied_embeddings or not has_head else 2
        layers = architecture.num_parameters - matrix * num_stored
        head_format = "int8" if quantize == "int4" else quantize
        # A tied head is packed beside the embedding.
        weight_bytes = int(
            matrix * self.dtype_bytes
            + has_head * matrix * self._bytes_per_weight(head_format)
            + layers * self._bytes_per_weight(quantize)
        )
        if self.stored is None or self.config.quantize is not None:
            return weight_bytes
        saved_bytes = self.stored.num_weights * self.dtype_bytes - self.stored.num_bytes
        return max(weight_bytes - saved_bytes, self.stored.num_bytes)

    def _bytes_per_weight(self, weight_format: WeightFormat | None) -> float:
        return self.dtype_bytes if weight_format is None else _BYTES_PER_WEIGHT[weight_format]

    def _kv_bytes(self) -> int:
        config = self.config
        layout = self.architecture.kv_layout
        if not layout.windows:
            return 0
        bytes_per_token = self.architecture.kv_bytes_per_token(
            self.kv_dtype_bytes, has_scales=config.kv_dtype == "int8"
        )
        block_bytes = layout.block_bytes(bytes_per_token, config.block_size)
        if config.num_blocks is not None:
            return config.num_blocks * block_bytes
        if config.kv_memory_bytes is not None:
            return config.kv_memory_bytes
        tokens = min(self.architecture.max_model_len, MIN_KV_TOKENS)
        return KvCacheGroups(layout.windows, config.block_size).count_blocks(tokens) * block_bytes

    def _working_bytes(self) -> int:
        architecture, config = self.architecture, self.config
        moe_size, rotary_dims = 0, 0
        if isinstance(architecture, ModelArchitecture):
            moe_size = 0 if architecture.moe is None else architecture.moe.intermediate_size
        if not isinstance(architecture, GenericArchitecture):
            rotary_dims = sum(rope.rotary_dim for rope in architecture.ropes)
        heads = architecture.num_heads + 2 * architecture.num_kv_heads
        width = (
            4 * architecture.hidden_size
            + 3 * max(architecture.intermediate_size, moe_size)
            + 2 * heads * architecture.head_dim
        )
        if isinstance(architecture, ModelArchitecture) and architecture.delta_net is not None:
            width += 3 * architecture.delta_net.channels
        rows = max(config.max_step_tokens, config.max_seqs)
        if not architecture.kv_layout.windows:  # a step may have to hold a whole sequence
            rows = max(rows, architecture.max_model_len)
        activations = rows * width * _ACTIVATION_BYTES
        vocab_size = architecture.vocab_size if architecture.has_head else 0
        samples = max(config.max_seqs, MAX_DRAFTED_STEP_TOKENS)
        logits = samples * vocab_size * _ACTIVATION_BYTES * _LOGIT_COPIES
        tables = architecture.max_model_len * rotary_dims * 4
        return activations + logits + tables


def check_memory(
    needs: MemoryNeeds, free_bytes: int, weight_formats: Sequence[WeightFormat]
) -> None:
    """Check that the model fits into the free memory.

    `weight_formats` are those to which the device can quantize weights, from the largest on.

    Raises:
        ValueError: The model does not fit. The message names the settings with which it would.
    """
    estimate = needs.estimate()
    if estimate.total_bytes <= free_bytes:
        return
    fitting = [
        f"{options} ({_format_size(total_bytes)})"
        for options, total_bytes in _alternatives(needs, weight_formats, free_bytes)
        if total_bytes <= free_bytes
    ]
    remedy = (
        f"it fits with {' or '.join(fitting[:MAX_PROPOSALS])}"
        if fitting
        else "no setting makes it fit; use a smaller model, or a machine with more memory"
    )
    parts = {
        "weights": estimate.weight_bytes,
        "KV cache": estimate.kv_bytes,
        "working memory": estimate.working_bytes,
    }
    if estimate.state_bytes:
        parts["recurrent states"] = estimate.state_bytes
    listed = ", ".join(f"{name} {_format_size(size_bytes)}" for name, size_bytes in parts.items())
    raise ValueError(
        f"the model needs {_format_size(estimate.total_bytes)} of memory ({listed}), "
        f"but {_format_size(free_bytes)} are free; {remedy}"
    )


def _alternatives(
    needs: MemoryNeeds, weight_formats: Sequence[WeightFormat], free_bytes: int
) -> Iterator[tuple[str, int]]:
    """Yield options with less need for memory and their total bytes, those first that cost least."""
    weight_bytes = needs.estimate().weight_bytes
    formats = [None, *weight_formats]
    for weight_format in formats:
        settings = {} if weight_format is None else {"quantize": weight_format}
        quantized = needs.change(**settings)
        if settings and quantized.estimate().weight_bytes >= weight_bytes:
            continue
        format_option = f"--quantize {weight_format}" if settings else ""
        for option, changed in _reduce(quantized, free_bytes):
            options = " ".join(filter(None, (format_option, option)))
            if options:
                yield options, changed.estimate().total_bytes


def _reduce(needs: MemoryNeeds, free_bytes: int) -> Iterator[tuple[str, MemoryNeeds]]:
    """Yield the needs and smaller ones by one option each, with the largest KV cache that fits."""
    yield "", needs
    if needs.config.kv_memory_bytes is not None or needs.config.num_blocks is not None:
        smallest = needs.change(kv_memory_bytes=None, num_blocks=None).estimate()
        left_mib = (free_bytes - smallest.total_bytes + smallest.kv_bytes) // _MIB
        if left_mib * _MIB >= smallest.kv_bytes > 0:
            largest = needs.change(kv_memory_bytes=left_mib * _MIB, num_blocks=None)
            yield f"--kv-memory {left_mib}MiB (`options.kv_memory` of a pool)", largest
    if needs.config.max_step_tokens > 256:
        yield "--max-step-tokens 256", needs.change(max_step_tokens=256)
    if needs.config.max_seqs > 8 and needs.architecture.state_bytes:
        yield "--max-seqs 8", needs.change(max_seqs=8)
    for length in SMALLER_CONTEXTS:
        if length < needs.architecture.max_model_len:
            yield f"--max-model-len {length}", needs.limit_context(length)


def _format_size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


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

    `kv_windows` are those of the KV cache groups. Computing `ridge_tokens` tokens takes as long
    as reading the weights. A model that does not generate computes vectors.
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
    draft_block_bytes: int = 0,
    state_bytes: int = 0,
    free_bytes: int,
    kv_memory_fraction: float,
) -> SchedulerLimits:
    """Size the KV cache, given the limits of steps and the device memory that is free after loading the weights.

    `draft_block_bytes` are those that a draft model adds to each block on the device, and `state_bytes` those of the
    recurrent state of a sequence.

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
        num_blocks = min(kv_bytes // (block_bytes + draft_block_bytes), max_useful_blocks)
    max_model_len = groups.max_tokens(num_blocks, max_model_len)
    if max_model_len < 1:
        min_bytes = len(limits.kv_windows) * (block_bytes + draft_block_bytes)
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
