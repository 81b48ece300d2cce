"""Validation of `LLM` and `AsyncLLM` arguments, which turns them into engine requests."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypedDict, TypeVar

import msgspec
import structlog

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import AdapterSource
from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.offline_prompts import Conversation, PromptInput, parse_prompt, to_plain
from argosy.engine.outputs import RequestOutputCollector
from argosy.engine.serving.adapter_files import read_adapter_source
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders, RequestProcessor
from argosy.engine.serving.preprocessing.sampling_params import choice_seed
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.protocol import (
    MAX_TOKENS,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingParams,
)


@dataclass(frozen=True)
class LoRARequest:
    """LoRA adapter of a call, in vLLM's form. Its content identifies it, whatever its name and its number are."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    """Folder of the adapter."""


RequestOptions = dict[str, Any]
"""Fields of a request body besides prompt and sampling parameters, such as `tools` or `structured_outputs`."""
Body = TypeVar("Body")
MAX_TEMPLATES = 8
"""Maximum number of chat templates of single calls that are kept."""


class GenerationOptions(TypedDict, total=False):
    """Constraints of generated text, in the shapes of the HTTP API."""

    structured_outputs: dict[str, Any] | None
    """Object with one of the fields `json` (a schema), `regex`, `choice`, `grammar` and `structural_tag`."""
    response_format: dict[str, Any] | None
    """`{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}` or `{"type": "json_object"}`."""
    timeout_s: float | None
    """Seconds after which the request ends with the tokens it has. None sets no deadline."""
    lora_request: LoRARequest | list[LoRARequest | None] | None
    """Adapter of all prompts, or one for each. Needs `enable_lora`."""
    priority: int | None
    """0 to 8. Requests with a higher number wait for those with a lower one."""
    cache_salt: str | None
    """Separates the cached prompts of this call from others."""
    speculation: bool | None
    """False computes one token a step, without drafts. The output is the same."""
    truncate_prompt_tokens: int | None
    """Number of tokens at the end of a longer prompt that are kept."""
    add_special_tokens: bool | None
    """Whether the tokenizer adds its special tokens, such as the one for the beginning of a text."""


