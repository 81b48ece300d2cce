"""Loader that turns engine settings into a loaded, sized and warmed-up executor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import structlog
import torch

from argosy.engine.engine_config import (
    LOADING_WEIGHTS,
    VERIFYING_MODEL,
    WARMING_UP,
    EngineConfig,
    EngineLimits,
    resolve_limits,
)
from argosy.engine.execution.architectures.architecture_config import read_architecture
from argosy.engine.execution.architectures.encoder_architecture import EncoderArchitecture
from argosy.engine.execution.architectures.model_architecture import ModelArchitecture
from argosy.engine.execution.architectures.pooling_layout import (
    PoolingLayout,
    describe_pooling,
    read_pooling_architecture,
    read_pooling_layout,
)
from argosy.engine.execution.checkpoint_formats.checkpoint import (
    checkpoint_fingerprint,
    resolve_model_path,
)
from argosy.engine.execution.checkpoint_formats.checkpoint_reader import (
    CheckpointReader,
    StoredIntegers,
)
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.decoders.generic_decoder import GenericDecoder
from argosy.engine.execution.encoders.encoder import Encoder
from argosy.engine.execution.executor.executor import Executor, TorchExecutor
from argosy.engine.execution.executor.pooler import Pooler, load_pooler
from argosy.engine.execution.executor.pooling_executor import PoolingExecutor
from argosy.engine.execution.kernels.cpu.compute_threads import ComputeThreads
from argosy.engine.execution.kernels.device import Device, create_cpu_device
from argosy.engine.execution.kernels.pack_cache import PackCache, open_pack_cache
from argosy.engine.execution.loading.arithmetic import describe_arithmetic
from argosy.engine.execution.loading.memory_estimate import MemoryNeeds, check_memory
from argosy.engine.execution.loading.model_selection import (
    AnyArchitecture,
    ModelSelection,
    build_transformers_model,
    select_implementation,
)
from argosy.engine.execution.loading.self_test import (
    MAX_MEDIAN_DIFFERENCE,
    NUM_SEQUENCES,
    find_or_run,
    run_self_test,
)
from argosy.engine.execution.loading.weight_loader import load_decoder, load_encoder
from argosy.engine.grammar import CompiledGrammar
from argosy.engine.pooling import PoolingInfo
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.model_store import stored_digest, verify_model
from argosy.protocol import ArithmeticIdentity, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from argosy.engine.execution.kernels.recurrent_states import RecurrentStates

    AnyDecoder = Decoder | Encoder | GenericDecoder

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARMUP_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
COSTLIEST_PARAMS = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=1)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """Loaded executor, with the properties of its model and device."""

    executor: Executor
    architecture: AnyArchitecture
    limits: EngineLimits
    load_s: float
    backend: str
    fingerprint: str
    arithmetic: ArithmeticIdentity
    """Identity of everything that decides the bytes of outputs."""
    accelerator: str
    """Description of the hardware in use."""
    is_exact: bool
    """Whether the self-test found that results depend only on their own sequence, bit for bit."""
    max_steps_in_flight: int
    """Number of steps in flight while the next one is planned."""
    ridge_tokens: int
    """Number of tokens whose computation takes as long as reading the weights."""
    compute_threads: ComputeThreads | None
    """CPU threads that compute, or None if the device is not a CPU."""
    pooling: PoolingInfo | None = None
    """Properties of a model that computes vectors, or None for one that generates."""


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
    path = resolve_model_path(config.model, config.revision, config.digest)
    digest = config.digest or stored_digest(path)
    if digest:
        verify_model(path, digest, on_progress=lambda done: progress(VERIFYING_MODEL, done))
    checkpoint_state = checkpoint_fingerprint(path)
    pooling_layout = read_pooling_layout(path, config.task)
    selection = (
        select_implementation(path, config.model_impl)
        if pooling_layout is None
        else ModelSelection("argosy", f"the layout of the checkpoint: {pooling_layout.head}")
    )
    log.info("model_implementation_selected", **asdict(selection))
    progress("preparing the kernels", 0.0)  # compiled at the first start
    device = choose_device(config)
    dtype = device.default_dtype if config.dtype == "auto" else DTYPES[config.dtype]
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
    if selection.implementation == "argosy":
        plan = _plan_own(path, config, pooling_layout)
    else:
        plan = _plan_generic(path, config, dtype)
    quantize = None if config.quantize == "none" else config.quantize
    stored = plan.stored if config.quantize is None and device.has_group_linear else None
    check_memory(
        MemoryNeeds(plan.architecture, config, dtype.itemsize, kv_dtype.itemsize, stored),
        device.free_bytes(),
        ("int8", "int4") if device.torch_device.type == "cpu" else ("fp8",),
    )
    stored_format = None if stored is None else stored.description
    format_name = " ".join([_dtype_name(dtype), *filter(None, (quantize, stored_format))])
    layout = (checkpoint_state, format_name, device.weight_layout_id(dtype))
    decoder, mapped_bytes = plan.load(
        device, dtype, layout, lambda done: progress(LOADING_WEIGHTS, done)
    )
    pooler = None
    if pooling_layout is not None and not isinstance(decoder, GenericDecoder):
        pooler = load_pooler(pooling_layout, decoder, CheckpointReader(path), device, dtype)
    factory = _ExecutorFactory(decoder, kv_dtype, device, pooler)
    if kv_dtype != dtype:
        format_name += f", KV {_dtype_name(kv_dtype)}"
    limits = _resolve_limits(config, factory, f"{checkpoint_state} {format_name}", mapped_bytes)
    if limits.state_snapshots is not None:
        log.info(
            "recurrent_states_allocated",
            sequences=limits.max_seqs,
            snapshots=limits.state_snapshots,
            state_bytes=decoder.architecture.state_bytes,
        )
    arithmetic = describe_arithmetic(
        path, decoder.architecture, device, dtype, kv_dtype, quantize, stored_format=stored_format
    )
    executor = factory.create_executor(limits, find_grammar)
    backend = f"{device.name} {format_name} {executor.attention_name}"
    is_exact = True
    if config.warmup:
        _warm_up(executor, limits, device.warmup_sizes, progress)
        is_exact = _test_exactness(path, factory, limits.max_model_len, arithmetic.id)
    return LoadedExecutor(
        executor=executor,
        architecture=decoder.architecture,
        limits=limits,
        load_s=time.monotonic() - started_at,
        fingerprint=f"{checkpoint_state} {arithmetic.id}",
        arithmetic=arithmetic,
        accelerator=device.name,
        max_steps_in_flight=_choose_max_steps_in_flight(config, device, pooler),
        ridge_tokens=device.ridge_tokens,
        compute_threads=device.compute_threads,
        backend=backend,
        is_exact=is_exact,
        pooling=None
        if pooling_layout is None
        else describe_pooling(
            pooling_layout, decoder.architecture.hidden_size, limits.max_model_len
        ),
    )


def _choose_max_steps_in_flight(config: EngineConfig, device: Device, pooler: Pooler | None) -> int:
    if pooler is not None:
        return 0  # the executor waits for its results
    if config.max_steps_in_flight is None:
        return device.max_steps_in_flight
    return config.max_steps_in_flight


@dataclass(frozen=True, slots=True)
class _ExecutorFactory:
    """Factory of executors for one loaded model."""

    decoder: AnyDecoder
    kv_dtype: torch.dtype
    device: Device
    pooler: Pooler | None = None

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a KV block."""
        architecture = self.decoder.architecture
        bytes_per_token = architecture.kv_bytes_per_token(self.kv_dtype.itemsize)
        return architecture.kv_layout.block_bytes(bytes_per_token, block_size)

    def create_states(self, num_rows: int, num_snapshots: int) -> RecurrentStates | None:
        """Allocate the states of recurrent layers, which only Argosy's own decoder has."""
        if not isinstance(self.decoder, Decoder):
            return None
        return self.decoder.create_states(num_rows, num_snapshots)

    def create_executor(
        self,
        limits: EngineLimits,
        find_grammar: Callable[[str], CompiledGrammar] | None = None,
    ) -> TorchExecutor | PoolingExecutor:
        """Create an executor with its own KV cache, if the model has one."""
        architecture = self.decoder.architecture
        attention = self.decoder.create_attention(
            limits.num_blocks, limits.block_size, self.kv_dtype
        )
        states = self.create_states(limits.max_seqs, limits.state_snapshots or 0)
        if self.pooler is not None:
            return PoolingExecutor(
                self.decoder,
                attention,
                self.pooler,
                limits=limits,
                device=self.device,
                recurrent_states=states,
            )
        return TorchExecutor(
            self.decoder,
            attention,
            limits=limits,
            vocab_size=architecture.vocab_size,
            eos_token_ids=list(architecture.eos_token_ids),
            device=self.device,
            # A mixture of experts counts tokens per expert on the host, which a graph cannot include.
            graph_capturer=self.device.graph_capturer if _is_capturable(architecture) else None,
            find_grammar=find_grammar,
            states=states,
        )


