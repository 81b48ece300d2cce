"""Loader that turns engine settings into a loaded, sized and warmed-up executor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from argosy.engine.engine_config import (
    LOADING_WEIGHTS,
    WARMING_UP,
    EngineConfig,
    EngineLimits,
    resolve_limits,
)
from argosy.engine.execution.architecture_config import read_architecture
from argosy.engine.execution.arithmetic import describe_arithmetic
from argosy.engine.execution.checkpoint import (
    checkpoint_fingerprint,
    resolve_model_path,
)
from argosy.engine.execution.compute_threads import ComputeThreads
from argosy.engine.execution.decoder import Decoder
from argosy.engine.execution.device import Device, create_cpu_device
from argosy.engine.execution.executor import Executor, TorchExecutor
from argosy.engine.execution.memory_estimate import MemoryNeeds, check_memory
from argosy.engine.execution.model_architecture import ModelArchitecture
from argosy.engine.execution.pack_cache import PackCache, open_pack_cache
from argosy.engine.execution.weight_loader import load_decoder
from argosy.engine.grammar import CompiledGrammar
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.protocol import ArithmeticIdentity, SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARMUP_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
COSTLIEST_PARAMS = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=1)


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """Loaded executor, with the properties of its model and device."""

    executor: Executor
    architecture: ModelArchitecture
    limits: EngineLimits
    kv_bytes_per_token: int
    load_s: float
    backend: str
    fingerprint: str
    arithmetic: ArithmeticIdentity
    """Identity of everything that decides the bytes of outputs."""
    accelerator: str
    """Description of the hardware in use."""
    max_steps_in_flight: int
    """Number of steps in flight while the next one is planned."""
    ridge_tokens: int
    """Number of tokens whose computation takes as long as reading the weights."""
    compute_threads: ComputeThreads | None
    """CPU threads that compute, or None if the device is not a CPU."""


def load_executor(
    config: EngineConfig,
    progress: Callable[[str, float], None],
    find_grammar: Callable[[str], CompiledGrammar] | None = None,
) -> LoadedExecutor:
    """Load the model, size its KV cache and warm it up.

    Args:
        config: The settings.
        progress: Called with a phase and the fraction of it that is done, 0 to 1.
        find_grammar: Returns the compiled grammar of an admitted sequence. None if no sequence will have one.

    Raises:
        ValueError: The settings or the checkpoint cannot be used. The message says what to do.
        OSError: A file cannot be read. The message says what to do.
    """
    started_at = time.monotonic()
    path = resolve_model_path(config.model, config.revision)
    checkpoint_state = checkpoint_fingerprint(path)
    architecture = _limit_context(read_architecture(path, config.generation_config), config)
    progress("preparing the kernels", 0.0)  # compiled at the first start
    device = choose_device(config)
    dtype = device.default_dtype if config.dtype == "auto" else DTYPES[config.dtype]
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
    check_memory(
        MemoryNeeds(architecture, config, dtype.itemsize, kv_dtype.itemsize),
        device.free_bytes(),
        ("int8", "int4") if device.torch_device.type == "cpu" else ("fp8",),
    )
    format_name = " ".join([_dtype_name(dtype), *([config.quantize] if config.quantize else [])])
    with _open_pack_cache(
        config, architecture, (checkpoint_state, format_name, device.weight_layout_id(dtype))
    ) as pack_cache:
        decoder = load_decoder(
            path,
            architecture,
            device,
            dtype,
            lambda done: progress(LOADING_WEIGHTS, done),
            quantize=config.quantize,
            pack_cache=pack_cache,
        )
    factory = _ExecutorFactory(decoder, kv_dtype, device)
    if kv_dtype != dtype:
        format_name += f", KV {_dtype_name(kv_dtype)}"
    limits = _resolve_limits(
        config, factory, f"{checkpoint_state} {format_name}", pack_cache.mapped_bytes
    )
    arithmetic = describe_arithmetic(path, architecture, device, dtype, kv_dtype, config.quantize)
    executor = factory.create_executor(limits, find_grammar)
    if config.warmup:
        _warm_up(executor, limits, device.warmup_sizes, progress)
    return LoadedExecutor(
        executor=executor,
        architecture=architecture,
        limits=limits,
        kv_bytes_per_token=factory.kv_bytes_per_token,
        load_s=time.monotonic() - started_at,
        fingerprint=f"{checkpoint_state} {arithmetic.id}",
        arithmetic=arithmetic,
        accelerator=device.name,
        max_steps_in_flight=device.max_steps_in_flight
        if config.max_steps_in_flight is None
        else config.max_steps_in_flight,
        ridge_tokens=device.ridge_tokens,
        compute_threads=device.compute_threads,
        backend=f"{device.name} {format_name} {executor.attention_name}",
    )


@dataclass(frozen=True, slots=True)
class _ExecutorFactory:
    """Factory of executors for one loaded model."""

    decoder: Decoder
    kv_dtype: torch.dtype
    device: Device

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, all layers together."""
        return self.decoder.architecture.kv_bytes_per_token(self.kv_dtype.itemsize)

    def create_executor(
        self,
        limits: EngineLimits,
        find_grammar: Callable[[str], CompiledGrammar] | None = None,
    ) -> TorchExecutor:
        """Create an executor with its own KV cache."""
        architecture = self.decoder.architecture
        return TorchExecutor(
            self.decoder,
            self.decoder.create_attention(limits.num_blocks, limits.block_size, self.kv_dtype),
            limits=limits,
            vocab_size=architecture.vocab_size,
            eos_token_ids=list(architecture.eos_token_ids),
            device=self.device,
            # A mixture of experts counts tokens per expert on the host, which a graph cannot include.
            graph_capturer=None if architecture.moe else self.device.graph_capturer,
            find_grammar=find_grammar,
        )