class ChatOptions(GenerationOptions, total=False):
    """Options of a conversation, in the shapes of the HTTP API and of vLLM's `LLM.chat`."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    thinking_token_budget: int | None
    chat_template: str | Path | None
    """Jinja source of a chat template, or its file."""
    chat_template_kwargs: dict[str, Any] | None
    """Variables of the chat template, such as `{"enable_thinking": False}`."""
    add_generation_prompt: bool | None
    """Whether the prompt ends with the beginning of an answer. By default it does, unless a message is continued."""
    continue_final_message: bool | None
    """Whether the answer continues the last message."""


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

    def __init__(
        self,
        config: EngineConfig,
        ready: CoreReady,
        *,
        chat_template: str | Path | None = None,
        seed: int | None = None,
    ) -> None:
        """Load the tokenizer and the chat template.

        Args:
            config: Settings of the engine.
            ready: Properties of the loaded model.
            chat_template: Source or file of a template that replaces that of the checkpoint.
            seed: Seed from which requests without a seed get theirs. None takes random ones.

        Raises:
            ValueError: A file cannot be used.
        """
        self._config = config
        self._ready = ready
        self._path = resolve_model_path(config.model, config.revision, config.digest)
        self._text_processing = _load_text_processing(self._path, chat_template, config)
        self.tokenizer = self._text_processing.tokenizer
        self.processor = self._text_processing.create_processor(ready, config)
        self._processors_by_template: dict[str, RequestProcessor] = {}
        """Processors by template of a call, or by adapter with a template of its own."""
        self._seed = seed
        self._request_numbers = itertools.count()

    def prepare_completion(
        self, prompt: PromptInput, params: SamplingParams | None, options: RequestOptions
    ) -> RequestOutputCollector:
        """Validate a prompt and return the collector of its engine requests."""
        content, cache_salt = parse_prompt(prompt)
        number = next(self._request_numbers)
        fields = self._sampling_fields(params, number) | {"prompt": content}
        if params is not None:
            fields["logprobs"] = to_plain(params.logprobs)
            if params.max_tokens is None:
                fields |= {"max_tokens": MAX_TOKENS, "clamp_max_tokens": True}
        if cache_salt is not None:
            fields["cache_salt"] = cache_salt
        adapter, options = self._select_adapter(options)
        body = to_body(fields | options, CompletionRequest)
        request_id = f"offline-{number}"
        headers = GatewayHeaders(request_id=request_id, adapter=adapter)
        prepared = self.processor.prepare_completion(body, headers)
        text = content if isinstance(content, str) else None
        return RequestOutputCollector(request_id, text, prepared, self.tokenizer)

    def prepare_chat(
        self, messages: Conversation, params: SamplingParams | None, options: RequestOptions
    ) -> RequestOutputCollector:
        """Validate a conversation and return the collector of its engine requests."""
        number = next(self._request_numbers)
        fields = self._sampling_fields(params, number) | {
            "messages": [dict(message) for message in messages]
        }
        logprobs = None if params is None else to_plain(params.logprobs)
        if logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": logprobs}
        adapter, options = self._select_adapter(options)
        processor, options = self._select_template(options, adapter)
        body = to_body(fields | options, ChatCompletionRequest)
        request_id = f"offline-{number}"
        headers = GatewayHeaders(request_id=request_id, adapter=adapter)
        prepared = processor.prepare_chat(body, headers)
        return RequestOutputCollector(request_id, None, prepared, self.tokenizer)

    def _sampling_fields(self, params: SamplingParams | None, number: int) -> dict[str, Any]:
        """Return the body's fields of the sampling parameters. Without parameters, the model's defaults apply."""
        fields = {"model": ""} | (
            {"max_tokens": SamplingParams().max_tokens}
            if params is None
            else _to_body_fields(params)
        )
        if self._seed is not None and "seed" not in fields:
            fields["seed"] = choice_seed(self._seed, number + 1)
        return fields

    def _select_adapter(
        self, options: RequestOptions
    ) -> tuple[AdapterSource | None, RequestOptions]:
        """Return the adapter of the options, and the options without it.

        Raises:
            ValueError: Adapters are not enabled, or its folder holds none.
        """
        request = options.get("lora_request")
        if request is None:
            return None, options
        if not self._config.enable_lora:
            raise ValueError("lora_request needs enable_lora=True, which LLM and AsyncLLM take")
        folder = getattr(request, "lora_path", None)  # vLLM's own class has it, too
        if not isinstance(folder, str | Path) or not str(folder):
            raise ValueError("lora_request needs LoRARequest(name, number, path of a folder)")
        others = {name: value for name, value in options.items() if name != "lora_request"}
        return read_adapter_source(Path(folder).expanduser().resolve()), others

    def _select_template(
        self, options: RequestOptions, adapter: AdapterSource | None
    ) -> tuple[RequestProcessor, RequestOptions]:
        """Return the processor with the template of the options or the adapter, and the options without it."""
        template = options.get("chat_template")
        key = str(template) if template is not None else "" if adapter is None else adapter.digest
        if not key:
            return self.processor, options
        processors = self._processors_by_template
        if key not in processors:
            if len(processors) >= MAX_TEMPLATES:
                processors.pop(next(iter(processors)))
            processors[key] = self._create_processor(template, adapter)
        others = {name: value for name, value in options.items() if name != "chat_template"}
        return processors[key], others

    def _create_processor(
        self, template: str | Path | None, adapter: AdapterSource | None
    ) -> RequestProcessor:
        own = self._text_processing
        if template is not None:
            own = _load_text_processing(self._path, template, self._config)
        elif adapter is not None:
            own = own.with_template_of(Path(adapter.folder))
        if own is self._text_processing:
            return self.processor
        return own.create_processor(self._ready, self._config, self.processor.check_grammar)


def _load_text_processing(
    path: Path, chat_template: str | Path | None, config: EngineConfig
) -> TextProcessing:
    """Load the text side of the checkpoint. A template that looks like Jinja source is not taken for a file name."""

    def load(template: str | None) -> TextProcessing:
        return TextProcessing.load(
            path,
            template,
            generation_config=config.generation_config,
            override_generation_config=config.override_generation_config,
        )

    if isinstance(chat_template, str) and not {"{", "\n"}.isdisjoint(chat_template):
        with NamedTemporaryFile("w", suffix=".jinja", encoding="utf-8") as file:
            file.write(chat_template)
            file.flush()
            return load(file.name)
    return load(None if chat_template is None else str(chat_template))


def to_body(fields: dict[str, Any], body_type: type[Body]) -> Body:
    """Convert fields to a request body.

    Raises:
        ApiError: 400 naming a field that is unknown or has the wrong type.
    """
    try:
        return msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        raise ApiError(
            400, "invalid_value", f"the arguments do not fit the API: {error}"
        ) from error


def _to_body_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the set parameters that a request body has. `logprobs` differs between completions and chats."""
    constraint = params.structured_outputs
    if constraint is not None and not isinstance(constraint, Mapping):
        constraint = vars(constraint)  # an object such as vLLM's StructuredOutputsParams
    set_constraint = constraint and {
        name: value for name, value in constraint.items() if value is not None
    }
    fields = {
        name: to_plain(getattr(params, name))
        for name in params.__struct_fields__
        if name in CompletionRequest.__struct_fields__ and name not in ("grammar", "logprobs")
    } | {
        "structured_outputs": set_constraint,
        "thinking_token_budget": params.thinking_token_budget,
    }
    return {name: value for name, value in fields.items() if value is not None}


def expand_sampling_params(sampling_params: object, count: int) -> list[SamplingParams | None]:
    """Return the sampling parameters of each of `count` prompts, given those of all or one item per prompt.

    Raises:
        ValueError: `sampling_params` is a sequence of another length than `count`.
        TypeError: An item is of another type.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    items = list(sampling_params) if isinstance(sampling_params, Iterable) else [sampling_params]
    params = [item for item in items if isinstance(item, SamplingParams)]
    if len(params) < len(items) or isinstance(sampling_params, Mapping):
        raise TypeError(
            f"sampling_params is a {type(sampling_params).__name__}; give argosy.SamplingParams(...), one or a list"
        )
    if len(items) != count:
        raise ValueError(
            f"{len(items)} SamplingParams for {count} prompts; give one for all prompts or one per prompt"
        )
    return [*params]
