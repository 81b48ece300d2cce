"""Stages of `benchmarks.gpu_session`, each in a process of its own: `python -m benchmarks.gpu_stages NAME [--toy]`.

Each prints rows as lines of JSON, with every raw timing. With --toy, Triton's interpreter stands for the GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn import functional as F

from argosy.engine.engine_config import DEFAULT_BLOCK_SIZE, EngineConfig, WeightFormat
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.loading import executor_loader
from argosy.engine.execution.loading.self_test import run_self_test
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from benchmarks.attention import Shape as Heads
from benchmarks.attention import make_batch, sdpa
from benchmarks.checkpoints import SHAPES, declare_checkpoint, make_checkpoint, random_tensor

if TYPE_CHECKING:
    from torch import Tensor

REPEATS, WARM_UP = 20, 5
CACHE_BYTES = 256 << 20
"""Weights that are read in turns, so that they come from memory and not from the cache of a GPU."""
TOY_LIMITS: dict[str, Any] = {"num_blocks": 64, "max_seqs": 2, "max_step_tokens": 64}
MAX_RELATIVE_ERROR = 0.02
"""Largest error of a module's output in bfloat16, as a share of the float32 output's norm."""
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def emit(**row: object) -> None:
    """Print a row."""
    print(json.dumps(row), flush=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """Device of a stage, and the sizes that it measures."""

    device: Device
    toy: bool

    def choose(self, full: Sequence[int], toy: Sequence[int]) -> Sequence[int]:
        """Return the sizes of a real GPU, or those of the interpreter."""
        return toy if self.toy else full

    def seconds(self, work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
        """Return the seconds of device time of each call, after some calls that are not counted."""
        repeats, warm_up = (2, 1) if self.toy else (repeats, WARM_UP)
        for _ in range(warm_up):
            work()
        events = [self.device.record_event()]
        for _ in range(repeats):
            work()
            events.append(self.device.record_event())
        events[-1].synchronize()
        return [after.seconds_since(before) for before, after in itertools.pairwise(events)]

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return random numbers on the device."""
        return torch.randn(shape, device=self.device.torch_device).to(dtype)


def create_setting(*, toy: bool) -> Setting:
    """Create the device. Triton reads the variable that chooses its interpreter when it is imported."""
    if toy:
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.engine.gpu import interpreter
        from tests.engine.gpu.host_device import HostDevice

        interpreter.install()
        return Setting(HostDevice(), toy)
    from argosy.engine.execution.kernels.gpu.device import create_cuda_device

    return Setting(create_cuda_device(), toy)


# --- environment and tests --------------------------------------------------------------------------


def measure_environment(setting: Setting) -> None:
    """Report versions, and the ceilings of copies and of matrix products."""
    names = ("torch", "triton", "transformers", "numpy", "argosy")
    emit(versions={name: _version(name) for name in names}, device=setting.device.name)
    (size,) = setting.choose([1 << 30], [1 << 16])
    source = setting.random(size // 2)
    out = torch.empty_like(source)
    emit(ceiling="copy", bytes=2 * size, seconds=setting.seconds(lambda: out.copy_(source)))
    (side,) = setting.choose([8192], [64])
    a, b = setting.random(side, side), setting.random(side, side)
    emit(ceiling="matmul", operations=2 * side**3, seconds=setting.seconds(lambda: a @ b))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run_tests(setting: Setting) -> None:
    """Run the kernel tests on the device, and report each failure."""
    paths = ["tests/engine/gpu/test_elementwise.py" if setting.toy else "tests/engine/gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-m", "real_gpu", *paths]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = process.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            emit(case=line, correct=False)
    emit(case=lines[-1] if lines else process.stderr[-400:], correct=process.returncode == 0)


# --- correctness ------------------------------------------------------------------------------------


@contextmanager
def engine_core(
    device: Device,
    path: Path,
    *,
    random_weights: bool = False,
    **options: Any,  # noqa: ANN401
) -> Iterator[EngineCore]:
    """Load an engine core on a device. Declared weights are made on the device."""
    gc.collect()  # frees the memory of an earlier core
    settings: dict[str, Any] = {"model": str(path), "warmup": False} | options
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(executor_loader, "choose_device", return_value=device)
        )
        if random_weights:
            stack.enter_context(mock.patch.object(RandomReader, "device", device.torch_device))
            stack.enter_context(
                mock.patch.object(executor_loader, "CheckpointReader", RandomReader)
            )
        core = EngineCore(EngineConfig(**settings), time.monotonic, lambda _activity, _done: None)
    try:
        yield core
    finally:
        core.close()


