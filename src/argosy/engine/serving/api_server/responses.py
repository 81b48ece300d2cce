"""Whole answers: the finished choices of a request as the OpenAI API's objects."""

from __future__ import annotations

from msgspec import UNSET

from argosy.engine.serving.api_server.response_spec import Frame
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import (
    ApiError,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
)


def chat_completion(frame: Frame) -> ChatCompletion:
    """The answer of `/v1/chat/completions`; every choice has ended."""
    prompt = frame.prompts[0]
    return ChatCompletion(
        id=frame.id,
        created=frame.created,
        model=frame.model,
        choices=[_chat_choice(frame, choice) for choice in frame.choices],
        usage=frame.usage(),
        prompt_token_ids=prompt.token_ids if frame.token_ids else UNSET,
        prompt_logprobs=(
            frame.prompt_logprobs.prompt(prompt.logprobs) if frame.prompt_logprobs else UNSET
        ),
    )


def _chat_choice(frame: Frame, choice: Choice) -> ChatChoice:
    piece = choice.take()
    if piece.finish is None:
        raise ApiError(500, "internal_error", "A choice has not ended.")
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(content=piece.text),
        logprobs=frame.logprobs.chat(piece.logprobs) if frame.logprobs else None,
        finish_reason=piece.finish,
        stop_reason=piece.stop_reason,
        token_ids=piece.tokens if frame.token_ids else UNSET,
    )


def completion(frame: Frame) -> Completion:
    """The answer of `/v1/completions`; every choice has ended."""
    return Completion(
        id=frame.id,
        created=frame.created,
        model=frame.model,
        choices=[_completion_choice(frame, choice) for choice in frame.choices],
        usage=frame.usage(),
    )


def _completion_choice(frame: Frame, choice: Choice) -> CompletionChoice:
    piece = choice.take()
    prompt = choice.prompt
    tokens, records = piece.tokens, piece.logprobs
    if prompt.echo is not None:
        tokens, records = prompt.token_ids + tokens, prompt.logprobs + records
    return CompletionChoice(
        index=choice.index,
        text=(prompt.echo or "") + piece.text,
        logprobs=frame.logprobs.completion(tokens, records, 0) if frame.logprobs else None,
        finish_reason=piece.finish,
        stop_reason=piece.stop_reason,
        token_ids=piece.tokens if frame.token_ids else UNSET,
        prompt_token_ids=prompt.token_ids if frame.token_ids else UNSET,
        prompt_logprobs=(
            frame.prompt_logprobs.prompt(prompt.logprobs) if frame.prompt_logprobs else UNSET
        ),
    )
