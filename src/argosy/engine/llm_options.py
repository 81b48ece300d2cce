"""Options of `LLM` and `AsyncLLM` under the names of Argosy and of vLLM, and what to use instead of other ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from argosy.engine.engine_config import EngineConfig, SpeculativeConfig
from argosy.engine.offline_prompts import to_plain
from argosy.models import BUNDLED_MODEL
from argosy.protocol import UnsupportedOption, unknown_argument_error
from argosy.settings import convert_settings

log = structlog.get_logger(__name__)


_ENGINE_FIELDS = frozenset(EngineConfig.__struct_fields__) - {"model"}
VLLM_NAMES = {
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "max_step_tokens",
    "kv_cache_memory_bytes": "kv_memory_bytes",
    "kv_cache_dtype": "kv_dtype",
    "num_gpu_blocks_override": "num_blocks",
    "enable_prefix_caching": "prefix_cache",
    "quantization": "quantize",
}
"""Names of vLLM, and the options with the same meaning."""


_ALWAYS_NEUTRAL = (None, False, 0, "", "auto")
_IGNORED_OPTIONS = {
    "gpu_memory_utilization": UnsupportedOption((), "Set kv_memory_bytes to limit the KV cache."),
    "swap_space": UnsupportedOption((4,), "Set host_kv_bytes to keep evicted KV blocks."),
    "enforce_eager": UnsupportedOption((), "Graphs are used where they are faster."),
    "cpu_offload_gb": UnsupportedOption((), "Set quantize if the weights do not fit."),
    "max_logprobs": UnsupportedOption((20,), "The limit is 20."),
    "disable_log_stats": UnsupportedOption((True,), "Call get_metrics."),
    "download_dir": UnsupportedOption((), "Set HF_HOME."),
    "max_cpu_loras": UnsupportedOption((), "Set adapter_memory_bytes."),
    "max_loras": UnsupportedOption((), "Any number of adapters share a step."),
    "max_lora_rank": UnsupportedOption((), "Ranks are not padded."),
    **dict.fromkeys(
        (
            "allowed_local_media_path",
            "async_scheduling",
            "attention_config",
            "compilation_config",
            "disable_async_output_proc",
            "disable_custom_all_reduce",
            "disable_sliding_window",
            "distributed_executor_backend",
            "enable_chunked_prefill",
            "fully_sharded_loras",
            "lora_dtype",
            "max_num_partial_prefills",
            "max_seq_len_to_capture",
            "num_scheduler_steps",
            "profiler_config",
            "served_model_name",
            "scheduling_policy",
            "structured_outputs_config",
        ),
        UnsupportedOption((True,), "It has no effect here."),
    ),
}
"""Options that change speed or memory only. A warning names them."""
_ONE_PROCESS = "Run several replicas with `argosy serve --replicas N` instead."
_REFUSED_OPTIONS = {
    "tensor_parallel_size": UnsupportedOption((1,), _ONE_PROCESS),
    "pipeline_parallel_size": UnsupportedOption((1,), _ONE_PROCESS),
    "data_parallel_size": UnsupportedOption((1,), _ONE_PROCESS),
    "runner": UnsupportedOption((), "Set task."),
    "convert": UnsupportedOption(("none",), "Set task."),
    "tokenizer": UnsupportedOption(
        (), "Put the tokenizer's files into the directory of the model."
    ),
    "tokenizer_mode": UnsupportedOption((), "The tokenizer of the checkpoint is used."),
    "tokenizer_revision": UnsupportedOption((), "Set revision."),
    "skip_tokenizer_init": UnsupportedOption((), "The tokenizer is always loaded."),
    "load_format": UnsupportedOption(
        ("safetensors",), "The format is that of the checkpoint's files."
    ),
    "hf_overrides": UnsupportedOption(({},), "Change the config.json of the model."),
    "hf_token": UnsupportedOption((), "Set the environment variable HF_TOKEN."),
    "logits_processors": UnsupportedOption(
        ([],), "Use logit_bias or structured_outputs of a request."
    ),
    "limit_mm_per_prompt": UnsupportedOption(({},), "Models take text only."),
    "mm_processor_kwargs": UnsupportedOption(({},), "Models take text only."),
    "pooler_config": UnsupportedOption((), "The checkpoint states the pooling."),
    "logprobs_mode": UnsupportedOption(
        ("raw_logprobs",), "Log-probabilities are those of raw logits."
    ),
}
"""Options that change the outputs or ask for what does not exist."""
_DTYPE_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_QUANTIZATION_REMEDIES = dict.fromkeys(
    ("awq", "gptq", "awq_marlin", "gptq_marlin", "bitsandbytes", "gguf", "compressed-tensors"),
    "remove it, because the format of a quantized checkpoint is read from its files",
)
UNSUPPORTED_METHODS = {
    "beam_search": "Call generate with SamplingParams(n=...), and rank the outputs by `cumulative_logprob`.",
    "encode": "Call embed, score or classify.",
    "reward": "Call score or classify with a model that has a classification head.",
    "enqueue": "Call generate with all prompts, or use AsyncLLM.",
    "enqueue_chat": "Call chat with all conversations, or use AsyncLLM.",
    "wait_for_completion": "generate and chat return when all outputs are complete.",
    "sleep": "Call close, and create another LLM when you need it.",
    "wake_up": "Create another LLM.",
    "collective_rpc": "The model runs in this process.",
    "apply_model": "The model's layers are not accessible.",
    "start_profile": "Use a profiler of Python or of the system.",
    "stop_profile": "Use a profiler of Python or of the system.",
    "set_tokenizer": "Put the tokenizer's files into the directory of the model.",
    "llm_engine": "Use generate, chat, get_metrics and get_tokenizer.",
}
"""Methods of vLLM's `LLM` that have no equivalent -> remedy."""
_UNSUPPORTED_CALL_OPTIONS = {
    "prompt_token_ids": "Give prompts of token ids, or dictionaries with this key, as `prompts`.",
    "prompt_adapter_request": "Give a LoRA adapter as lora_request.",
    "tokenization_kwargs": "Set truncate_prompt_tokens or add_special_tokens.",
    "mm_processor_kwargs": "Models take text only.",
    "guided_options_request": "Use structured_outputs.",
    "chat_template_content_format": "The format follows from the template; leave it at 'auto'.",
    "documents": "Put their text into a message.",
}
"""Option of a call -> remedy."""