class RandomReader(CheckpointReader):
    """Reader of a declared checkpoint, which makes its weights on the device."""

    device = torch.device("cpu")

    def read_tensor(self, parts: Sequence[StoredPart], shape: tuple[int, ...]) -> Tensor:
        """Return random weights instead of the hole in the file."""
        self.check_shape(parts, shape)
        return random_tensor(parts[0].name, shape, self.device)


def check_outputs(setting: Setting) -> None:
    """Compare the engine with float32 on the CPU, and each way to compute a sequence with the sequence alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint("toy", Path(folder)) if setting.toy else BUNDLED_MODEL
        small = TOY_LIMITS if setting.toy else {}
        requests = _greedy_requests(setting)
        expected = _run_alone(create_cpu_device(1), path, requests, dtype="float32", **small)
        _check_self_tests(setting, path)
        outputs: dict[str, dict[str, Output]] = {}
        formats: dict[str, dict[str, Any]] = {
            "bfloat16": {},
            "eager": {"graphs": False},
            "fp8 weights": {"quantize": "fp8"},
            "fp8 KV": {"kv_dtype": "fp8", "kv_scales": "unit"},
            "int8 KV": {"kv_dtype": "int8"},
        }
        outputs = {}
        for name, options in formats.items():
            device = setting.device
            capture = device.capture_graph if options.pop("graphs", True) else None
            with mock.patch.object(device, "capture_graph", capture):
                outputs[name] = _run_alone(device, path, requests, **small, **options)
            emit(case=name, **_agreement(outputs[name], expected))
        emit(case="eager = graph", correct=outputs["eager"] == outputs["bfloat16"])
        find_first_difference(setting, path)


def _run_alone(
    device: Device,
    path: Path,
    requests: Sequence[EngineRequest],
    **options: Any,  # noqa: ANN401
) -> dict[str, Output]:
    """Run requests on a core of their own, whose memory is free afterwards."""
    with engine_core(device, path, **options) as core:
        return run(core, requests)


def _greedy_requests(setting: Setting) -> list[EngineRequest]:
    generator = torch.Generator().manual_seed(1)
    lengths = setting.choose([1, 7, 40, 200], [1, 19])
    (output,) = setting.choose([64], [4])
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, logprobs=0)
    return [
        EngineRequest(
            id=f"length {length}",
            prompt=torch.randint(3, 60, (length,), generator=generator).tolist(),
            params=params,
        )
        for length in lengths
    ]


Output = tuple[list[int], list[float]]
"""Tokens of a request, and their log-probabilities."""


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, Output]:
    """Run requests together to their ends.

    Raises:
        RuntimeError: A request failed.
    """
    outputs: dict[str, Output] = {request.id: ([], []) for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for delta in core.step().deltas:
            if delta.error:
                raise RuntimeError(delta.error)
            tokens, logprobs = outputs[delta.id]
            tokens += delta.tokens
            logprobs += [each.logprob for each in delta.logprobs]
    return outputs


def _agreement(actual: dict[str, Output], expected: dict[str, Output]) -> dict[str, object]:
    """Return how many tokens agree before the first other one, and the errors of their log-probabilities."""
    agreeing, total, errors = 0, 0, []
    for name, (tokens, logprobs) in expected.items():
        got, got_logprobs = actual[name]
        same = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(tokens, got, strict=True)
            )
        )
        agreeing, total = agreeing + same, total + len(tokens)
        errors += [abs(a - b) for a, b in zip(logprobs[:same], got_logprobs[:same], strict=True)]
    return {"greedy_agreement": agreeing / total, "logprob_errors": errors}


def _check_self_tests(setting: Setting, path: Path) -> None:
    """Report whether a sequence's logits are the same alone, batched, chunked and after a prefix hit."""
    kinds: list[tuple[WeightFormat | None, torch.dtype]] = [
        (None, torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
    ]
    for quantize, kv_dtype in kinds[:1] if setting.toy else kinds:
        decoder = load(setting.device, path, torch.bfloat16, quantize)
        result = run_self_test(
            decoder,
            setting.device,
            max_model_len=20 if setting.toy else decoder.architecture.max_model_len,
            kv_dtype=kv_dtype,
        )
        emit(
            case=f"self-test, weights {quantize or 'bfloat16'}, KV {kv_dtype}",
            correct=result.is_exact,
            failed_cases=result.failed_cases,
            median_difference=result.median_difference,
        )


def load(
    device: Device, path: Path, dtype: torch.dtype, quantize: WeightFormat | None = None
) -> Decoder:
    """Load the decoder of a checkpoint."""
    from argosy.engine.execution.architectures.decoder_config import read_architecture
    from argosy.engine.execution.loading.weight_loader import load_decoder

    reader = CheckpointReader(path)
    return load_decoder(
        reader, read_architecture(path), device, dtype, lambda _: None, quantize=quantize
    )


def find_first_difference(setting: Setting, path: Path) -> None:
    """Compare the output of each module with float32 on the CPU, and report the first that differs.

    Every module computes its float32 input of the CPU, rounded to bfloat16, so that errors do not add up over layers.
    """
    reference = load(create_cpu_device(1), path, torch.float32)
    decoder = load(setting.device, path, torch.bfloat16)
    records = _record_modules(reference)
    batch = make_batch([(19, 19)], 16)
    batch = replace(batch, logit_index=torch.arange(19), token_ids=torch.arange(3, 22))
    attention = reference.create_attention(2, 16, torch.float32)
    attention.ensure_block(1)
    reference.forward(batch, attention)
    modules = dict(decoder.named_modules())
    worst = 0.0
    for name, inputs, output in records:
        arguments = [_to_bfloat16(each, setting.device.torch_device) for each in inputs]
        with torch.inference_mode():
            actual = modules[name].forward(*arguments)
        for got, wanted in zip(_tensors(actual), _tensors(output), strict=True):
            error = float((got.float().cpu() - wanted).norm() / wanted.norm().clamp(min=1e-9))
            worst = max(worst, error)
            if not error < MAX_RELATIVE_ERROR:
                emit(case="modules", correct=False, first=name, relative_error=error)
                return
    emit(case="modules", correct=True, compared=len(records), worst_relative_error=worst)


def _record_modules(model: Decoder) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Record name, inputs and output of each call of a module that takes only tensors."""
    records: list[tuple[str, tuple[Any, ...], Any]] = []
    for name, module in model.named_modules():
        if name and not any(module.children()):
            module.forward = _recorded(records, name, module.forward)
    return records


def _recorded(
    records: list[tuple[str, tuple[Any, ...], Any]], name: str, forward: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:  # noqa: ANN401 - those of any module
        before = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in inputs)
        output = forward(*inputs)
        records.append((name, before, [each.clone() for each in _tensors(output)]))
        return output

    return call


def _tensors(value: object) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _to_bfloat16(value: object, device: torch.device) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, torch.bfloat16 if value.is_floating_point() else value.dtype)


# --- kernels ----------------------------------------------------------------------------------------


def measure_kernels(setting: Setting) -> None:
    """Measure linears, attention and sampling of the 8B shape, each beside torch's."""
    _measure_linears(setting)
    _measure_attention(setting)
    _measure_sampling(setting)


def _measure_linears(setting: Setting) -> None:
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate": (14336, 4096), "down": (4096, 14336)}
    shapes |= {"head": (128256, 4096)}
    if setting.toy:
        shapes = {"qkv": (64, 32)}
    formats: tuple[WeightFormat | None, ...] = (None, "fp8", "int8", "int4")
    for (name, (outs, cols)), weight_format in itertools.product(shapes.items(), formats):
        copies = 1 if setting.toy else -(-CACHE_BYTES // (2 * outs * cols))
        weights = [setting.random(outs, cols) for _ in range(copies)]
        row = {"linear": name, "outs": outs, "cols": cols, "format": weight_format or "bfloat16"}
        try:
            ours = [setting.device.create_linear(weight, None, weight_format) for weight in weights]
        except ValueError as error:
            emit(**row, refused=str(error))
            continue
        for rows in setting.choose([1, 16, 64, 256, 2048], [1, 3]):
            x = setting.random(rows, cols)
            timings = {"seconds": setting.seconds(_in_turns(ours, x))}
            if weight_format is None:
                torch_linears = [partial(F.linear, weight=weight) for weight in weights]
                timings["torch_seconds"] = setting.seconds(_in_turns(torch_linears, x))
            emit(**row, rows=rows, **timings)


def _in_turns(linears: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], Tensor]:
    turns = itertools.cycle(linears)
    return lambda: next(turns)(x)


def _measure_attention(setting: Setting) -> None:
    heads = Heads(2, 1, 32) if setting.toy else Heads(32, 8, 128)
    lengths = setting.choose([1024, 8192, 102_400], [20])
    cases = [{(1, length): n} for n in setting.choose([1, 8, 64], [1, 2]) for length in lengths]
    cases += [{(length, length): 1} for length in setting.choose([2048, 8192], [20])]
    cases += [{(new, length): 8} for new in setting.choose([5, 16], [3]) for length in lengths[:2]]
    cases += [{(1, lengths[0]): n, (1, lengths[-1]): 1} for n in setting.choose([7, 63], [1])]
    for case in cases:
        chunks = [chunk for chunk, sequences in case.items() for _ in range(sequences)]
        cache_bytes = 4 * sum(length for _, length in chunks) * heads.kv_heads * heads.head_dim
        name = " and ".join(f"{n} x {new} of {length}" for (new, length), n in case.items())
        row = {"attention": name, "cache_bytes": cache_bytes}
        try:
            _measure_attention_case(setting, heads, chunks, row)
        except torch.OutOfMemoryError as error:
            emit(**row, error=str(error).splitlines()[0])


def _measure_attention_case(
    setting: Setting, heads: Heads, chunks: list[tuple[int, int]], row: dict[str, Any]
) -> None:
    batch = _move(make_batch(chunks, 16), setting.device.torch_device)
    attention = setting.device.create_attention(
        KvCacheShape(
            num_layers=1,
            num_heads=heads.heads,
            num_kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            num_blocks=batch.block_tables.numel(),
            block_size=16,
            dtype=torch.bfloat16,
        )
    )
    tokens = len(batch.positions)
    q = setting.random(tokens, heads.heads, heads.head_dim)
    k, v = (setting.random(tokens, heads.kv_heads, heads.head_dim) for _ in range(2))
    params = AttentionParams(0, heads.head_dim**-0.5)
    seconds = setting.seconds(lambda: attention(q, k, v, batch, params, None))
    emit(**row, seconds=seconds)
    if sum(length for _, length in chunks) <= 1 << 20:  # the peer copies its keys for four layers
        with torch.device(setting.device.torch_device):
            peer = sdpa(heads, chunks, torch.bfloat16)
        emit(**row, torch_seconds_of_4_layers=setting.seconds(peer))


def _move(batch: Batch, device: torch.device) -> Batch:
    tensors = {
        field.name: value.to(device)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **tensors)  # type: ignore[arg-type]  # each has the type of its field


def _measure_sampling(setting: Setting) -> None:
    import numpy as np

    from argosy.engine.execution.kernels.gpu.sampling import TritonSamplingOps
    from argosy.engine.execution.kernels.torch.sampling_ops import SamplingMetadata

    vocab = 300 if setting.toy else 128_256
    for rows in setting.choose([1, 64, 256], [2]):
        logits = setting.random(rows, vocab, dtype=torch.float32)
        for name, top_p, top_k in (
            ("plain", 1.0, vocab),
            ("top-p 0.9", 0.9, vocab),
            ("top-k 50", 1.0, 50),
            ("top-k 50, top-p 0.9", 0.9, 50),
        ):
            metadata = SamplingMetadata(
                np.full(rows, 1.44, np.float32),
                np.full(rows, top_k, np.int64),
                np.full(rows, top_p, np.float32),
                np.full(rows, -np.inf, np.float32),
                np.linspace(0, 0.999, rows),
            )
            ops = TritonSamplingOps(setting.device)
            timings = setting.seconds(lambda: ops.sample(logits, metadata))  # noqa: B023
            emit(sampling=name, rows=rows, vocab=vocab, seconds=timings)


# --- whole models -----------------------------------------------------------------------------------


@contextmanager
def random_core(setting: Setting, **options: object) -> Iterator[EngineCore]:
    """Load the largest declared shape that fits, with random weights, and report it."""
    small = TOY_LIMITS if setting.toy else {"max_seqs": 256}
    for shape in ("toy",) if setting.toy else ("llama-8b", "qwen2-0.5b"):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            started_at = time.monotonic()
            try:
                path = declare_checkpoint(shape, Path(folder))
                core = stack.enter_context(
                    engine_core(setting.device, path, random_weights=True, **(small | options))
                )
            except (torch.OutOfMemoryError, ValueError) as error:
                emit(shape=shape, error=str(error).splitlines()[0])
                continue
            emit(shape=shape, load_s=time.monotonic() - started_at, backend=core.info.backend)
            yield core
            return
    raise SystemExit("no shape could be loaded")


def measure_model(setting: Setting) -> None:
    """Measure decode steps by batch size, with graphs and without, and the time to the first token."""
    _measure_mode(setting, "graph")
    _measure_mode(setting, "eager")  # the memory of the first core is free again


def _measure_mode(setting: Setting, mode: str) -> None:
    capture = setting.device.capture_graph if mode == "graph" else None
    with (
        mock.patch.object(setting.device, "capture_graph", capture),
        random_core(setting) as core,
    ):
        for batch in setting.choose([1, 8, 64, 256], [2]):
            _measure_decode(setting, core, batch, mode)
        for length in setting.choose([128, 1024, 8192], [20]) if mode == "graph" else ():
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            started_at = time.perf_counter()
            run(core, [_request(core, f"prefill {length}", length, params)])
            emit(prefill=length, ttft_s=time.perf_counter() - started_at)


def _request(core: EngineCore, name: str, length: int, params: SamplingParams) -> EngineRequest:
    prompt = torch.randint(3, core.info.vocab_size, (length,)).tolist()
    return EngineRequest(id=name, prompt=prompt, params=params)


def _measure_decode(setting: Setting, core: EngineCore, batch: int, mode: str) -> None:
    (steps,) = setting.choose([REPEATS], [2])
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 30 if not setting.toy else 12, ignore_eos=True
    )
    for number in range(batch):
        core.add(_request(core, f"{mode} {batch} {number}", 4, params))
    generated: Counter[str] = Counter()
    while len(generated) < batch or min(generated.values()) < 3:
        generated.update(delta.id for delta in core.step().deltas)
    marks = [time.perf_counter()]
    for _ in range(steps):
        core.step()
        marks.append(time.perf_counter())
    emit(decode=batch, mode=mode, seconds=[b - a for a, b in itertools.pairwise(marks)])
    with torch.profiler.profile() as profile:
        core.step()
    calls = Counter({event.key: event.count for event in profile.key_averages()})
    emit(
        decode=batch,
        mode=mode,
        launches=sum(calls[name] for name in LAUNCHES),
        synchronisations=sum(calls[name] for name in SYNCHRONISATIONS),
        calls=dict(calls.most_common(40)),
    )
    while core.has_work:
        core.step()