def _test_exactness(
    path: Path, factory: _ExecutorFactory, max_model_len: int, arithmetic_id: str
) -> bool:
    """Run the self-test unless its result for `arithmetic_id` is stored, and return whether the model is exact.

    Raises:
        ValueError: The results of a sequence depend on other sequences, so that the model cannot be served.
    """
    decoder, started_at = factory.decoder, time.monotonic()
    result = find_or_run(
        arithmetic_id,
        lambda: run_self_test(
            decoder,
            factory.device,
            vocab_size=decoder.architecture.vocab_size,
            max_model_len=max_model_len,
            kv_dtype=factory.kv_dtype,
            states=factory.create_states(NUM_SEQUENCES, NUM_SEQUENCES),
        ),
    )
    if result.median_difference > MAX_MEDIAN_DIFFERENCE:
        raise ValueError(
            f"{path}: the results of a sequence change with the other sequences of a batch "
            f"({', '.join(result.failed_cases)}), so the model cannot be served; use another model"
        )
    fields = {"seconds": time.monotonic() - started_at, "failed_cases": result.failed_cases}
    if result.is_exact:
        log.info("self_test_passed", seconds=fields["seconds"])
    else:
        log.warning("self_test_failed", median_difference=result.median_difference, **fields)
    return result.is_exact


