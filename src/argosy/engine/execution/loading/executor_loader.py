"""Loader that turns engine settings into a loaded, sized and warmed-up executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import msgspec
import structlog
import torch

from argosy.engine.engine_config import (
    LOADING_WEIGHTS,
    VERIFYING_MODEL,
    WARMING_UP,
    EngineConfig,
    SelectedImpl,
    WeightFormat,
)
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.architectures.draft_head import (
    DraftHeadArchitecture,
    create_mtp_head,
    is_eagle_head,
    read_eagle_head,
)
from argosy.engine.execution.architectures.encoder import EncoderArchitecture
from argosy.engine.execution.architectures.pooling import (
    PoolingLayout,
    describe_pooling,
    read_pooling_architecture,
    read_pooling_layout,
)
from argosy.engine.execution.checkpoint_formats.checkpoint import (
    checkpoint_fingerprint,
    resolve_model_path,
    weight_files,
)
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.decoders.draft_head import DraftHead
from argosy.engine.execution.decoders.generic_decoder import GenericDecoder, GenericModel
from argosy.engine.execution.encoders.encoder import Encoder
from argosy.engine.execution.executor.block_copies import staging_bytes
from argosy.engine.execution.executor.draft_head import KEPT_STATES, HeadDrafter
from argosy.engine.execution.executor.draft_model import DraftModel, count_row_blocks
from argosy.engine.execution.executor.executor import Executor, ExecutorParts
from argosy.engine.execution.executor.output_stage import OutputStage
from argosy.engine.execution.executor.persistent_batch import PersistentBatch
from argosy.engine.execution.executor.pooling_stage import Pooler, PoolingStage, load_pooler
from argosy.engine.execution.executor.sampling_stage import SamplingStage
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.pack_cache import PackCache, open_pack_cache
from argosy.engine.execution.loading.arithmetic import describe_arithmetic
from argosy.engine.execution.loading.memory import (
    MemoryNeeds,
    check_memory,
    resolve_limits,
    step_limits,
)
from argosy.engine.execution.loading.model_selection import (
    AnyArchitecture,
    ModelSelection,
    build_transformers_model,
    select_implementation,
)
from argosy.engine.execution.loading.self_test import (
    MAX_MEDIAN_DIFFERENCE,
    SelfTestResult,
    compute_check,
    find_or_run,
    run_self_test,
)
from argosy.engine.execution.loading.sleep_handler import ModelParts, SleepHandler
from argosy.engine.execution.loading.weight_loader import (
    load_decoder,
    load_draft_head,
    load_encoder,
)
from argosy.engine.grammar import CompiledGrammar
from argosy.engine.pooling import PoolingInfo
from argosy.engine.scheduling import AdmittedSequence, SchedulerLimits, StepPlan
from argosy.model_store import stored_digest, verify_model
from argosy.protocol import ArithmeticIdentity, ModelDescription, SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Data types of the KV cache, apart from that of the model."""
WARMUP_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
COSTLIEST_PARAMS = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    frequency_penalty=0.1,
    logit_bias={0: 0.0},
    logprobs=1,
)
"""Parameters that need the most memory, and all kernels of sampling."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """Loaded executor, with the properties of its model and device."""

    executor: Executor
    architecture: AnyArchitecture
    device: Device
    limits: SchedulerLimits
    load_s: float
    backend: str
    fingerprint: str
    arithmetic: ArithmeticIdentity
    """Identity of everything that decides the bytes of outputs."""
    is_exact: bool
    """Whether the self-test found that results depend only on their own sequence, bit for bit."""
    no_drafts_reason: str
    """Why steps have no drafts. Empty if they give the tokens of steps without. No step is then planned ahead."""
    draft_model: DraftModel | None
    """Draft model for these drafts, if the settings name one."""
    sleep_handler: SleepHandler
    """Frees the memory of model and executor, and allocates it again."""
    max_steps_in_flight: int
    """Number of steps in flight while the next one is planned."""
    reserved_bytes: int
    """Memory of the process that the KV cache, its host tier, recurrent states and the largest step may still take."""
    mapped_bytes: int = 0
    """Bytes of the weights that are mapped from the pack cache."""
    pooling: PoolingInfo | None = None
    """Properties of a model that computes vectors, or None for one that generates."""
    model: ModelDescription | None = None
    """The model as user interfaces show it."""
    step_s: float = 0.0
    """Seconds of a step with one token, as the warm-up measured it; 0 without a warm-up."""


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
    path = _find_checkpoint(config, progress)
    plan = _plan_load(config, path, progress)
    loaded = _load_model(config, plan, progress)
    draft = _load_draft_model(config, loaded, progress)
    return _prove(config, loaded, draft, progress, find_grammar, started_at)


def _reload(
    config: EngineConfig,
    device: Device,
    fingerprint: str,
    progress: Callable[[str, float], None],
) -> tuple[_LoadedModel, _LoadedModel | None]:
    """Load the model and the draft model again, whose files were verified before.

    Raises:
        ValueError: The files of the model are others now.
    """
    path = resolve_model_path(config.model, config.revision, config.digest)
    plan = _plan_load(config, path, progress, device)
    if plan.fingerprint != fingerprint:
        raise ValueError(f"{path}: the files of the model were replaced; restart the server")
    loaded = _load_model(config, plan, progress)
    return loaded, _load_draft_model(config, loaded, progress)


def _find_checkpoint(config: EngineConfig, progress: Callable[[str, float], None]) -> Path:
    """Find the files, and verify them if their digest is known."""
    path = resolve_model_path(config.model, config.revision, config.digest)
    digest = config.digest or stored_digest(path)
    if digest:
        verify_model(path, digest, on_progress=lambda done: progress(VERIFYING_MODEL, done))
    return path


@dataclass(frozen=True, slots=True)
class _LoadPlan:
    """Model that fits into the memory of a device in these formats, and whose weights are not loaded yet."""

    path: Path
    fingerprint: str
    pooling: PoolingLayout | None
    """Layout of a model that computes vectors, or None for one that generates."""
    device: Device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantize: WeightFormat | None
    stored_format: str | None
    """Description of the checkpoint's own integers, if the kernels compute with them."""
    architecture: AnyArchitecture
    source: CheckpointReader | GenericModel

    @property
    def weight_format(self) -> str:
        """Description of the weights, for people and caches."""
        name = str(self.dtype).removeprefix("torch.")
        return " ".join([name, *filter(None, (self.quantize, self.stored_format))])

    @property
    def format_name(self) -> str:
        """Description of weights and KV cache."""
        if self.kv_dtype == self.dtype:
            return self.weight_format
        return f"{self.weight_format}, KV {str(self.kv_dtype).removeprefix('torch.')}"