def build_engine_config(
    model: str | Path | EngineConfig | None, options: dict[str, Any]
) -> EngineConfig:
    """Build the settings of the engine. None stands for the bundled model.

    Raises:
        ValueError: An option has an invalid value, is not supported, or stands beside a complete `EngineConfig`.
        TypeError: An option is unknown.
    """
    settings: dict[str, Any] = {}
    for given_name, value in options.items():
        name = VLLM_NAMES.get(given_name, given_name)
        if name in settings:
            raise ValueError(f"{given_name} and {name} are the same option; give one of them")
        if name in _ENGINE_FIELDS:
            if value is not None or given_name == name:  # vLLM's None stands for the default
                settings[name] = to_plain(value)
        else:
            _check_other_option(name, value, model)
    if isinstance(model, EngineConfig):
        if settings:
            raise ValueError(
                f"{min(settings)} must be set in the EngineConfig, beside which it has no effect"
            )
        return model
    if isinstance(settings.get("speculative_config"), dict):
        settings["speculative_config"] = convert_settings(
            settings["speculative_config"], SpeculativeConfig, ("speculative_config",)
        )
    if "dtype" in settings:
        settings["dtype"] = _normalize_dtype(settings["dtype"])
    if settings.get("model_impl") == "vllm":  # the engine's own implementation
        settings["model_impl"] = "argosy"
    quantize = settings.get("quantize")
    if quantize in _QUANTIZATION_REMEDIES:
        raise ValueError(f"quantization {quantize!r}: {_QUANTIZATION_REMEDIES[quantize]}")
    return EngineConfig(model=str(BUNDLED_MODEL if model is None else model), **settings)


def _check_other_option(name: str, value: object, model: str | Path | EngineConfig | None) -> None:
    """Accept an option of vLLM with a neutral value, warn of one that is ignored, and refuse the others."""
    refused, ignored = _REFUSED_OPTIONS.get(name), _IGNORED_OPTIONS.get(name)
    option = refused or ignored
    if option is None:
        raise unknown_argument_error("LLM", name, (*_ENGINE_FIELDS, *VLLM_NAMES))
    is_model_itself = name == "tokenizer" and str(value) == str(model)
    if value in (*_ALWAYS_NEUTRAL, *option.neutral_values) or is_model_itself:
        return
    if refused is not None:
        raise ValueError(f"{name}={value!r} is not supported. {option.remedy}")
    log.warning("option_ignored", option=name, value=str(value), remedy=option.remedy)


def _normalize_dtype(dtype: object) -> str:
    """Return the name of a dtype that is spelled as in vLLM or is a dtype of torch."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_NAMES.get(name, name)


def drop_neutral_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call that are set.

    Raises:
        ValueError: An option of vLLM is set that is not supported. The message says what to use.
    """
    for name, remedy in _UNSUPPORTED_CALL_OPTIONS.items():
        if options.get(name) not in (None, {}, [], "auto"):
            raise ValueError(f"{name} is not supported. {remedy}")
    return {
        name: to_plain(value)
        for name, value in options.items()
        if value is not None and name not in _UNSUPPORTED_CALL_OPTIONS
    }
