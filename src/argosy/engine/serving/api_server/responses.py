"""Whole answers: the finished choices of a request as the OpenAI API's objects."""

from __future__ import annotations

from msgspec import UNSET

from argosy.engine.serving.api_server.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import (
    ApiError,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
)


def build_chat_completion(spec: ResponseSpec) -> ChatCompletion:
    """The answer of `/v1/chat/completions`; every choice has ended."""
    prompt = spec.prompts[0]
    return ChatCompletion(
        id=spec.id,
        created=spec.created_at,
        model=spec.model,
        choices=[_build_chat_choice(spec, choice) for choice in spec.choices],
        usage=spec.usage(),
        prompt_token_ids=prompt.token_ids if spec.include_token_ids else UNSET,
        prompt_logprobs=(
            spec.prompt_logprob_formatter.format_prompt(prompt.logprobs)
            if spec.prompt_logprob_formatter
            else UNSET
        ),
    )


def _build_chat_choice(spec: ResponseSpec, choice: Choice) -> ChatChoice:
    piece = choice.drain()
    if piece.finish_reason is None:
        raise ApiError(500, "internal_error", "A choice has not ended.")
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(content=piece.text),
        logprobs=spec.logprob_formatter.format_chat(piece.logprobs)
        if spec.logprob_formatter
        else None,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        token_ids=piece.tokens if spec.include_token_ids else UNSET,
    )


def build_completion(spec: ResponseSpec) -> Completion:
    """The answer of `/v1/completions`; every choice has ended."""
    return Completion(
        id=spec.id,
        created=spec.created_at,
        model=spec.model,
        choices=[_build_completion_choice(spec, choice) for choice in spec.choices],
        usage=spec.usage(),
    )


def _build_completion_choice(spec: ResponseSpec, choice: Choice) -> CompletionChoice:
    piece = choice.drain()
    prompt = choice.prompt
    tokens, records = piece.tokens, piece.logprobs
    if prompt.echo_text is not None:
        tokens, records = prompt.token_ids + tokens, prompt.logprobs + records
    return CompletionChoice(
        index=choice.index,
        text=(prompt.echo_text or "") + piece.text,
        logprobs=spec.logprob_formatter.format_completion(tokens, records, 0)
        if spec.logprob_formatter
        else None,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        token_ids=piece.tokens if spec.include_token_ids else UNSET,
        prompt_token_ids=prompt.token_ids if spec.include_token_ids else UNSET,
        prompt_logprobs=(
            spec.prompt_logprob_formatter.format_prompt(prompt.logprobs)
            if spec.prompt_logprob_formatter
            else UNSET
        ),
    )