def _select(config: EngineConfig, path: Path, layout: PoolingLayout | None) -> SelectedImpl:
    """Choose and log the implementation."""
    selection = (
        select_implementation(path, config.model_impl)
        if layout is None
        else ModelSelection("argosy", f"the layout of the checkpoint: {layout.head}")
    )
    log.info("model_implementation_selected", **asdict(selection))
    return selection.implementation


def _plan_load(
    config: EngineConfig,
    path: Path,
    progress: Callable[[str, float], None],
    device: Device | None = None,
) -> _LoadPlan:
    """Choose implementation, data types and, if it is None, the device. Check that the model fits into the memory."""
    fingerprint, layout = checkpoint_fingerprint(path), read_pooling_layout(path, config.task)
    implementation = _select(config, path, layout)
    progress("preparing the kernels", 0.0)  # compiled at the first start
    device = device or choose_device(config)
    dtype = device.default_dtype if config.dtype == "auto" else DTYPES[config.dtype]
    kv_dtype = KV_DTYPES.get(config.kv_dtype, dtype)
    if config.kv_dtype == "fp8" and config.kv_scales is None:
        raise ValueError(
            "an fp8 KV cache needs scales, which are not read from checkpoints; set kv_dtype to int8, or on a GPU "
            "kv_scales to unit, which stores keys and values as they are"
        )
    source: CheckpointReader | GenericModel
    architecture: AnyArchitecture
    stored = None
    if implementation == "argosy":
        architecture = _read_own_architecture(config, path, layout)
        source = CheckpointReader(path, computes_float8=device.computes_float8)
        if config.quantize is None:
            stored = source.find_stored_integers()
    else:
        source = build_transformers_model(
            path,
            dtype,
            max_model_len=config.max_model_len,
            trust_remote_code=config.trust_remote_code,
            generation_config=config.generation_config,
        )
        architecture = source.architecture
    check_memory(
        MemoryNeeds(architecture, config, dtype.itemsize, kv_dtype.itemsize, stored),
        device.free_bytes(),
        ("int8", "int4") if device.torch_device.type == "cpu" else ("fp8", "int8", "int4"),
    )
    return _LoadPlan(
        path=path,
        fingerprint=fingerprint,
        pooling=layout,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=None if config.quantize == "none" else config.quantize,
        stored_format=None if stored is None else stored.description,
        architecture=architecture,
        source=source,
    )


