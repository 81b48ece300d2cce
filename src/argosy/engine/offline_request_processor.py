"""Validation of `LLM` and `AsyncLLM` arguments, which turns them into engine requests."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec
import structlog

from argosy.engine.engine_config import DType, EngineConfig, WeightFormat
from argosy.engine.execution.checkpoint import resolve_model_path
from argosy.engine.outputs import RequestOutputCollector
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ApiError, ChatCompletionRequest, CompletionRequest, SamplingParams

TextOrTokens = str | Sequence[int]
"""Prompt, as text or as token ids."""
Conversation = Sequence[dict[str, Any]]
"""Messages in the format of the OpenAI API, such as `{"role": "user", "content": "Hello"}`."""
RequestOptions = dict[str, Any]
"""Fields of a request body besides prompt and sampling parameters, such as `tools` or `structured_outputs`."""
Body = TypeVar("Body")


class GenerationOptions(TypedDict, total=False):
    """Constraints of generated text, in the shapes of the HTTP API."""

    structured_outputs: dict[str, Any] | None
    """Object with one of the fields `json` (a schema), `regex`, `choice`, `grammar` and `structural_tag`."""
    response_format: dict[str, Any] | None
    """`{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}` or `{"type": "json_object"}`."""
    timeout_s: float | None
    """Seconds after which the request ends with the tokens it has. None sets no deadline."""


class ChatOptions(GenerationOptions, total=False):
    """Options of a conversation, in the shapes of the HTTP API."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    thinking_token_budget: int | None
    chat_template_kwargs: dict[str, Any] | None
    """Variables of the chat template, such as `{"enable_thinking": False}`."""


def to_engine_config(
    model: str | Path | EngineConfig | None,
    *,
    revision: str | None,
    dtype: DType,
    quantize: WeightFormat | None,
    threads: int | None,
    max_model_len: int | None,
    max_seqs: int,
    kv_memory_bytes: int | None,
    host_kv_bytes: int,
) -> EngineConfig:
    """Return `model` if it is an `EngineConfig`. Otherwise build one from the model and the options."""
    if isinstance(model, EngineConfig):
        return model
    return EngineConfig(
        model=str(BUNDLED_MODEL if model is None else model),
        revision=revision,
        dtype=dtype,
        quantize=quantize,
        threads=threads,
        max_model_len=max_model_len,
        max_seqs=max_seqs,
        kv_memory_bytes=kv_memory_bytes,
        host_kv_bytes=host_kv_bytes,
    )


def configure_quiet_logging() -> None:
    """Log warnings only, to standard error, unless the program has configured structlog itself."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


class OfflineRequestProcessor:
    """Validator of prompts and parameters, with the same rules as the HTTP API.

    Validates eagerly. Methods raise `ApiError` before a request is queued.
    """

    def __init__(self, config: EngineConfig, ready: CoreReady) -> None:
        path = resolve_model_path(config.model, config.revision)
        text_processing = TextProcessing.load(
            path,
            generation_config=config.generation_config,
            override_generation_config=config.override_generation_config,
        )
        self.tokenizer = text_processing.tokenizer
        self._processor = text_processing.create_processor(ready, config)
        self._request_numbers = itertools.count()

    def prepare_completion(
        self, prompt: TextOrTokens, params: SamplingParams, n: int, options: RequestOptions
    ) -> RequestOutputCollector:
        """Validate a prompt and return the collector of its engine requests."""
        prompt_field = prompt if isinstance(prompt, str) else list(prompt)
        body = _to_body(
            _sampling_fields(params, n)
            | {"prompt": prompt_field, "logprobs": params.logprobs}
            | options,
            CompletionRequest,
        )
        request_id = self._next_request_id()
        prepared = self._processor.prepare_completion(body, GatewayHeaders(request_id=request_id))
        return RequestOutputCollector(
            request_id, prompt if isinstance(prompt, str) else None, prepared, self.tokenizer
        )

    def prepare_chat(
        self, messages: Conversation, params: SamplingParams, n: int, options: RequestOptions
    ) -> RequestOutputCollector:
        """Validate a conversation and return the collector of its engine requests."""
        chat_fields = {
            "messages": list(messages),
            "logprobs": None if params.logprobs is None else True,
            "top_logprobs": params.logprobs,
        }
        body = _to_body(_sampling_fields(params, n) | chat_fields | options, ChatCompletionRequest)
        request_id = self._next_request_id()
        prepared = self._processor.prepare_chat(body, GatewayHeaders(request_id=request_id))
        return RequestOutputCollector(request_id, None, prepared, self.tokenizer)

    def _next_request_id(self) -> str:
        return f"offline-{next(self._request_numbers)}"


def _to_body(fields: dict[str, Any], body_type: type[Body]) -> Body:
    try:
        return msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        raise ApiError(
            400, "invalid_value", f"the arguments do not fit the API: {error}"
        ) from error


def split_prompts(prompts: TextOrTokens | Sequence[TextOrTokens]) -> list[TextOrTokens]:
    """Return one prompt or several as a list.

    Raises:
        ValueError: The sequence mixes token ids and prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    token_ids = [item for item in prompts if isinstance(item, int)]
    prompt_list = [item for item in prompts if not isinstance(item, int)]
    if token_ids and prompt_list:
        raise ValueError("prompts mix token ids and prompts; give a list of lists of ids")
    return [token_ids] if token_ids else prompt_list


def split_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return one conversation or several as a list.

    Raises:
        ValueError: The sequence mixes messages and conversations.
    """
    message_list = [item for item in messages if isinstance(item, dict)]
    conversations = [item for item in messages if not isinstance(item, dict)]
    if message_list and conversations:
        raise ValueError(
            "messages mix conversations and messages; give one conversation or a list of conversations"
        )
    return [message_list] if message_list else conversations


def expand_sampling_params(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts.

    Raises:
        ValueError: `sampling` is a sequence of another length than `count`.
    """
    if sampling is None:
        sampling = SamplingParams()
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise ValueError(
            f"{len(sampling)} SamplingParams for {count} prompts; give one for all prompts or one per prompt"
        )
    return list(sampling)


def _sampling_fields(params: SamplingParams, n: int) -> dict[str, Any]:
    """Convert sampling parameters to the fields of a request body."""
    return {
        "model": "",
        "n": n,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": params.logit_bias or None,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        "seed": params.seed,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "ignore_eos": params.ignore_eos,
        "prompt_logprobs": params.prompt_logprobs,
        "skip_special_tokens": params.skip_special_tokens,
    }
