"""Request bodies of the OpenAI API with vLLM's extensions.

Every field of the API is declared here, including unsupported ones (tools, audio and others), so that their rejection
can explain the reason. Undeclared fields are ignored by `parse_request_body` and rejected by `parse_body`. The value
`None` always means that the field is absent. Number ranges are checked later by `engine.serving.preprocessing`, which
knows the model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

JsonObject = dict[str, Any]
"""JSON object that is validated later, or rejected as a whole."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for what a stream contains besides the deltas."""

    include_usage: bool | None = None
    """Whether a chunk with the usage precedes `[DONE]`; all other chunks then contain `"usage": null`."""
    continuous_usage_stats: bool | None = None
    """Whether, with `include_usage`, every chunk contains the usage so far (vLLM)."""
    include_obfuscation: bool | None = None
    """Accepted and ignored; nothing is padded."""


class ResumeInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens that another replica has generated; the response continues exactly after them.

    The tokens count toward `max_tokens` and the usage, and are not sent again.
    """

    token_ids: list[int | list[int]]
    """Token ids of the only choice, or one list of token ids for each choice in index order."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a message. Only texts, an assistant's `refusal` and its reasoning are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None
    """Reasoning, as is `reasoning`: a text, or a list of text parts."""
    reasoning: Any = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    audio_url: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None
    """Cache marker of other APIs, as is `cache_control`. Argosy may cache all of a prompt."""
    cache_control: Any = None


class ChatMessageParam(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message of a conversation. The chat template defines the supported roles."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    function_call: JsonObject | None = None
    audio: JsonObject | None = None
    cache_control: Any = None
    annotations: Any = None
    """With the next four, fields that APIs and client libraries add to a response's text and send back with it."""
    parsed: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: list[Any] | None = None
    reasoning_details: list[Any] | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to `/v1/chat/completions` and `/v1/completions`."""

    model: str | None = None
    """None for the only model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int | str, float] | None = None
    """Bias by token id, or by text (llama.cpp)."""
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    # Extensions of vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    """Whether choices contain `token_ids`, and the first chunk of each choice `prompt_token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """Whether logprobs name tokens as `token_id:123`."""
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    guided_json: str | JsonObject | bool | None = None
    """Constraint in vLLM's older spelling, as are the next fields. `structured_outputs` replaces them."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | JsonObject | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: str | JsonObject | None = None
    """Constraint in the spelling of SGLang and llama.cpp, as are the next fields."""
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: JsonObject | None = None
    stream_interval: int | None = None

    # Extensions of Argosy
    timeout_s: float | None = None
    """Seconds after which the request ends with its output so far and `stop_reason` "deadline"."""
    speculation: bool | None = None
    """Whether the output may be drafted, which changes its speed and nothing else. The default is true."""
    clamp_max_tokens: bool | None = None
    """Whether `max_tokens` is lowered to what the context leaves for the output, instead of an error."""
    resume: ResumeInput | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text that the output probably repeats in large parts, such as a file of which the output is a new version."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`, with the 36 fields of the OpenAI SDK and the extensions."""

    messages: list[ChatMessageParam]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    audio: JsonObject | None = None
    function_call: str | JsonObject | None = None
    functions: list[JsonObject] | None = None
    metadata: dict[str, str] | None = None
    modalities: list[str] | None = None
    moderation: JsonObject | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    tool_choice: str | JsonObject | None = None
    tools: list[JsonObject] | None = None
    verbosity: str | None = None
    web_search_options: JsonObject | None = None

    # Extensions of vLLM
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: list[JsonObject] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    # Extension of Argosy
    truncation: Literal["auto", "disabled"] | None = None
    """Whether the oldest messages are dropped if the conversation is too long, instead of an error (`auto`)."""


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`, with the 17 fields of the OpenAI SDK and the extensions."""

    prompt: str | list[str | int | list[int]]
    """Text, list of texts, list of token ids, or list of such lists."""
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /tokenize`, with exactly one of `prompt`, `messages` and `content`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessageParam] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[JsonObject] | None = None

    # llama.cpp's names, whose texts get no special tokens unless `add_special` is set
    content: str | None = None
    add_special: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class SleepQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of `POST /sleep`."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1
    """1 frees the KV cache and all other memory but the weights, 2 also the weights."""
    deadline_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    """Seconds after which running requests are ended with the error code `draining`. By default they finish."""


class WakeUpQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of `POST /wake_up`."""

    tags: list[str] = []
    """Parts to wake up, `weights` or `kv_cache`; by default all. The parameter may be repeated."""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optional body of `POST /drain`."""

    deadline_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    """Seconds after which running requests are ended with the error code `draining`."""


LoraName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of vLLM's `POST /v1/load_lora_adapter`."""

    lora_name: LoraName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Folder of the adapter, `store:NAME`, or its digest."""
    load_inplace: bool = False
    """Whether a name that exists gets this version."""
    pinned: bool = False
    """Whether the adapter is never evicted."""


class UnloadLoraAdapterRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Body of vLLM's `POST /v1/unload_lora_adapter`."""

    lora_name: LoraName