def _read_own_architecture(
    config: EngineConfig, path: Path, layout: PoolingLayout | None
) -> ModelArchitecture | EncoderArchitecture:
    """Read the architecture of a model of Argosy's own implementation, with the context that is served."""
    max_model_len = config.max_model_len
    architecture: ModelArchitecture | EncoderArchitecture
    if layout is not None:
        architecture = read_pooling_architecture(path, layout, max_model_len)
    else:
        architecture = read_architecture(path, config.generation_config)
    if max_model_len is not None and max_model_len < architecture.max_model_len:
        # the rope tables are built for this length
        architecture = replace(architecture, max_model_len=max_model_len)
    return architecture


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """Model with its weights, of which executors can be created."""

    model: Decoder | Encoder | GenericDecoder | DraftHead
    pooler: Pooler | None
    plan: _LoadPlan
    mapped_bytes: int
    """Bytes of the weights that are mapped from the pack cache."""
    files: Sequence[Path]
    """Files that weights are mapped from."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a KV block."""
        architecture, kv_dtype = self.plan.architecture, self.plan.kv_dtype
        bytes_per_token = architecture.kv_bytes_per_token(
            kv_dtype.itemsize, has_scales=kv_dtype == torch.int8
        )
        return architecture.kv_layout.block_bytes(bytes_per_token, block_size)

    def position_block_bytes(self, block_size: int) -> int:
        """Return the bytes of the KV blocks of `block_size` tokens in all groups."""
        return len(self.plan.architecture.kv_layout.windows) * self.block_bytes(block_size)

    def count_row_bytes(self, limits: SchedulerLimits) -> int:
        """Return the bytes that a draft model of it needs for rows, beside its share of each block."""
        row_blocks = limits.max_seqs * count_row_blocks(limits.block_size)
        row_bytes = row_blocks * self.position_block_bytes(limits.block_size)
        architecture = self.plan.architecture
        if isinstance(architecture, DraftHeadArchitecture):
            num_states = limits.max_seqs * KEPT_STATES + 2 * limits.max_step_tokens
            row_bytes += num_states * architecture.hidden_states_width * self.plan.dtype.itemsize
        return row_bytes

    def create_draft_model(self, limits: SchedulerLimits, executor: Executor) -> DraftModel:
        """Create a draft model of it, with its own KV cache, for the target of an executor with these limits."""
        plan = self.plan
        if not isinstance(self.model, DraftHead):
            return DraftModel(self.model, plan.device, limits, plan.kv_dtype)
        drafter = HeadDrafter(self.model, plan.device, limits, plan.dtype, plan.kv_dtype)
        drafter.attach(executor)
        return drafter

    def create_executor(
        self,
        limits: SchedulerLimits,
        find_grammar: Callable[[str], CompiledGrammar] | None = None,
    ) -> Executor:
        """Create an executor with its own KV cache, if the model has one."""
        device = self.plan.device
        is_capturable = self.pooler is None and _is_capturable(self.plan.architecture)
        return Executor(
            self.create_parts(limits, find_grammar),
            limits=limits,
            device=device,
            capture_graph=device.capture_graph if is_capturable else None,
        )

    def create_parts(
        self, limits: SchedulerLimits, find_grammar: Callable[[str], CompiledGrammar] | None
    ) -> ExecutorParts:
        """Return the parts of an executor, which gets a KV cache of its own, if the model has one."""
        model, device, architecture = self.model, self.plan.device, self.plan.architecture

        def create_stage(persistent_batch: PersistentBatch) -> OutputStage:
            if self.pooler is not None:
                return PoolingStage(self.pooler, device)
            return SamplingStage(
                persistent_batch,
                device,
                max_seqs=limits.max_seqs,
                vocab_size=architecture.vocab_size,
                eos_token_ids=list(architecture.eos_token_ids),
                find_grammar=find_grammar,
            )

        return ExecutorParts(
            model,
            lambda: model.create_attention(
                limits.num_blocks, limits.block_size, self.plan.kv_dtype
            ),
            create_stage,
            lambda: model.create_states(limits.max_seqs, limits.state_snapshots or 0),
        )


