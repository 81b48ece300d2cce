"""Engine settings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from argosy.engine.pooling import ModelTask
from argosy.settings import check_fields, option

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
DEFAULT_KV_MEMORY_FRACTION = 0.4
"""Default fraction of a CPU's free memory for the KV cache. The rest stays for activations."""


AUTO_DRAFT_METHODS = ("forced_tokens", "prediction", "prompt_lookup")
"""Drafters by default. They use nothing but their own request."""
SUFFIX_METHOD = "domain_window"
"""Drafter of vLLM's method `suffix`."""
_METHOD_PATTERN = f"({'|'.join((*AUTO_DRAFT_METHODS, SUFFIX_METHOD))})"
_SPECULATION_PATTERN = rf"^(auto|off|{_METHOD_PATTERN}(,{_METHOD_PATTERN})*)$(?!\n)"
MIN_LOOKUP_TOKENS = 3
"""Minimum number of equal tokens after which prompt lookup drafts."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `speculative_config`, as far as it has a meaning here. It changes the number of drafts and no output."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"] | None = None
    """Drafter: prompt lookup, finished outputs, a draft model, or a head. Those that cost nothing are used beside it.

    By default that of `model`, or prompt lookup."""
    model: str | None = None
    """Draft model or EAGLE-3 head, named like a model."""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Maximum number of drafts of a sequence in one step, by default 16, which is also the highest value in effect."""
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1)] = MIN_LOOKUP_TOKENS
    """Minimum number of equal tokens. Values below 3 count as 3."""
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Maximum number of compared tokens in vLLM. The longest match is always preferred here."""
    draft_tensor_parallel_size: Literal[1] = 1
    """Number of devices of the draft model in vLLM."""

    def __post_init__(self) -> None:
        """Raise ValueError if the model does not fit the method."""
        takes_model = self.method in {None, "draft_model", "eagle3"}
        if self.model is not None and not takes_model:
            raise ValueError(f"the method {self.method} has no model; leave model out")
        if self.model is None and self.method in {"draft_model", "eagle3"}:
            raise ValueError(f"the method {self.method} needs a model; set model")


VERIFYING_MODEL = "verifying the model"
LOADING_WEIGHTS = "loading weights"
WARMING_UP = "warming up"
"""Activities that an engine reports during its start, beside preparations."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine, each declared once. The loader replaces None and "auto" by values for model and device.

    All of them are arguments of `LLM`. Those with `option` are also options of `argosy serve` and `argosy replica`, and
    of a pool in a fleet file.
    """

    model: Annotated[
        str,
        option(
            "A directory in Hugging Face layout, a GGUF file, a name on the hub (owner/name, owner/name:Q4_K_M), or"
            " the name of a bundled model (argosy-mini). Also store:NAME or sha256:DIGEST for a model of the store, or"
            " a URL (s3://...)."
        ),
    ]
    revision: Annotated[str, option("Branch, tag or commit.", "Model")] | None = None
    digest: (
        Annotated[
            str,
            option(
                "Digest that the model must have (sha256:...). Its files are verified before they are loaded.",
                "Model",
                pattern=r"^sha256:[0-9a-f]{64}$(?!\n)",
                examples=["sha256:" + "0" * 64],
            ),
        ]
        | None
    ) = None
    dtype: Annotated[DType, option("Data type of weights and KV cache.", "Model")] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        option("Device that runs the model; auto selects a GPU if there is one.", "Model"),
    ] = "auto"
    quantize: (
        Annotated[
            QuantizeSetting,
            option(
                "Quantize weights while they are loaded; fp8 needs a CUDA device. By default, a quantized checkpoint"
                " computes with its own integers, and `none` dequantizes it.",
                "Model",
            ),
        ]
        | None
    ) = None
    task: Annotated[
        ModelTask,
        option(
            "Use of the model: generate text, embed texts or score pairs of texts. auto follows the files of the"
            " checkpoint.",
            "Model",
        ),
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        option(
            "Implementation of the model: Argosy's own decoder, that of transformers, or auto: the own one for the"
            " families that it knows.",
            "Model",
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        option(
            "Run Python code in the model's directory, if transformers does not know it. It may do anything.",
            "Model",
        ),
    ] = False
    generation_config: Annotated[
        str,
        option(
            "Source of sampling defaults: the model's generation_config.json (auto), none, or that of a folder.",
            "Model",
            metavar="auto|none|FOLDER",
        ),
    ] = "auto"
    """`none` (or `vllm`) keeps the end-of-sequence ids of the model's file."""
    override_generation_config: Annotated[
        dict[str, float | None],
        option(
            'Sampling defaults that replace those of the generation config, like {"temperature": 0.6}.',
            "Model",
            metavar="JSON",
        ),
    ] = {}
    """None removes a default."""
    max_model_len: (
        Annotated[int, option("Maximum tokens of prompt and output.", "Model", ge=1)] | None
    ) = None
    """Must not exceed the model's context length, which is the default."""

    max_seqs: Annotated[int, option("Maximum number of running sequences.", "Memory", ge=1)] = 64
    kv_memory_bytes: (
        Annotated[
            int,
            option(
                "KV cache memory of each replica, like 8GiB; by default a part of the free memory.",
                "Memory",
                ge=1,
            ),
        ]
        | None
    ) = None
    kv_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        option(
            "Data type of the KV cache: auto is the model's, int8 takes about half the memory, fp8 needs a GPU.",
            "Memory",
        ),
    ] = "auto"
    kv_scales: (
        Annotated[
            Literal["unit"],
            option(
                "Scales of an fp8 KV cache, without which it is refused: unit stores keys and values as they are.",
                "Memory",
            ),
        ]
        | None
    ) = None
    host_kv_bytes: Annotated[
        int, option("Host memory for evicted KV blocks; by default none.", "Memory", ge=0)
    ] = 0
    memory_headroom_bytes: Annotated[
        int,
        option(
            "Memory that an engine process may take besides weights, KV caches and the tensors of a step, such as for"
            " grammars. Beyond it, the process drops caches, ends the requests that cause most of it, and is replaced"
            " at last, while its streams pause. 0 sets no bound.",
            "Memory",
            ge=0,
        ),
    ] = 2 << 30
    enable_lora: Annotated[
        bool,
        option("Serve LoRA adapters beside the model, by their name or digest.", "Adapters"),
    ] = False
    adapter_memory_bytes: Annotated[
        int,
        option(
            "Memory of each replica for LoRA adapters, like 2GiB. Beyond it, those that were used longest ago are"
            " evicted.",
            "Adapters",
            ge=1,
        ),
    ] = 2 << 30
    pack_cache_bytes: Annotated[
        int,
        option(
            "Disk space for packed weights, which make starts fast and let replicas share memory;"
            " 32GiB by default, 0 disables it.",
            "Memory",
            ge=0,
        ),
    ] = 32 << 30
    colocated_replicas: Annotated[
        int,
        option(
            "Number of other replicas on the same CPUs or GPU, with which it shares cores and memory.",
            "Memory",
            ge=0,
        ),
    ] = 0

    threads: (
        Annotated[
            int,
            option(
                "CPU threads of each replica. By default OMP_NUM_THREADS, or else as many as other processes leave"
                " free.",
                "Advanced",
                ge=1,
                le=1024,
            ),
        ]
        | None
    ) = None
    max_step_tokens: Annotated[int, option("Token budget of an engine step.", "Advanced", ge=1)] = (
        1024
    )
    batching: Annotated[
        BatchingMode,
        option("How requests share steps; dynamic and static are for comparison.", "Advanced"),
    ] = "continuous"
    prefix_cache: Annotated[
        bool, option("Reuse the KV blocks of prompts with a common prefix.", "Advanced")
    ] = True
    speculation: Annotated[
        str,
        option(
            "Draft tokens and verify several in a step, which is faster and changes no output: auto, off, or some of"
            " forced_tokens, prediction, prompt_lookup (which are auto) and domain_window. There are drafts only where"
            " the test at start shows that they are exact.",
            "Advanced",
            pattern=_SPECULATION_PATTERN,
            metavar="auto|off|METHOD[,METHOD]",
            examples=["auto", "off", "prompt_lookup,domain_window"],
        ),
    ] = "auto"
    draft_model: (
        Annotated[
            str,
            option(
                "Smaller model with the same tokenizer, or EAGLE-3 head of the model, that drafts tokens on CPUs. It is"
                " named like a model, and loaded in the model's formats.",
                "Advanced",
            ),
        ]
        | None
    ) = None
    speculative_config: (
        Annotated[
            SpeculativeConfig,
            option(
                'vLLM\'s settings of drafts, like {"method": "mtp", "num_speculative_tokens": 4}. Methods are ngram,'
                " suffix, draft_model, eagle3 and mtp.",
                "Advanced",
                metavar="JSON",
            ),
        ]
        | None
    ) = None
    step_log: (
        Annotated[
            str,
            option(
                "Folder for the step log: what each step computes, and its duration, without texts. `argosy twin fit`"
                " reads it. Each engine process writes up to 64 MiB.",
                "Advanced",
                metavar="FOLDER",
            ),
        ]
        | None
    ) = None
    request_timeout_s: (
        Annotated[float, option("Timeout of one request in seconds.", "Advanced", ge=0.001)] | None
    ) = None
    """None sets no deadline."""

    max_prefill_fraction: Annotated[float, msgspec.Meta(ge=0)] = 0.25
    """Maximum fraction of the token budget for prefills while decodes run."""
    max_batch_wait_s: float = 0.05
    """Maximum time for which `dynamic` batching waits for a full batch."""
    max_steps_in_flight: int | None = None
    """Number of steps in flight while the next one is planned. None takes the device's default."""
    block_size: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_BLOCK_SIZE
    """Tokens of a KV block."""
    num_blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """KV blocks. None takes as many as `kv_memory_bytes` has room for."""
    watermark: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    """Fraction of the blocks that stays free for the growth of running sequences."""
    stall_timeout_s: float = 60.0
    """Time without a finished step after which a busy engine core is restarted. On a machine without idle CPUs, only
    the CPU time that it got counts, but at least a tenth."""
    max_load_attempts: int = 3
    """Number of times that the model is tried to load."""
    warmup: bool = True
    """Whether to compute some tokens before the engine is ready."""

    @property
    def draft_methods(self) -> tuple[str, ...]:
        """Names of the drafters. Empty if there is no speculation."""
        if self.speculation == "off":
            return ()
        stated = self.speculation.split(",")
        methods = AUTO_DRAFT_METHODS if self.speculation == "auto" else tuple(stated)
        config = self.speculative_config
        return (*methods, SUFFIX_METHOD) if config and config.method == "suffix" else methods

    @property
    def draft_source(self) -> str | None:
        """Name of the model that drafts, which is the model itself if its checkpoint has a head for that, or None."""
        config = self.speculative_config or SpeculativeConfig()
        return self.model if config.method == "mtp" else self.draft_model or config.model

    def __post_init__(self) -> None:
        """Raise ValueError if a value has another type or is out of its range, or two models should draft."""
        check_fields(self)
        config = self.speculative_config
        if self.draft_model is None or config is None:
            return
        if config.method == "mtp" or config.model not in {None, self.draft_model}:
            raise ValueError("draft_model and speculative_config name two drafters; set one")
