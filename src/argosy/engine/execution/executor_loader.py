"""From settings to an executor that is loaded, sized and warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from argosy.engine.engine_config import EngineConfig, EngineLimits, resolve
from argosy.engine.execution.architecture_config import read_spec
from argosy.engine.execution.checkpoint import digest, fingerprint, locate
from argosy.engine.execution.decoder import Decoder
from argosy.engine.execution.device import Device, cpu_device
from argosy.engine.execution.executor import Executor, TorchExecutor
from argosy.engine.execution.model_architecture import ModelSpec
from argosy.engine.execution.pack_cache import PackCache, open_packs
from argosy.engine.execution.weight_loader import load_decoder
from argosy.engine.scheduling import Admission, Plan
from argosy.protocol import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARM = SamplingParams(max_tokens=1, temperature=0.0)
COSTLY = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=1)


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded model and what it turned out to be."""

    executor: Executor
    spec: ModelSpec
    limits: EngineLimits
    kv_bytes_per_token: int
    load_s: float
    backend: str
    fingerprint: str
    digest: str
    inflight: int
    """Steps under way while the next one is planned."""
    ridge_tokens: int
    """See `Device`."""


def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Built:
    """Load the model and size its KV cache. Raises ValueError or OSError with the remedy."""
    begin = time.monotonic()
    path = locate(config.model, config.revision)
    state = fingerprint(path)
    spec = _within(read_spec(path), config)
    progress("preparing the kernels", 0.0)  # which are compiled at the first start
    device = choose_device(config)
    dtype = device.default_dtype if config.dtype == "auto" else DTYPES[config.dtype]
    held = " ".join([_name(dtype), *([config.quantize] if config.quantize else [])])
    with _packs(config, spec, (state, held, device.packing(dtype))) as packs:
        decoder = load_decoder(
            path,
            spec,
            device,
            dtype,
            lambda done: progress("loading weights", done),
            quantize=config.quantize,
            packs=packs,
        )
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
    parts = _Parts(decoder, kv_dtype, device)
    if kv_dtype != dtype:
        held += f", KV {_name(kv_dtype)}"
    limits = _sized(config, parts, f"{state} {held}", packs.mapped_bytes)
    executor = parts.executor(limits)
    if config.warmup:
        _warm_up(executor, limits, device.warm_sizes, progress)
    return Built(
        executor=executor,
        spec=spec,
        limits=limits,
        kv_bytes_per_token=parts.kv_bytes_per_token,
        load_s=time.monotonic() - begin,
        fingerprint=f"{state} {held}",
        digest=digest(path),
        inflight=device.inflight if config.inflight is None else config.inflight,
        ridge_tokens=device.ridge_tokens,
        backend=f"{device.name} {held} {executor.attention_name}",
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What executors of one model are made of."""

    decoder: Decoder
    kv_dtype: torch.dtype
    device: Device

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.decoder.spec.kv_bytes_per_token(self.kv_dtype.itemsize)

    def executor(self, limits: EngineLimits) -> TorchExecutor:
        """An executor with a KV cache of its own."""
        spec = self.decoder.spec
        return TorchExecutor(
            self.decoder,
            self.decoder.attention_for(limits.num_blocks, limits.block_size, self.kv_dtype),
            limits=limits,
            vocab_size=spec.vocab_size,
            eos_token_ids=list(spec.eos_token_ids),
            device=self.device,
            recorder=None if spec.moe else self.device.recorder,  # experts are counted on the host
        )


def _sized(config: EngineConfig, parts: _Parts, key: str, mapped_bytes: int) -> EngineLimits:
    """What fits beside the largest step and the packed weights that are mapped. ValueError: nothing does.

    key: tells the model and its formats apart, see `Device.working_bytes`.
    """
    device, model_max_len = parts.device, parts.decoder.spec.max_model_len
    probe = EngineLimits(
        max_model_len=model_max_len,
        max_seqs=config.max_seqs,
        max_step_tokens=max(config.max_step_tokens, config.max_seqs),
        block_size=config.block_size,
        num_blocks=1,
        host_blocks=0,
    )
    working_bytes = device.working_bytes(
        f"{key} {probe}", lambda: _largest_step(parts.executor(probe), probe)
    )
    return resolve(
        config,
        model_max_len=model_max_len,
        kv_bytes_per_token=parts.kv_bytes_per_token,
        free_bytes=max(0, device.free_bytes() - mapped_bytes - working_bytes),
        kv_share=device.kv_share / (1 + config.neighbours),
    )


def _warm_up(
    executor: TorchExecutor,
    limits: EngineLimits,
    sizes: tuple[int, ...],
    progress: Callable[[str, float], None],
) -> None:
    """Take every code path that has a first time: a prefill of each of these sizes that fits."""
    fitting = [size for size in sizes if size <= _longest(limits)]
    for number, size in enumerate(fitting):
        _prefill(executor, limits, [size], WARM)
        progress("warming up", (number + 1) / len(fitting))
    executor.reset()


def _within(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model limited to the length asked for; its rope tables are built for that length."""
    asked = config.max_model_len
    if asked is None or asked >= spec.max_model_len:
        return spec
    return replace(spec, max_model_len=asked)


def choose_device(config: EngineConfig) -> Device:
    """The device that the settings name; "auto" takes a GPU where torch sees one."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return cpu_device(config.threads, config.neighbours)
    from argosy.engine.execution.gpu.cuda_runtime import cuda_device

    return cuda_device()


def _packs(config: EngineConfig, spec: ModelSpec, identity: tuple[str, str, str]) -> PackCache:
    """The packed weights of this checkpoint, dtype and packing."""
    if not identity[-1]:
        return PackCache()
    return open_packs(identity, need_bytes=spec.parameters * 2, limit_bytes=config.pack_cache_bytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _longest(limits: EngineLimits) -> int:
    """The longest prefill that one step can do."""
    return min(limits.max_model_len - 1, limits.max_step_tokens)


def _largest_step(executor: TorchExecutor, limits: EngineLimits) -> None:
    """Fill the token budget with as many sequences as may run, each sampled in the costliest way."""
    left, counts = limits.max_step_tokens, []
    for others in reversed(range(limits.max_seqs)):
        counts.append(min(_longest(limits), left - others))
        left -= counts[-1]
    _prefill(executor, limits, counts, COSTLY)


def _prefill(
    executor: TorchExecutor, limits: EngineLimits, counts: list[int], params: SamplingParams
) -> None:
    """Compute sequences of so many tokens in one step, all in block 0: what it gives means nothing."""
    rows = list(range(len(counts)))
    blocks = [[0] * -(-count // limits.block_size) for count in counts]
    plan = Plan(
        0,
        rows=rows,
        starts=[0] * len(rows),
        counts=counts,
        samples=[True] * len(rows),
        admitted=[
            Admission(row, [0] * count, count, params, pages)
            for row, count, pages in zip(rows, counts, blocks, strict=True)
        ],
    )
    executor.launch(plan).result()