def _load_model(
    config: EngineConfig, plan: _LoadPlan, progress: Callable[[str, float], None]
) -> _LoadedModel:
    """Load the weights, and the pooler of a model that computes vectors."""
    device, dtype, architecture, source = plan.device, plan.dtype, plan.architecture, plan.source

    def report(done: float) -> None:
        progress(LOADING_WEIGHTS, done)

    model: Decoder | Encoder | GenericDecoder
    with _open_pack_cache(config, plan) as cache:
        if not isinstance(source, CheckpointReader):
            from argosy.engine.execution.decoders.generic_loader import load_generic_decoder

            model = load_generic_decoder(
                source, device, dtype, report, quantize=plan.quantize, pack_cache=cache
            )
        elif isinstance(architecture, EncoderArchitecture):
            model = load_encoder(
                source,
                architecture,
                device,
                dtype,
                report,
                quantize=plan.quantize,
                pack_cache=cache,
            )
        else:
            model = load_decoder(
                source,
                cast("ModelArchitecture", architecture),
                device,
                dtype,
                report,
                quantize=config.quantize,  # "none" dequantizes what the checkpoint stores in integers
                pack_cache=cache,
            )
    pooler = None
    if plan.pooling is not None and not isinstance(model, GenericDecoder):
        pooler = load_pooler(plan.pooling, model, CheckpointReader(plan.path), device, dtype)
    return _LoadedModel(model, pooler, plan, cache.mapped_bytes, _list_files(plan, cache))


def _list_files(plan: _LoadPlan, cache: PackCache) -> list[Path]:
    """Return the files that the weights of a model are mapped from."""
    files = weight_files(plan.path)
    return files if cache.path is None else [*files, cache.path]


