"""Methods and arguments of vLLM's `LLM` that have no equivalent, with what to use instead."""

from __future__ import annotations

from typing import Any

from argosy.engine.offline_prompts import to_plain

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
"""Method -> remedy."""
_UNSUPPORTED_OPTIONS = {
    "prompt_token_ids": "Give prompts of token ids, or dictionaries with this key, as `prompts`.",
    "lora_request": "Merge the adapter into the model.",
    "prompt_adapter_request": "Merge the adapter into the model.",
    "tokenization_kwargs": "Set truncate_prompt_tokens or add_special_tokens.",
    "mm_processor_kwargs": "Models take text only.",
    "guided_options_request": "Use structured_outputs.",
    "chat_template_content_format": "The format follows from the template; leave it at 'auto'.",
    "documents": "Put their text into a message.",
}
"""Option of a call -> remedy."""


def drop_neutral_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call that are set.

    Raises:
        ValueError: An option of vLLM is set that is not supported. The message says what to use.
    """
    for name, remedy in _UNSUPPORTED_OPTIONS.items():
        if options.get(name) not in (None, {}, [], "auto"):
            raise ValueError(f"{name} is not supported. {remedy}")
    return {
        name: to_plain(value)
        for name, value in options.items()
        if value is not None and name not in _UNSUPPORTED_OPTIONS
    }
