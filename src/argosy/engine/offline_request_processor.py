"""From Python arguments to checked engine requests: the door of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from argosy.engine.engine_config import DType, EngineConfig, WeightFormat
from argosy.engine.execution.checkpoint import resolve_model_path
from argosy.engine.outputs import RequestOutputCollector
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders, RequestProcessor
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ApiError, ChatCompletionRequest, CompletionRequest, SamplingParams

TextOrTokens = str | Sequence[int]
"""A prompt: text, or token ids."""
Conversation = Sequence[dict[str, Any]]
"""Messages as the OpenAI API has them: `{"role": "user", "content": "Hello"}`."""


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
    """The settings: those of an `EngineConfig` as they are, or made from a model and options."""
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
    """Keep the engine's log out of a program that has not configured structlog: warnings, stderr."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


class OfflineRequestProcessor:
    """Checks prompts and parameters exactly as the HTTP door does. Raises ApiError, never later."""

    def __init__(self, config: EngineConfig, ready: CoreReady) -> None:
        path = resolve_model_path(config.model, config.revision)
        self.tokenizer = Tokenizer.load(path)
        self._processor = RequestProcessor(self.tokenizer, ChatTemplate.load(path), ready, config)
        self._request_numbers = itertools.count()

    def prepare_completion(
        self, prompt: TextOrTokens, params: SamplingParams, n: int
    ) -> RequestOutputCollector:
        """A prompt to continue."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = msgspec.convert(
            _sampling_fields(params, n) | {"prompt": given, "logprobs": params.logprobs},
            CompletionRequest,
        )
        name = self._next_request_id()
        job = self._processor.prepare_completion(body, GatewayHeaders(request_id=name))
        return RequestOutputCollector(
            name, prompt if isinstance(prompt, str) else None, job, self.tokenizer
        )

    def prepare_chat(
        self, messages: Conversation, params: SamplingParams, n: int
    ) -> RequestOutputCollector:
        """A conversation to answer."""
        asked = {
            "messages": list(messages),
            "logprobs": None if params.logprobs is None else True,
            "top_logprobs": params.logprobs,
        }
        try:
            body = msgspec.convert(_sampling_fields(params, n) | asked, ChatCompletionRequest)
        except msgspec.ValidationError as error:
            raise ApiError(400, "invalid_value", f"not a conversation: {error}") from error
        name = self._next_request_id()
        job = self._processor.prepare_chat(body, GatewayHeaders(request_id=name))
        return RequestOutputCollector(name, None, job, self.tokenizer)

    def _next_request_id(self) -> str:
        return f"offline-{next(self._request_numbers)}"


def split_prompts(prompts: TextOrTokens | Sequence[TextOrTokens]) -> list[TextOrTokens]:
    """One prompt or several, as a list. Raises ValueError when that cannot be told."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    several = [item for item in prompts if not isinstance(item, int)]
    if ids and several:
        raise ValueError("prompts mix token ids and prompts; give a list of lists of ids")
    return [ids] if ids else several


def split_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several, as a list. Raises ValueError when that cannot be told."""
    single = [item for item in messages if isinstance(item, dict)]
    several = [item for item in messages if not isinstance(item, dict)]
    if single and several:
        raise ValueError("messages mix conversations and messages; give one or the other")
    return [single] if single else several


def expand_sampling_params(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts. Raises ValueError when the numbers differ."""
    if sampling is None:
        sampling = SamplingParams()
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise ValueError(
            f"{len(sampling)} SamplingParams for {count} prompts; give one, or one for each"
        )
    return list(sampling)


def _sampling_fields(params: SamplingParams, n: int) -> dict[str, Any]:
    """Sampling parameters as the fields of a request body."""
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
