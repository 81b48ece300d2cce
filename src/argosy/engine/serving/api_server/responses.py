"""Rendering of choices in the shapes of the OpenAI API: whole responses, and the deltas of parsed chat output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from msgspec import UNSET

from argosy.engine.serving.output_parsing.events import (
    CallArguments,
    CallStart,
    ContentText,
    OutputEvent,
    ReasoningText,
)
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice, ParsedChoice
from argosy.protocol import (
    ApiError,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    ToolCall,
    ToolCallCustom,
    ToolCallFunction,
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
        system_fingerprint=spec.system_fingerprint,
        service_tier=spec.service_tier or UNSET,
        warnings=[warning for choice in spec.choices for warning in spec.warnings(choice)] or UNSET,
        prompt_token_ids=prompt.token_ids if spec.include_token_ids else None,
        prompt_logprobs=(
            spec.prompt_logprob_formatter.format_prompt(prompt.logprobs)
            if spec.prompt_logprob_formatter
            else None
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
        token_ids=choice.new_tokens if spec.include_token_ids else None,
    )


def build_completion(spec: ResponseSpec) -> Completion:
    """Build the response of `/v1/completions`. Every choice must have ended."""
    return Completion(
        id=spec.id,
        created=spec.created_at,
        model=spec.model,
        choices=[_build_completion_choice(spec, choice) for choice in spec.choices],
        usage=spec.usage(),
        system_fingerprint=spec.system_fingerprint,
        service_tier=spec.service_tier or UNSET,
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
        token_ids=choice.new_tokens if spec.include_token_ids else None,
        prompt_token_ids=prompt.token_ids if spec.include_token_ids else None,
        prompt_logprobs=(
            spec.prompt_logprob_formatter.format_prompt(prompt.logprobs)
            if spec.prompt_logprob_formatter
            else None
        ),
    )


def call_id(response_id: str, choice: int, call: int) -> str:
    """Return the id of a tool call. A replica that resumes the response derives the same id."""
    digest = hashlib.sha256(f"{response_id} {choice} {call}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def render_deltas(
    choice: ParsedChoice, events: Iterable[OutputEvent], response_id: str
) -> list[dict[str, Any]]:
    """Render events as `delta` objects. Adjacent text of one kind, or of one call's arguments, becomes one delta.

    The first delta of a call has its id and name, and later ones only its index, because clients concatenate fields.
    """
    deltas: list[dict[str, Any]] = []
    for event in _merge_adjacent(events):
        match event:
            case ReasoningText(text) if choice.plan.include_reasoning:
                deltas.append({"reasoning_content": text, "reasoning": text})
            case ContentText(text):
                deltas.append({"content": text})
            case CallStart(_, name) if choice.plan.is_legacy:
                deltas.append({"function_call": {"name": name, "arguments": ""}})
            case CallArguments(_, text) if choice.plan.is_legacy:
                deltas.append({"function_call": {"arguments": text}})
            case CallStart(call, name):
                kind, field = _call_kind(choice, call)
                start = {
                    "index": call,
                    "id": call_id(response_id, choice.index, call),
                    "type": kind,
                    kind: {"name": name, field: ""},
                }
                deltas.append({"tool_calls": [start]})
            case CallArguments(call, text):
                kind, field = _call_kind(choice, call)
                deltas.append({"tool_calls": [{"index": call, kind: {field: text}}]})
    return deltas


def has_visible_output(choice: ParsedChoice) -> bool:
    """Return whether the output so far has content, tool calls, or reasoning that the client gets."""
    counts = choice.event_counts
    has_reasoning = choice.plan.include_reasoning and counts["reasoning"] > 0
    return has_reasoning or counts["content"] > 0 or counts["call_start"] > 0


def build_message(
    choice: ParsedChoice, events: Iterable[OutputEvent], response_id: str
) -> ChatMessage:
    """Build the message of a whole response, which equals the accumulated deltas of a stream."""
    content: list[str] = []
    reasoning: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningText(text):
                reasoning.append(text)
            case ContentText(text):
                content.append(text)
            case CallStart(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(call, text):
                arguments[call].append(text)
    calls = [
        _build_call(choice, response_id, call, name, "".join(arguments[call]))
        for call, name in enumerate(names)
    ]
    thoughts = "".join(reasoning) if reasoning and choice.plan.include_reasoning else UNSET
    has_other = bool(calls) or thoughts is not UNSET
    is_legacy = choice.plan.is_legacy
    return ChatMessage(
        content="".join(content) if content or not has_other else None,
        reasoning_content=thoughts,
        reasoning=thoughts,
        tool_calls=UNSET if is_legacy else calls or UNSET,
        function_call=calls[0].function if is_legacy and calls else UNSET,
    )


def _build_call(
    choice: ParsedChoice, response_id: str, call: int, name: str, text: str
) -> ToolCall:
    identity = call_id(response_id, choice.index, call)
    if call in choice.custom_calls:
        return ToolCall(id=identity, type="custom", custom=ToolCallCustom(name=name, input=text))
    return ToolCall(
        id=identity, type="function", function=ToolCallFunction(name=name, arguments=text)
    )


def _call_kind(choice: ParsedChoice, call: int) -> tuple[str, str]:
    """Return type of a call, which is also the field that holds it, and the field of its arguments."""
    return ("custom", "input") if call in choice.custom_calls else ("function", "arguments")


def _merge_adjacent(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    merged: list[OutputEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case ReasoningText(before), ReasoningText(text):
                merged[-1] = ReasoningText(before + text)
            case ContentText(before), ContentText(text):
                merged[-1] = ContentText(before + text)
            case CallArguments(call, before), CallArguments(other, text) if call == other:
                merged[-1] = CallArguments(call, before + text)
            case _:
                merged.append(event)
    return merged