def _load_draft_model(
    config: EngineConfig, loaded: _LoadedModel, progress: Callable[[str, float], None]
) -> _LoadedModel | None:
    """Load the draft model that the settings name. None if there is none, or if it could never be used.

    Raises:
        ValueError: It cannot draft for the target. The message says what to do.
    """
    target, name = loaded.plan, config.draft_source
    if name is None:
        return None
    if target.pooling is not None:
        raise ValueError(
            "the model computes vectors, for which nothing is drafted; leave draft_model and speculative_config out"
        )
    if config.speculation == "off" or _find_obstacle(config, target) is not None:
        return None
    if target.architecture.kv_layout.windows[0] is not None:
        raise ValueError(
            f"nothing can draft for {config.model}, because no layer attends to all tokens; use no draft_model"
        )
    if config.speculative_config is not None and config.speculative_config.method == "mtp":
        return _load_draft_head(config, loaded, target.path, progress)
    draft_config = msgspec.structs.replace(
        config,
        model=name,
        revision=None,
        digest=None,
        task="generate",
        kv_memory_bytes=None,
        draft_model=None,
        speculative_config=None,
    )
    path = _find_checkpoint(draft_config, progress)
    is_head = is_eagle_head(path)
    if not is_head and config.speculative_config and config.speculative_config.method == "eagle3":
        raise ValueError(f"{name} is no EAGLE-3 head; use the method draft_model for other models")
    if is_head:
        return _load_draft_head(draft_config, loaded, path, progress)
    plan = _plan_load(draft_config, path, progress, target.device)
    if plan.architecture.state_bytes:
        raise ValueError(
            f"{name} cannot draft for {config.model}, because it has recurrent states; use another draft_model, or none"
        )
    return _load_model(draft_config, plan, progress)


def _load_draft_head(
    config: EngineConfig,
    loaded: _LoadedModel,
    path: Path,
    progress: Callable[[str, float], None],
) -> _LoadedModel:
    """Load the EAGLE-3 head in `path`, or that for multi-token prediction if `path` is the target's own.

    Raises:
        ValueError: It cannot draft for the target. The message says what to do.
    """
    target, device = loaded.model, loaded.plan.device
    if not isinstance(target, Decoder) or device.torch_device.type != "cpu":
        raise ValueError(
            f"the head in {path} cannot draft for a model on a GPU or of transformers; use --device cpu and "
            "--model-impl argosy, or another draft_model"
        )
    reader = CheckpointReader(path, computes_float8=device.computes_float8)
    create = create_mtp_head if path == loaded.plan.path else read_eagle_head
    architecture = create(path, reader.files.keys(), target.architecture)
    stored = reader.find_stored_integers() if config.quantize is None else None
    plan = replace(
        loaded.plan,
        path=path,
        fingerprint=f"{checkpoint_fingerprint(path)} {architecture.method}",
        stored_format=None if stored is None else stored.description,
        architecture=architecture,
        source=reader,
    )
    check_memory(
        MemoryNeeds(architecture, config, plan.dtype.itemsize, plan.kv_dtype.itemsize),
        device.free_bytes(),
        ("int8", "int4"),
    )
    with _open_pack_cache(config, plan) as cache:
        head = load_draft_head(
            reader,
            architecture,
            target,
            device,
            plan.dtype,
            lambda done: progress(LOADING_WEIGHTS, done),
            quantize=config.quantize,
            pack_cache=cache,
        )
    return _LoadedModel(head, None, plan, cache.mapped_bytes, _list_files(plan, cache))


