"""Answers of the replica: the OpenAI API's objects with vLLM's extras, and the operator's endpoints.

Fields that are `UNSET` are left out of the JSON; `None` is sent as null.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReason = Literal["stop", "length", "timeout"]
"""`timeout` is ours: the request ran out of its time and this is what there was."""


class PromptTokenUsageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request: each prompt once, all choices' output, tokens of a resume included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenUsageInfo


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled token at a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat choice."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a legacy choice: parallel lists; an echoed prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's record of one candidate at a prompt position (the key is its token id)."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One for each prompt token; null for the first."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the assistant said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; null for the model's own end of sequence."""
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "argosy"
    root: str
    parent: None = None
    max_model_len: int | None
    """None: nobody has told."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/detokenize`."""

    prompt: str


class StatusResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/health`, `/ready` and `/drain`."""

    status: str


class VersionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/version`."""

    version: str


MAX_COUNT = 2**53
"""No server has more of anything; a number that no float holds would fail whoever computes with it."""
NonNegativeCount = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class LoadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/load`: what a router needs to choose a replica."""

    server_load: NonNegativeCount
    """Generation requests being answered (vLLM's name)."""
    state: str
    models: list[str]
    running: NonNegativeCount
    waiting: NonNegativeCount
    queued_tokens: NonNegativeCount
    """Prompt tokens waiting to be computed, those of running prefills too."""
    max_seqs: NonNegativeCount
    max_model_len: NonNegativeCount
    block_size: NonNegativeCount
    kv_blocks_total: NonNegativeCount
    kv_blocks_used: NonNegativeCount
    kv_blocks_cached: NonNegativeCount
    step: NonNegativeCount
    step_s: NonNegativeFloat
    prefill_tokens_per_s: NonNegativeFloat = 0.0
    """Measured by the engine; 0: not yet."""
    decode_s: NonNegativeFloat = 0.0
    """Seconds between a sequence's tokens, were one more to run; measured, 0: not yet."""
    other_gateways: list[dict[int, NonNegativeCount]] = []
    """Of each gateway that has requests here, but for the one that asks: how many, by their tier."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, and a stable `code` to act on."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every refusal and failure."""

    error: ErrorDetail
    request_id: str
