"""Engine settings, and the pure function `resolve_limits`, which computes the limits they leave open."""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from argosy.engine.pooling import ModelTask
from argosy.engine.scheduling import KvCacheGroups

BatchingMode = Literal["continuous", "dynamic", "static"]
DType = Literal["auto", "bfloat16", "float32", "float16"]
IntFormat = Literal["int8", "int4"]
ModelImpl = Literal["auto", "argosy", "transformers"]
"""Implementation of the model: Argosy's own decoder, that of transformers, or the first that serves the family."""
SelectedImpl = Literal["argosy", "transformers"]
WeightFormat = Literal["int8", "int4", "fp8"]
"""Format of quantized weight matrices. fp8 requires a CUDA device."""
QuantizeSetting = Literal["int8", "int4", "fp8", "none"]
"""Weight format, or none for the dtype of the activations."""


DEFAULT_BLOCK_SIZE = 16
"""Default number of tokens per KV block."""
DEFAULT_PACK_CACHE_BYTES = 32 << 30
"""Default limit of the disk space for packed weights of all checkpoints, in bytes."""


VERIFYING_MODEL = "verifying the model"
LOADING_WEIGHTS = "loading weights"
WARMING_UP = "warming up"
"""Activities that an engine reports during its start, beside preparations."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. The loader replaces None and "auto" by values for the model and the device."""

    model: str
    """Directory in Hugging Face layout, GGUF file, or repository name on the hub."""
    revision: str | None = None
    digest: str | None = None
    """SHA-256 digest that the model must have (`argosy models show`). It is checked before anything is loaded."""
    generation_config: str = "auto"
    """Source of sampling defaults and end-of-sequence ids: `auto` is the model's generation_config.json, `none` (or
    `vllm`) only its end-of-sequence ids, and anything else a folder with such a file."""
    override_generation_config: dict[str, float | None] = {}
    """Sampling defaults that replace those of the generation config; null removes one."""
    task: ModelTask = "auto"
    """Use of the model: `generate`, `embed` or `score`. `auto` follows the layout of the checkpoint."""
    model_impl: ModelImpl = "auto"
    """Implementation of the model. "auto" prefers Argosy's own decoder."""
    trust_remote_code: bool = False
    """Whether Python code in the checkpoint may be run, for models that transformers does not know."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType = "auto"
    quantize: QuantizeSetting | None = None
    """Format to which weights are rounded while they are loaded. "none" is `dtype`.

    None computes with the integers of a quantized checkpoint as they are stored, and keeps other weights in `dtype`."""
    threads: int | None = None
    colocated_replicas: int = 0
    """Number of other replicas on the same CPUs or GPU. By default the replicas share CPUs and free memory equally."""
    max_model_len: int | None = None
    """Maximum tokens of one sequence, prompt and output together. Must not exceed the model's context length."""
    max_seqs: int = 64
    """Maximum number of sequences running at once."""
    max_step_tokens: int = 1024
    """Token budget of one step."""
    max_prefill_fraction: float = 0.25
    """Maximum fraction of the token budget for prefills while decodes run."""
    batching: BatchingMode = "continuous"
    max_batch_wait_s: float = 0.05
    """Maximum time for which `dynamic` batching waits for a full batch."""
    max_steps_in_flight: int | None = None
    """Number of steps in flight while the next one is planned. None takes the device's default."""
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Format of cached keys and values. "auto" is the model's dtype, "fp8" rounds to 8 bits (CUDA only)."""
    kv_memory_bytes: int | None = None
    """Memory for the KV cache. None takes a fraction of the free memory."""
    host_kv_bytes: int = 0
    """Host memory for evicted KV blocks. 0 disables the host tier."""
    pack_cache_bytes: int = DEFAULT_PACK_CACHE_BYTES
    """Disk space for packed weights, which replicas share and later starts reuse. 0 disables the pack cache."""
    prefix_cache: bool = True
    watermark: float = 0.01
    """Fraction of the blocks that stays free for the growth of running sequences."""
    request_timeout_s: float | None = None
    """Longest time from the arrival of a request to its end. None sets no deadline."""
    stall_timeout_s: float = 60.0
    """Time without a finished step after which a busy engine core is restarted."""
    max_load_attempts: int = 3
    warmup: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError if a value is out of range or unknown."""
        for name, minimum in MINIMUM_SETTINGS.items():
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and value >= minimum
            if not is_number and not (value is None and name in OPTIONAL_NUMBERS):
                raise ValueError(f"{name} is {value!r}; set it to {minimum} or more")
        for name, choices in SETTING_CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                names = ", ".join(str(choice) for choice in choices)
                raise ValueError(f"{name} is {value!r}; choose one of {names}")
        if self.digest is not None and re.fullmatch("sha256:[0-9a-f]{64}", self.digest) is None:
            raise ValueError(f"digest is {self.digest!r}; give sha256: and 64 hexadecimal digits")


OPTIONAL_NUMBERS = frozenset(
    {"threads", "max_model_len", "num_blocks", "kv_memory_bytes", "request_timeout_s"}
)
"""Numbers that may be None."""
MINIMUM_SETTINGS = {
    "threads": 1,
    "max_model_len": 1,
    "max_seqs": 1,
    "max_step_tokens": 1,
    "block_size": 1,
    "num_blocks": 1,
    "kv_memory_bytes": 1,
    "host_kv_bytes": 0,
    "pack_cache_bytes": 0,
    "max_prefill_fraction": 0,
    "watermark": 0,
    "request_timeout_s": 0,
}
"""Smallest values of the numbers."""
SETTING_CHOICES: dict[str, tuple[str | None, ...]] = {
    "task": get_args(ModelTask),
    "model_impl": get_args(ModelImpl),
    "device": ("auto", "cpu", "cuda"),
    "dtype": get_args(DType),
    "quantize": (None, *get_args(QuantizeSetting)),
    "batching": get_args(BatchingMode),
    "kv_dtype": ("auto", "fp8"),
}


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that `resolve_limits` computed for one model on one device."""

    max_model_len: int
    max_seqs: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    host_blocks: int
    kv_windows: tuple[int | None, ...] = (None,)
    """Sliding window of each KV cache group, see `KvCacheGroups`. Empty for a model without a KV cache."""
    state_snapshots: int | None = None
    """Number of snapshots of recurrent states for prefix hits. None for a model without recurrent layers."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Number of tokens that fit into the KV cache, if there is one, when all sequences have `max_model_len`."""
        groups = KvCacheGroups(self.kv_windows, self.block_size)
        if not self.kv_windows:
            return 0
        return self.num_blocks * self.max_model_len // groups.count_blocks(self.max_model_len)