def _resolve_limits(
    config: EngineConfig, factory: _ExecutorFactory, key: str, mapped_bytes: int
) -> EngineLimits:
    """Compute the limits that fit next to the activations of the largest step and the mapped packed weights.

    `key` identifies the model and its formats, see `Device.working_bytes`.

    Raises:
        ValueError: No KV block fits.
    """
    device, architecture = factory.device, factory.decoder.architecture
    model_max_len, kv_windows = architecture.max_model_len, architecture.kv_layout.windows
    probe = EngineLimits(
        max_model_len=model_max_len,
        max_seqs=config.max_seqs,
        max_step_tokens=max(
            config.max_step_tokens, config.max_seqs, 0 if kv_windows else model_max_len
        ),
        block_size=config.block_size,
        num_blocks=1,
        host_blocks=0,
        kv_windows=kv_windows,
    )
    working_bytes = device.working_bytes(
        f"{key} {probe}", lambda: _run_largest_step(factory.create_executor(probe), probe)
    )
    return resolve_limits(
        config,
        model_max_len=model_max_len,
        kv_windows=kv_windows,
        block_bytes=factory.block_bytes(config.block_size),
        state_bytes=architecture.state_bytes,
        free_bytes=max(0, device.free_bytes() - mapped_bytes - working_bytes),
        kv_memory_fraction=device.kv_memory_fraction / (1 + config.colocated_replicas),
    )