def _prove(
    config: EngineConfig,
    loaded: _LoadedModel,
    draft: _LoadedModel | None,
    progress: Callable[[str, float], None],
    find_grammar: Callable[[str], CompiledGrammar] | None,
    started_at: float,
) -> LoadedExecutor:
    """Size the KV cache, warm the executor up, and test that results depend only on their own sequence."""
    plan, device, architecture = loaded.plan, loaded.plan.device, loaded.plan.architecture
    limits = _resolve_limits(config, loaded, draft, f"{plan.fingerprint} {plan.format_name}")
    if limits.state_snapshots is not None:
        log.info(
            "recurrent_states_allocated",
            sequences=limits.max_seqs,
            snapshots=limits.state_snapshots,
            state_bytes=architecture.state_bytes,
        )
    executor = loaded.create_executor(limits, find_grammar)
    arithmetic = describe_arithmetic(
        plan.path,
        architecture,
        device,
        plan.dtype,
        plan.kv_dtype,
        plan.quantize,
        attention=executor.attention_name,
        stored_format=plan.stored_format,
    )
    step_s = _warm_up(executor, limits, device.warmup_sizes if config.warmup else (), progress)
    self_test: SelfTestResult | None = None
    if config.warmup:
        self_test = _test_exactness(loaded, limits, arithmetic.id)
    pooling, max_steps_in_flight = None, _count_steps_in_flight(config, device)
    if plan.pooling is not None:
        pooling = describe_pooling(plan.pooling, architecture.hidden_size, limits.max_model_len)
        max_steps_in_flight = 0  # the executor waits for its results
    no_drafts_reason = _find_no_drafts_reason(config, plan, self_test)
    draft_model = None
    if draft is not None and not no_drafts_reason:
        draft_model = draft.create_draft_model(limits, executor)
        draft_model.warm_up()

    is_exact = self_test is None or self_test.is_exact

    def create_model_parts(loaded: _LoadedModel, draft: _LoadedModel | None) -> ModelParts:
        return ModelParts(
            executor=loaded.create_parts(limits, find_grammar),
            create_draft_model=None
            if draft is None or no_drafts_reason
            else lambda: draft.create_draft_model(limits, executor),
            compute_check=lambda: compute_check(
                loaded.model,
                device,
                max_model_len=limits.max_model_len,
                block_size=limits.block_size,
                kv_dtype=loaded.plan.kv_dtype,
                is_exact=is_exact,
            ),
            files=loaded.files if draft is None else [*loaded.files, *draft.files],
        )

    fingerprint = plan.fingerprint
    sleep_handler = SleepHandler(
        executor,
        create_model_parts(loaded, draft),
        lambda progress: create_model_parts(*_reload(config, device, fingerprint, progress)),
    )
    return LoadedExecutor(
        executor=executor,
        architecture=architecture,
        device=device,
        limits=limits,
        load_s=time.monotonic() - started_at,
        backend=f"{device.name} {plan.format_name} {executor.attention_name}",
        fingerprint=f"{plan.fingerprint} {arithmetic.id}",
        arithmetic=arithmetic,
        is_exact=is_exact,
        no_drafts_reason=no_drafts_reason,
        draft_model=draft_model,
        sleep_handler=sleep_handler,
        max_steps_in_flight=max_steps_in_flight,
        reserved_bytes=_count_reserved_bytes(config, loaded, draft, limits),
        mapped_bytes=loaded.mapped_bytes + (0 if draft is None else draft.mapped_bytes),
        pooling=pooling,
        model=_describe_model(plan),
        step_s=step_s,
    )


def _describe_model(plan: _LoadPlan) -> ModelDescription:
    """Describe the model for user interfaces, by its files and the format of its weights."""
    files = weight_files(plan.path)
    files = [file for file in files if file.suffix == ".safetensors"] or files
    kinds = {".bin": "pytorch"}
    suffix = files[0].suffix if files else ""
    return ModelDescription(
        family=plan.architecture.family,
        parameters=plan.architecture.num_parameters,
        size_bytes=sum(file.stat().st_size for file in files),
        format=kinds.get(suffix, suffix[1:]),
        quantization=plan.quantize or plan.stored_format or str(plan.dtype).removeprefix("torch."),
    )


def _count_reserved_bytes(
    config: EngineConfig,
    loaded: _LoadedModel,
    draft: _LoadedModel | None,
    limits: SchedulerLimits,
) -> int:
    """Return the memory that is allocated when it is first used, after the model is loaded."""
    plan, block_bytes = loaded.plan, loaded.block_bytes(config.block_size)
    needs = MemoryNeeds(
        plan.architecture, config, plan.dtype.itemsize, plan.kv_dtype.itemsize
    ).estimate()
    on_device = limits.num_blocks * block_bytes + needs.state_bytes
    on_device += (limits.state_snapshots or 0) * plan.architecture.state_bytes
    if draft is not None:
        on_device += limits.num_blocks * draft.position_block_bytes(config.block_size)
        on_device += draft.count_row_bytes(limits)
    if config.enable_lora:
        on_device += config.adapter_memory_bytes
    is_cpu = plan.device.torch_device.type == "cpu"
    return limits.host_blocks * block_bytes + needs.working_bytes + is_cpu * on_device