MAX_SNAPSHOT_FRACTION = 0.5
"""Largest fraction of the memory of the KV cache that snapshots of recurrent states take."""
MAX_SNAPSHOTS_PER_SEQUENCE = 4
"""Largest number of snapshots for each of `max_seqs`: the newest one, the prompt's, and those of earlier turns."""
DEFAULT_KV_MEMORY_FRACTION = 0.4
"""Default fraction of a CPU's free memory for the KV cache. The rest stays for activations."""


def resolve_limits(
    config: EngineConfig,
    *,
    model_max_len: int,
    kv_windows: tuple[int | None, ...],
    block_bytes: int,
    state_bytes: int = 0,
    free_bytes: int,
    kv_memory_fraction: float,
) -> EngineLimits:
    """Compute all limits that the settings leave open.

    Args:
        config: The settings.
        model_max_len: Context length of the model.
        kv_windows: Sliding window of each KV cache group.
        block_bytes: Bytes of a KV block.
        state_bytes: Bytes of the recurrent state of a sequence, 0 without one.
        free_bytes: Device memory after loading the weights.
        kv_memory_fraction: Default fraction of `free_bytes`.

    Raises:
        ValueError: The settings cannot be met. The message says what to change.
    """
    max_model_len = min(config.max_model_len or model_max_len, model_max_len)
    if config.max_model_len and config.max_model_len > model_max_len:
        msg = f"max_model_len {config.max_model_len} exceeds the model's {model_max_len}; set it to that or less"
        raise ValueError(msg)
    if not kv_windows:  # a model without a KV cache, which computes each sequence in one step
        return EngineLimits(
            max_model_len=max_model_len,
            max_seqs=config.max_seqs,
            max_step_tokens=max(config.max_step_tokens, config.max_seqs, max_model_len),
            block_size=config.block_size,
            num_blocks=0,
            host_blocks=0,
            kv_windows=(),
        )
    groups = KvCacheGroups(kv_windows, config.block_size)
    free_bytes = max(0, free_bytes - config.max_seqs * state_bytes)
    kv_bytes = config.kv_memory_bytes or int(free_bytes * kv_memory_fraction)
    state_snapshots = None
    if state_bytes:
        state_snapshots = _count_snapshots(config, kv_bytes, state_bytes)
        kv_bytes -= state_snapshots * state_bytes
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        max_useful_blocks = groups.count_blocks(max_model_len) * config.max_seqs * 2
        num_blocks = min(kv_bytes // block_bytes, max_useful_blocks)
    max_model_len = groups.max_tokens(num_blocks, max_model_len)
    if max_model_len < 1:
        min_bytes = len(kv_windows) * block_bytes
        msg = f"no memory for one KV block of {min_bytes} bytes; raise kv_memory_bytes or free some memory"
        raise ValueError(msg)
    return EngineLimits(
        max_model_len=max_model_len,
        max_seqs=config.max_seqs,
        max_step_tokens=max(config.max_step_tokens, config.max_seqs),
        block_size=config.block_size,
        num_blocks=num_blocks,
        host_blocks=config.host_kv_bytes // block_bytes,
        kv_windows=kv_windows,
        state_snapshots=state_snapshots,
    )


def _count_snapshots(config: EngineConfig, kv_bytes: int, state_bytes: int) -> int:
    """Return the number of snapshots of recurrent states that share the memory of the KV cache."""
    if not config.prefix_cache:
        return 0
    affordable = int(kv_bytes * MAX_SNAPSHOT_FRACTION) // state_bytes
    return min(affordable, MAX_SNAPSHOTS_PER_SEQUENCE * config.max_seqs)