def _warm_up(
    executor: TorchExecutor | PoolingExecutor,
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


@dataclass(frozen=True, slots=True)
class _LoadPlan:
    """Model whose architecture is known and whose weights are not loaded yet."""

    architecture: AnyArchitecture
    load: Callable[
        [Device, torch.dtype, tuple[str, str, str], Callable[[float], None]],
        tuple[AnyDecoder, int],
    ]
    """Loads the weights. Returns the decoder with the bytes of its weights that are mapped from the pack cache.

    Takes the device, the dtype, the identity of packed weights and a callback for the finished fraction."""
    stored: StoredIntegers | None = None
    """Stored integers with which the decoder can compute."""


def _plan_own(path: Path, config: EngineConfig, layout: PoolingLayout | None) -> _LoadPlan:
    """Plan to load Argosy's own decoder or encoder."""
    architecture: ModelArchitecture | EncoderArchitecture
    max_model_len = config.max_model_len
    if layout is not None:
        architecture = read_pooling_architecture(path, layout, max_model_len)
    else:
        architecture = read_architecture(path, config.generation_config)
    if max_model_len is not None and max_model_len < architecture.max_model_len:
        # the rope tables are built for this length
        architecture = replace(architecture, max_model_len=max_model_len)
    checkpoint = CheckpointReader(path)

    def load(
        device: Device,
        dtype: torch.dtype,
        identity: tuple[str, str, str],
        progress: Callable[[float], None],
    ) -> tuple[AnyDecoder, int]:
        with _open_pack_cache(config, architecture.num_parameters, identity) as pack_cache:
            if isinstance(architecture, EncoderArchitecture):
                encoder = load_encoder(
                    checkpoint,
                    architecture,
                    device,
                    dtype,
                    progress,
                    quantize=None if config.quantize == "none" else config.quantize,
                    pack_cache=pack_cache,
                )
                return encoder, pack_cache.mapped_bytes
            decoder = load_decoder(
                checkpoint,
                architecture,
                device,
                dtype,
                progress,
                quantize=config.quantize,
                pack_cache=pack_cache,
            )
        return decoder, pack_cache.mapped_bytes

    return _LoadPlan(architecture, load, checkpoint.find_stored_integers())


def _plan_generic(path: Path, config: EngineConfig, dtype: torch.dtype) -> _LoadPlan:
    """Plan to load the model of transformers."""
    from argosy.engine.execution.decoders.generic_loader import load_generic_decoder

    model = build_transformers_model(
        path,
        dtype,
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
        generation_config=config.generation_config,
    )

    def load(
        device: Device,
        dtype: torch.dtype,
        layout: tuple[str, str, str],
        progress: Callable[[float], None],
    ) -> tuple[AnyDecoder, int]:
        checkpoint, format_name, layout_id = layout
        layout = (checkpoint, f"transformers {format_name}", layout_id)
        with _open_pack_cache(config, model.architecture.num_parameters, layout) as pack_cache:
            decoder = load_generic_decoder(
                model,
                device,
                dtype,
                progress,
                quantize=None if config.quantize == "none" else config.quantize,
                pack_cache=pack_cache,
            )
        return decoder, pack_cache.mapped_bytes

    return _LoadPlan(model.architecture, load)


def _is_capturable(architecture: AnyArchitecture) -> bool:
    """Return whether a graph can include the model.

    Experts count their tokens on the host, which a graph cannot include. The code of transformers may do so too.
    Recurrent states are attached to a batch outside of graphs.
    """
    if not isinstance(architecture, ModelArchitecture):
        return False
    return architecture.moe is None and architecture.delta_net is None


def choose_device(config: EngineConfig) -> Device:
    """Create the device that the settings name. "auto" selects a GPU if torch finds one."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return create_cpu_device(config.threads, config.colocated_replicas)
    from argosy.engine.execution.kernels.gpu.cuda_runtime import create_cuda_device

    return create_cuda_device()


def _open_pack_cache(
    config: EngineConfig, num_parameters: int, identity: tuple[str, str, str]
) -> PackCache:
    """Open the pack cache for this checkpoint, format and packed layout."""
    if not identity[-1]:
        return PackCache()
    return open_pack_cache(
        identity,
        required_bytes=num_parameters * 2,
        limit_bytes=config.pack_cache_bytes,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_prefill_tokens(limits: EngineLimits) -> int:
    """Return the length of the longest prefill that fits into one step."""
    return min(limits.max_model_len - 1, limits.max_step_tokens)


def _run_largest_step(executor: TorchExecutor | PoolingExecutor, limits: EngineLimits) -> None:
    """Fill the token budget with the maximum number of sequences, sampled with the most expensive parameters."""
    remaining, counts = limits.max_step_tokens, []
    for sequences_left in reversed(range(limits.max_seqs)):
        counts.append(min(_max_prefill_tokens(limits), remaining - sequences_left))
        remaining -= counts[-1]
    _run_prefill(executor, limits, counts, COSTLIEST_PARAMS)


def _run_prefill(
    executor: TorchExecutor | PoolingExecutor,
    limits: EngineLimits,
    counts: list[int],
    params: SamplingParams,
) -> None:
    """Compute sequences of `counts` tokens in one step. All use block 0, so the results are meaningless."""
    rows = list(range(len(counts)))
    tables = [[[0] * -(-count // limits.block_size)] * len(limits.kv_windows) for count in counts]
    plan = StepPlan(
        0,
        rows=rows,
        starts=[0] * len(rows),
        counts=counts,
        sample_flags=[True] * len(rows),
        admissions=[
            AdmittedSequence(row, [0] * count, count, params, block_tables)
            for row, count, block_tables in zip(rows, counts, tables, strict=True)
        ],
    )
    executor.submit(plan).result()
