"""From settings to an executor that is loaded, sized and warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from argosy.engine.engine_config import EngineConfig, EngineLimits, resolve_limits
from argosy.engine.execution.architecture_config import read_architecture
from argosy.engine.execution.checkpoint import (
    checkpoint_digest,
    checkpoint_fingerprint,
    resolve_model_path,
)
from argosy.engine.execution.decoder import Decoder
from argosy.engine.execution.device import Device, create_cpu_device
from argosy.engine.execution.executor import Executor, TorchExecutor
from argosy.engine.execution.model_architecture import ModelArchitecture
from argosy.engine.execution.pack_cache import PackCache, open_pack_cache
from argosy.engine.execution.weight_loader import load_decoder
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.protocol import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARMUP_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
COSTLIEST_PARAMS = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=1)


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """A loaded model and what it turned out to be."""

    executor: Executor
    architecture: ModelArchitecture
    limits: EngineLimits
    kv_bytes_per_token: int
    load_s: float
    backend: str
    fingerprint: str
    digest: str
    max_steps_in_flight: int
    """Steps under way while the next one is planned."""
    ridge_tokens: int
    """See `Device`."""


def load_executor(config: EngineConfig, progress: Callable[[str, float], None]) -> LoadedExecutor:
    """Load the model and size its KV cache. Raises ValueError or OSError with the remedy."""
    begin = time.monotonic()
    path = resolve_model_path(config.model, config.revision)
    state = checkpoint_fingerprint(path)
    spec = _limit_context(read_architecture(path), config)
    progress("preparing the kernels", 0.0)  # which are compiled at the first start
    device = choose_device(config)
    dtype = device.default_dtype if config.dtype == "auto" else DTYPES[config.dtype]
    held = " ".join([_dtype_name(dtype), *([config.quantize] if config.quantize else [])])
    with _open_pack_cache(config, spec, (state, held, device.weight_layout_id(dtype))) as packs:
        decoder = load_decoder(
            path,
            spec,
            device,
            dtype,
            lambda done: progress("loading weights", done),
            quantize=config.quantize,
            pack_cache=packs,
        )
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
    parts = _ExecutorFactory(decoder, kv_dtype, device)
    if kv_dtype != dtype:
        held += f", KV {_dtype_name(kv_dtype)}"
    limits = _resolve_limits(config, parts, f"{state} {held}", packs.mapped_bytes)
    executor = parts.create_executor(limits)
    if config.warmup:
        _warm_up(executor, limits, device.warmup_sizes, progress)
    return LoadedExecutor(
        executor=executor,
        architecture=spec,
        limits=limits,
        kv_bytes_per_token=parts.kv_bytes_per_token,
        load_s=time.monotonic() - begin,
        fingerprint=f"{state} {held}",
        digest=checkpoint_digest(path),
        max_steps_in_flight=device.max_steps_in_flight
        if config.max_steps_in_flight is None
        else config.max_steps_in_flight,
        ridge_tokens=device.ridge_tokens,
        backend=f"{device.name} {held} {executor.attention_name}",
    )


@dataclass(frozen=True, slots=True)
class _ExecutorFactory:
    """What executors of one model are made of."""

    decoder: Decoder
    kv_dtype: torch.dtype
    device: Device

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.decoder.architecture.kv_bytes_per_token(self.kv_dtype.itemsize)

    def create_executor(self, limits: EngineLimits) -> TorchExecutor:
        """An executor with a KV cache of its own."""
        spec = self.decoder.architecture
        return TorchExecutor(
            self.decoder,
            self.decoder.create_attention(limits.num_blocks, limits.block_size, self.kv_dtype),
            limits=limits,
            vocab_size=spec.vocab_size,
            eos_token_ids=list(spec.eos_token_ids),
            device=self.device,
            graph_capturer=None
            if spec.moe
            else self.device.graph_capturer,  # experts are counted on the host
        )


def _resolve_limits(
    config: EngineConfig, factory: _ExecutorFactory, key: str, mapped_bytes: int
) -> EngineLimits:
    """What fits beside the largest step and the packed weights that are mapped. ValueError: nothing does.

    key: tells the model and its formats apart, see `Device.working_bytes`.
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
        kv_memory_fraction=device.kv_share / (1 + config.colocated_replicas),
    )


def _warm_up(
    executor: TorchExecutor,
    limits: EngineLimits,
    sizes: tuple[int, ...],
    progress: Callable[[str, float], None],
) -> None:
    """Take every code path that has a first time: a prefill of each of these sizes that fits."""
    fitting = [size for size in sizes if size <= _max_prefill_tokens(limits)]
    for number, size in enumerate(fitting):
        _run_prefill(executor, limits, [size], WARMUP_PARAMS)
        progress("warming up", (number + 1) / len(fitting))
    executor.reset()


def _limit_context(spec: ModelArchitecture, config: EngineConfig) -> ModelArchitecture:
    """The model limited to the length asked for; its rope tables are built for that length."""
    asked = config.max_model_len
    if asked is None or asked >= spec.max_model_len:
        return spec
    return replace(spec, max_model_len=asked)


def choose_device(config: EngineConfig) -> Device:
    """The device that the settings name; "auto" takes a GPU where torch sees one."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return create_cpu_device(config.threads, config.colocated_replicas)
    from argosy.engine.execution.gpu.cuda_runtime import create_cuda_device

    return create_cuda_device()


def _open_pack_cache(
    config: EngineConfig, spec: ModelArchitecture, identity: tuple[str, str, str]
) -> PackCache:
    """The packed weights of this checkpoint, dtype and packing."""
    if not identity[-1]:
        return PackCache()
    return open_pack_cache(
        identity, required_bytes=spec.num_parameters * 2, limit_bytes=config.pack_cache_bytes
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_prefill_tokens(limits: EngineLimits) -> int:
    """The longest prefill that one step can do."""
    return min(limits.max_model_len - 1, limits.max_step_tokens)


def _run_largest_step(executor: TorchExecutor, limits: EngineLimits) -> None:
    """Fill the token budget with as many sequences as may run, each sampled in the costliest way."""
    left, counts = limits.max_step_tokens, []
    for others in reversed(range(limits.max_seqs)):
        counts.append(min(_max_prefill_tokens(limits), left - others))
        left -= counts[-1]
    _run_prefill(executor, limits, counts, COSTLIEST_PARAMS)


def _run_prefill(
    executor: TorchExecutor, limits: EngineLimits, counts: list[int], params: SamplingParams
) -> None:
    """Compute sequences of so many tokens in one step, all in block 0: what it gives means nothing."""
    rows = list(range(len(counts)))
    blocks = [[0] * -(-count // limits.block_size) for count in counts]
    plan = StepPlan(
        0,
        rows=rows,
        starts=[0] * len(rows),
        counts=counts,
        sample_flags=[True] * len(rows),
        admissions=[
            AdmittedSequence(row, [0] * count, count, params, pages)
            for row, count, pages in zip(rows, counts, blocks, strict=True)
        ],
    )
    executor.submit(plan).result()