def _count_steps_in_flight(config: EngineConfig, device: Device) -> int:
    """Return the number of steps in flight while the next one is planned."""
    if config.max_steps_in_flight is None:
        return device.max_steps_in_flight
    return config.max_steps_in_flight


def _find_obstacle(config: EngineConfig, plan: _LoadPlan) -> str | None:
    """Return why steps cannot have drafts, whatever the test at start finds, or None."""
    if plan.architecture.state_bytes:
        return "the recurrent states of the model cannot go back to the last token that was right"
    if _count_steps_in_flight(config, plan.device):
        return "the device plans steps ahead, before it is known how many drafts are right"
    return None if config.warmup else "the test at start does not run without a warm-up"


def _find_no_drafts_reason(
    config: EngineConfig, plan: _LoadPlan, self_test: SelfTestResult | None
) -> str:
    """Return why steps have no drafts; empty if they may. If the settings want them and they cannot, log why."""
    if not config.draft_methods:
        return "the replica's settings have speculation: off"
    if plan.pooling is not None:
        return "the model generates no text"
    reason = _find_obstacle(config, plan)
    if self_test is not None and reason is None:
        failed_cases = [*self_test.failed_cases, *self_test.failed_draft_cases]
        if failed_cases:
            reason = f"the test at start failed: {', '.join(failed_cases)}"
    if reason is not None:
        log.info("speculation_disabled", reason=reason)
    return reason or ""


def _test_exactness(
    loaded: _LoadedModel, limits: SchedulerLimits, arithmetic_id: str
) -> SelfTestResult:
    """Run the self-test unless its result for `arithmetic_id` and the block size is stored, and return the result.

    Raises:
        ValueError: The results of a sequence depend on other sequences, so that the model cannot be served.
    """
    plan, started_at = loaded.plan, time.monotonic()
    result = find_or_run(
        arithmetic_id,
        limits.block_size,
        lambda: run_self_test(
            loaded.model,
            plan.device,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            kv_dtype=plan.kv_dtype,
        ),
    )
    if result.median_difference > MAX_MEDIAN_DIFFERENCE:
        raise ValueError(
            f"{plan.path}: the results of a sequence change with the other sequences of a batch "
            f"({', '.join(result.failed_cases)}), so the model cannot be served; use another model"
        )
    fields = {"seconds": time.monotonic() - started_at, "failed_cases": result.failed_cases}
    if result.is_exact:
        log.info("self_test_passed", seconds=fields["seconds"])
    else:
        log.warning("self_test_failed", median_difference=result.median_difference, **fields)
    return result


