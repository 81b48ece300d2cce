"""Whole responses: the finished choices of a request as objects of the OpenAI API."""

from __future__ import annotations

from msgspec import UNSET

from argosy.engine.serving.api_server.chat_output import build_message
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice
from argosy.engine.serving.text.parsed_choice import ParsedChoice
from argosy.protocol import (
    ApiError,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
)


def build_chat_completion(spec: ResponseSpec) -> ChatCompletion:
    """Build the response of `/v1/chat/completions`. Every choice must have ended."""
    prompt = spec.prompts[0]
    return ChatCompletion(
        id=spec.id,
        created=spec.created_at,
        model=spec.model,
        choices=[_build_chat_choice(spec, choice) for choice in spec.choices],
        usage=spec.usage(),
        warnings=[warning for choice in spec.choices for warning in spec.warnings(choice)] or UNSET,
        prompt_token_ids=prompt.token_ids if spec.include_token_ids else UNSET,
        prompt_logprobs=(
            spec.prompt_logprob_formatter.format_prompt(prompt.logprobs)
            if spec.prompt_logprob_formatter
            else UNSET
        ),
    )


def _build_chat_choice(spec: ResponseSpec, choice: Choice) -> ChatChoice:
    if choice.finish_reason is None:
        raise ApiError(500, "internal_error", "An internal error: a choice has not ended.")
    return ChatChoice(
        index=choice.index,
        message=build_message(choice, choice.new_events, spec.id)
        if isinstance(choice, ParsedChoice)
        else ChatMessage(content=choice.new_text),
        logprobs=spec.logprob_formatter.format_chat(choice.new_logprobs)
        if spec.logprob_formatter
        else None,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.new_tokens if spec.include_token_ids else UNSET,
    )


def build_completion(spec: ResponseSpec) -> Completion:
    """Build the response of `/v1/completions`. Every choice must have ended."""
    return Completion(
        id=spec.id,
        created=spec.created_at,
        model=spec.model,
        choices=[_build_completion_choice(spec, choice) for choice in spec.choices],
        usage=spec.usage(),
    )


def _build_completion_choice(spec: ResponseSpec, choice: Choice) -> CompletionChoice:
    prompt = choice.prompt
    tokens, logprobs = choice.new_tokens, choice.new_logprobs
    if prompt.is_echoed:
        tokens, logprobs = prompt.token_ids + tokens, prompt.logprobs + logprobs
    return CompletionChoice(
        index=choice.index,
        text=prompt.text + choice.new_text,
        logprobs=spec.logprob_formatter.format_completion(tokens, logprobs, 0)
        if spec.logprob_formatter
        else None,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.new_tokens if spec.include_token_ids else UNSET,
        prompt_token_ids=prompt.token_ids if spec.include_token_ids else UNSET,
        prompt_logprobs=(
            spec.prompt_logprob_formatter.format_prompt(prompt.logprobs)
            if spec.prompt_logprob_formatter
            else UNSET
        ),
    )