def measure_load(setting: Setting) -> None:
    """Measure streams while long prompts arrive, with and without top-p, and prompts that are in host memory."""
    with random_core(setting) as core:
        for top_p in (1.0, 0.9):
            _measure_mixed(setting, core, top_p)
    _measure_restore(setting)


def _measure_mixed(setting: Setting, core: EngineCore, top_p: float) -> None:
    (streams,) = setting.choose([32], [2])
    (length,) = setting.choose([2048], [20])
    (tokens,) = setting.choose([200], [6])
    params = SamplingParams(
        temperature=1.0, top_p=top_p, seed=1, max_tokens=tokens, ignore_eos=True
    )
    for number in range(streams):
        core.add(_request(core, f"stream {number}", 16, params))
    arrivals = [
        _request(core, f"prompt {number}", length, params) for number in range(streams // 4 or 1)
    ]
    times: dict[str, list[float]] = defaultdict(list)
    steps = 0
    while core.has_work or arrivals:
        steps += 1
        if arrivals and steps % (2 if setting.toy else 10) == 0:
            core.add(arrivals.pop())
        for delta in core.step().deltas:
            if delta.error:
                raise RuntimeError(delta.error)
            times[delta.id].append(time.perf_counter())
    gaps = [b - a for stamps in times.values() for a, b in itertools.pairwise(stamps)]
    emit(load=f"{streams} streams", top_p=top_p, steps=steps, seconds_between_tokens=gaps)


def _measure_restore(setting: Setting) -> None:
    """Measure the time to the first token of a prompt that is computed, evicted by another, and restored."""
    (length,) = setting.choose([8192], [40])
    (host_bytes,) = setting.choose([4 << 30], [1 << 20])
    blocks = length // DEFAULT_BLOCK_SIZE + 2
    with random_core(setting, num_blocks=blocks, host_kv_bytes=host_bytes) as core:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        first, other = (_request(core, name, length, params) for name in ("computed", "other"))
        restored = EngineRequest(id="restored", prompt=first.prompt, params=params)
        for request in (first, other, restored):
            started_at = time.perf_counter()
            run(core, [request])
            emit(prompt=request.id, length=length, ttft_s=time.perf_counter() - started_at)
        emit(restored_tokens=core.scheduler.kv_cache.host_hit_tokens)


def measure_peers(setting: Setting) -> None:
    """Measure transformers with the same shape and random weights."""
    import transformers

    config = dict(SHAPES["toy" if setting.toy else "llama-8b"])
    device = setting.device.torch_device
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16)
    (tokens,) = setting.choose([32], [2])
    for batch in setting.choose([1, 8, 64], [1]):
        prompt = torch.randint(3, 60, (batch, 16), device=device)
        for count in (1, tokens):
            begin = time.perf_counter()
            model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            emit(
                peer="transformers", batch=batch, tokens=count, seconds=time.perf_counter() - begin
            )


STAGES: dict[str, Callable[[Setting], None]] = {
    "environment": measure_environment,
    "tests": run_tests,
    "correctness": check_outputs,
    "kernels": measure_kernels,
    "model": measure_model,
    "load": measure_load,
    "peers": measure_peers,
}


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=tuple(STAGES))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", cache)
        STAGES[options.stage](create_setting(toy=options.toy))


if __name__ == "__main__":
    main()