def _resolve_limits(
    config: EngineConfig, loaded: _LoadedModel, draft: _LoadedModel | None, key: str
) -> SchedulerLimits:
    """Compute the limits that fit next to the activations of the largest step and the mapped packed weights.

    Nothing is measured if the settings state the size of the KV cache. `key` identifies the model and its formats, see
    `Device.working_bytes`.

    Raises:
        ValueError: No KV block fits.
    """
    device, architecture = loaded.plan.device, loaded.plan.architecture
    limits = step_limits(
        config,
        max_model_len=architecture.max_model_len,
        kv_windows=architecture.kv_layout.windows,
        ridge_tokens=device.ridge_tokens,
        generates=loaded.pooler is None,
    )
    is_stated = config.num_blocks is not None and not architecture.state_bytes
    working_bytes = 0
    if limits.kv_windows and config.kv_memory_bytes is None and not is_stated:
        working_bytes = device.working_bytes(
            f"{key} {limits}", lambda: _run_largest_step(loaded.create_executor(limits), limits)
        )
    if config.enable_lora:
        working_bytes += config.adapter_memory_bytes
    block_bytes = loaded.block_bytes(config.block_size)
    if block_bytes:
        working_bytes += staging_bytes(config.host_kv_bytes // block_bytes, block_bytes)
    draft_block_bytes = 0
    mapped_bytes = loaded.mapped_bytes
    if draft is not None:
        draft_block_bytes = draft.position_block_bytes(config.block_size)
        mapped_bytes += draft.mapped_bytes
        working_bytes += draft.count_row_bytes(limits)
    return resolve_limits(
        config,
        limits,
        block_bytes=block_bytes,
        draft_block_bytes=draft_block_bytes,
        state_bytes=architecture.state_bytes,
        free_bytes=max(0, device.free_bytes() - mapped_bytes - working_bytes),
        kv_memory_fraction=device.kv_memory_fraction / (1 + config.colocated_replicas),
    )


def _warm_up(
    executor: Executor,
    limits: SchedulerLimits,
    sizes: tuple[int, ...],
    progress: Callable[[str, float], None],
) -> float:
    """Run one prefill of each size that fits and capture all graphs, so that nothing of it delays requests.

    The first prefill also runs all kernels of sampling, which some devices compile then.

    Returns the seconds of another step with one token, by which requests are routed before the first one was measured.
    """
    fitting = [size for size in sizes if size <= _max_prefill_tokens(limits)]
    total = len(fitting) + executor.num_graphs
    for number, size in enumerate(fitting):
        params = WARMUP_PARAMS if number else COSTLIEST_PARAMS
        _run_prefill(executor, limits, [size], params)
        progress(WARMING_UP, (number + 1) / total)
    step_s = 0.0
    if fitting:
        started_at = time.monotonic()
        _run_prefill(executor, limits, [1], WARMUP_PARAMS)
        step_s = time.monotonic() - started_at
        executor.reset()
    executor.capture_graphs(lambda number: progress(WARMING_UP, (len(fitting) + number) / total))
    return step_s


def _is_capturable(architecture: AnyArchitecture) -> bool:
    """Return whether a graph can include the model, as the code of transformers may wait for the device."""
    return isinstance(architecture, ModelArchitecture)


def choose_device(config: EngineConfig) -> Device:
    """Create the device that the settings name. "auto" selects a GPU if torch finds one."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return create_cpu_device(config.threads, config.colocated_replicas)
    from argosy.engine.execution.kernels.gpu.device import create_cuda_device

    return create_cuda_device()


def _open_pack_cache(config: EngineConfig, plan: _LoadPlan) -> PackCache:
    """Open the pack cache for this checkpoint, format and packed layout."""
    layout_id = plan.device.weight_layout_id(plan.dtype)
    if not layout_id:
        return PackCache()
    own = isinstance(plan.source, CheckpointReader)
    format_name = plan.weight_format if own else f"transformers {plan.weight_format}"
    return open_pack_cache(
        (plan.fingerprint, format_name, layout_id),
        required_bytes=plan.architecture.num_parameters * 2,
        limit_bytes=config.pack_cache_bytes,
    )


def _max_prefill_tokens(limits: SchedulerLimits) -> int:
    """Return the length of the longest prefill that fits into one step."""
    return min(limits.max_model_len - 1, limits.max_step_tokens)


def _run_largest_step(executor: Executor, limits: SchedulerLimits) -> Executor:
    """Capture all graphs, then fill the token budget with the maximum number of sequences.

    They are sampled with the most expensive parameters. Returns the executor, which owns the graphs.
    """
    executor.capture_graphs()
    remaining, counts = limits.max_step_tokens, []
    for sequences_left in reversed(range(limits.max_seqs)):
        counts.append(min(_max_prefill_tokens(limits), remaining - sequences_left))
        remaining -= counts[-1]
    _run_prefill(executor, limits, counts, COSTLIEST_PARAMS)
    return executor


def _run_prefill(
    executor: Executor,
    limits: SchedulerLimits,
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
        sample_counts=[1] * len(rows),
        admissions=[
            AdmittedSequence(row, [0] * count, count, params, block_tables)
            for row, count, block_tables in zip(rows, counts, tables, strict=True)
        ],
    )
    executor.submit(plan).result()