def _resolve_limits(
    config: EngineConfig, factory: _ExecutorFactory, key: str, mapped_bytes: int
) -> EngineLimits:
    """Compute the limits that fit next to the activations of the largest step and the mapped packed weights.

    `key` identifies the model and its formats, see `Device.working_bytes`.

    Raises:
        ValueError: No KV block fits.
    """
    device, model_max_len = factory.device, factory.decoder.architecture.max_model_len
    probe = EngineLimits(
        max_model_len=model_max_len,
        max_seqs=config.max_seqs,
        max_step_tokens=max(config.max_step_tokens, config.max_seqs),
        block_size=config.block_size,
        num_blocks=1,
        host_blocks=0,
    )
    working_bytes = device.working_bytes(
        f"{key} {probe}", lambda: _run_largest_step(factory.create_executor(probe), probe)
    )
    return resolve_limits(
        config,
        model_max_len=model_max_len,
        kv_bytes_per_token=factory.kv_bytes_per_token,
        free_bytes=max(0, device.free_bytes() - mapped_bytes - working_bytes),
        kv_memory_fraction=device.kv_memory_fraction / (1 + config.colocated_replicas),
    )


def _warm_up(
    executor: TorchExecutor,
    limits: EngineLimits,
    sizes: tuple[int, ...],
    progress: Callable[[str, float], None],
) -> None:
    """Run one prefill of each size that fits, so that compilation and first-use costs do not delay requests."""
    fitting = [size for size in sizes if size <= _max_prefill_tokens(limits)]
    for number, size in enumerate(fitting):
        _run_prefill(executor, limits, [size], WARMUP_PARAMS)
        progress(WARMING_UP, (number + 1) / len(fitting))
    executor.reset()


def _limit_context(architecture: ModelArchitecture, config: EngineConfig) -> ModelArchitecture:
    """Limit the model's context to `config.max_model_len`, for which the rope tables are built."""
    max_model_len = config.max_model_len
    if max_model_len is None or max_model_len >= architecture.max_model_len:
        return architecture
    return replace(architecture, max_model_len=max_model_len)


def choose_device(config: EngineConfig) -> Device:
    """Create the device that the settings name. "auto" selects a GPU if torch finds one."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return create_cpu_device(config.threads, config.colocated_replicas)
    from argosy.engine.execution.gpu.cuda_runtime import create_cuda_device

    return create_cuda_device()


def _open_pack_cache(
    config: EngineConfig, architecture: ModelArchitecture, identity: tuple[str, str, str]
) -> PackCache:
    """Open the pack cache for this checkpoint, format and packed layout."""
    if not identity[-1]:
        return PackCache()
    return open_pack_cache(
        identity,
        required_bytes=architecture.num_parameters * 2,
        limit_bytes=config.pack_cache_bytes,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_prefill_tokens(limits: EngineLimits) -> int:
    """Return the length of the longest prefill that fits into one step."""
    return min(limits.max_model_len - 1, limits.max_step_tokens)


def _run_largest_step(executor: TorchExecutor, limits: EngineLimits) -> None:
    """Fill the token budget with the maximum number of sequences, sampled with the most expensive parameters."""
    remaining, counts = limits.max_step_tokens, []
    for sequences_left in reversed(range(limits.max_seqs)):
        counts.append(min(_max_prefill_tokens(limits), remaining - sequences_left))
        remaining -= counts[-1]
    _run_prefill(executor, limits, counts, COSTLIEST_PARAMS)


def _run_prefill(
    executor: TorchExecutor, limits: EngineLimits, counts: list[int], params: SamplingParams
) -> None:
    """Compute sequences of `counts` tokens in one step. All use block 0, so the results are meaningless."""
    rows = list(range(len(counts)))
    blocks = [[0] * -(-count // limits.block_size) for count in counts]
    plan = StepPlan(
        0,
        rows=rows,
        starts=[0] * len(rows),
        counts=counts,
        sample_flags=[True] * len(rows),
        admissions=[
            AdmittedSequence(row, [0] * count, count, params, block_ids)
            for row, count, block_ids in zip(rows, counts, blocks, strict=True)
        ],
    )
    executor.submit(plan).result()
