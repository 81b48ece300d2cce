"""From settings to an executor that is loaded, sized and warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from argosy.engine.config import EngineConfig, EngineLimits, resolve
from argosy.engine.execution.checkpoint import fingerprint, locate
from argosy.engine.execution.device import Device, cpu_device
from argosy.engine.execution.executor import Executor, TorchExecutor
from argosy.engine.execution.families import ModelSpec, read_spec
from argosy.engine.execution.weights import load_decoder
from argosy.engine.scheduling import Admission, Plan
from argosy.protocol import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARM_SIZES = (1, 2, 3, 4, 8, 16, 32, 64)


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
    inflight: int
    """Steps under way while the next one is planned."""


def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Built:
    """Load the model and size its KV cache. Raises ValueError or OSError with the remedy."""
    begin = time.monotonic()
    path = locate(config.model, config.revision)
    state = fingerprint(path)
    spec = _within(read_spec(path), config)
    device = _device(config)
    dtype = device.default_dtype if config.dtype == "auto" else DTYPES[config.dtype]
    decoder = load_decoder(
        path, spec, device, dtype, lambda done: progress("loading weights", done)
    )
    kv_bytes_per_token = spec.kv_bytes_per_token(dtype.itemsize)
    limits = resolve(
        config,
        model_max_len=spec.max_model_len,
        kv_bytes_per_token=kv_bytes_per_token,
        free_bytes=device.free_bytes(),
    )
    attention = decoder.attention_for(limits.num_blocks, limits.block_size)
    executor = TorchExecutor(
        decoder,
        attention,
        limits=limits,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        device=device,
    )
    if config.warmup:
        _warm_up(executor, limits, lambda done: progress("warming up", done))
    return Built(
        executor=executor,
        spec=spec,
        limits=limits,
        kv_bytes_per_token=kv_bytes_per_token,
        load_s=time.monotonic() - begin,
        fingerprint=state,
        inflight=device.inflight if config.inflight is None else config.inflight,
        backend=f"{device.name} {str(dtype).removeprefix('torch.')} {attention.name}",
    )


def _within(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model limited to the length asked for; its rope tables are built for that length."""
    asked = config.max_model_len
    if asked is None or asked >= spec.max_model_len:
        return spec
    return replace(spec, max_model_len=asked)


def _device(config: EngineConfig) -> Device:
    if config.device == "cuda":
        msg = "device 'cuda' is not served yet; use device 'cpu' or 'auto'"
        raise ValueError(msg)
    return cpu_device(config.threads)


def _warm_up(
    executor: TorchExecutor, limits: EngineLimits, progress: Callable[[float], None]
) -> None:
    """Run prefills of the common sizes once, so that no user pays for first-time code paths."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    sizes = [n for n in WARM_SIZES if n <= min(limits.max_model_len - 1, limits.max_step_tokens)]
    for number, size in enumerate(sizes):
        blocks = list(range(min(limits.num_blocks, -(-size // limits.block_size))))
        plan = Plan(
            0,
            rows=[0],
            starts=[0],
            counts=[size],
            samples=[True],
            admitted=[Admission(0, [0] * size, size, params, blocks)],
        )
        executor.launch(plan).result()
        progress((number + 1) / len(sizes))
    executor.reset()
