# ruff: noqa: RUF001 - DeepSeek's markers contain full-width bars
"""Outputs of the `canitoolcall` fixtures as pieces: special tokens as markers, ordinary tokens as text.

The fixtures hold token ids, but the tokenizers are not available. The ids of the special tokens that structure outputs
are known, so the text between them can be found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import ParsedToolCall, ParseResult

from argosy.constraints import Tool
from argosy.engine.serving.output_parsing import (
    FORMATS,
    MarkerToken,
    OutputFormat,
    OutputParser,
    Piece,
    prompt_opens_reasoning,
)
from argosy.engine.serving.output_parsing.events import (
    CallArguments,
    CallStart,
    ContentText,
    OutputEvent,
    ReasoningText,
)

_QWEN3 = {
    151657: "<tool_call>",
    151658: "</tool_call>",
    151667: "<think>",
    151668: "</think>",
}
_QWEN35 = {248058: "<tool_call>", 248059: "</tool_call>", 248069: "</think>"}
_DEEPSEEK = {
    128806: "<｜tool▁calls▁begin｜>",
    128807: "<｜tool▁calls▁end｜>",
    128808: "<｜tool▁call▁begin｜>",
    128809: "<｜tool▁call▁end｜>",
    128814: "<｜tool▁sep｜>",
}
_DEEPSEEK_V4 = {128825: "｜DSML｜", 128822: "</think>"}
_GLM = dict(
    zip(
        range(151350, 151360),
        (
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        strict=True,
    )
)
_KIMI_K2 = {
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163607: "</think>",
}
_MISTRAL = {9: "[TOOL_CALLS]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
_GPT_OSS = {
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}
_GEMMA4 = {
    48: "<|tool_call>",
    49: "<tool_call|>",
    52: '<|"|>',
    100: "<|channel>",
    101: "<channel|>",
}
_MODELS: dict[str, tuple[str, dict[int, str]]] = {
    "Qwen/Qwen3-0.6B": ("hermes", _QWEN3),
    "Qwen/Qwen3-4B-Thinking-2507": ("hermes", _QWEN3),
    "Qwen/Qwen3-4B-Instruct-2507": ("hermes", _QWEN3),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("qwen3-xml", _QWEN3),
    "Qwen/Qwen3-Coder-Next": ("qwen3-xml", _QWEN3),
    "Qwen/Qwen3.5-9B": ("qwen3-xml", _QWEN35),
    "Qwen/Qwen3.8-27B": ("qwen3-xml", _QWEN35),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama3-json", {128010: "<|python_tag|>"}),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        "pythonic",
        {200016: "<|python_start|>", 200017: "<|python_end|>"},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral-v3", {5: "[TOOL_CALLS]"}),
    "mistralai/Magistral-Small-2506": ("mistral-v11", {9: "[TOOL_CALLS]", 32: "[ARGS]"}),
    "mistralai/Magistral-Small-2509": ("mistral-v11", _MISTRAL),
    "mistralai/Ministral-3-14B-Reasoning-2512": ("mistral-v11", _MISTRAL),
    "mistralai/Ministral-3-14B-Instruct-2512": ("mistral-v11", _MISTRAL),
    "mistralai/Devstral-Small-2507": ("mistral-v11", _MISTRAL),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ("mistral-v11", _MISTRAL),
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek-v3", _DEEPSEEK),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek-v31", _DEEPSEEK),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek-v32", {128793: "｜DSML｜", 128799: "</think>"}),
    "deepseek-ai/DeepSeek-V4-Flash": ("deepseek-v4", _DEEPSEEK_V4),
    "deepseek-ai/DeepSeek-V4.1-Flash": ("deepseek-v41", _DEEPSEEK_V4),
    "openai/gpt-oss-20b": ("gpt-oss", _GPT_OSS),
    "zai-org/GLM-4.5": ("glm45", _GLM),
    "zai-org/GLM-4.7": ("glm45", _GLM),
    "zai-org/GLM-5.3": ("glm45", {token - 151350 + 154841: text for token, text in _GLM.items()}),
    "moonshotai/Kimi-K2.6": ("kimi-k2", _KIMI_K2),
    "moonshotai/Kimi-K2-Instruct-0905": ("kimi-k2", _KIMI_K2),
    "moonshotai/Kimi-K3": (
        "kimi-k3",
        {163587: "<|open|>", 163588: "<|close|>", 163589: "<|sep|>"},
    ),
    "google/gemma-4-31B-it": ("gemma4", _GEMMA4),
}
"""Format of each reference model, and its special tokens."""

FIXTURES: dict[str, Fixture] = {fixture.id: fixture for fixture in load_fixtures()}
FAMILIES = load_families()


def format_of(fixture: Fixture) -> OutputFormat:
    """Return the format of a fixture's model, adapted to the model's vocabulary."""
    name, tokens = _MODELS[fixture.reference_model]
    texts = set(tokens.values())
    if "</think>" in texts:
        texts.add("<think>")
    return FORMATS[name].with_vocabulary(texts.__contains__)


def tools_of(fixture: Fixture) -> list[Tool]:
    """Return the tools that a fixture offers."""
    return [
        Tool(
            name=tool["function"]["name"], parameters=dict(tool["function"].get("parameters") or {})
        )
        for tool in fixture.tools
    ]


def prompt_of(fixture: Fixture) -> str:
    """Return the end of the prompt before a fixture's output."""
    model = FAMILIES[fixture.family].reference_for(fixture.reference_model)
    assert model is not None
    return fixture.generation_prompt or model.default_generation_prompt or ""


def pieces_of(fixture: Fixture) -> list[Piece]:
    """Return a fixture's output with one piece for each token."""
    _, tokens = _MODELS[fixture.reference_model]
    assert fixture.output_token_ids is not None
    pattern: list[str] = []
    counts: list[int] = [0]
    markers: list[str] = []
    for token in fixture.output_token_ids:
        if token in tokens:
            markers.append(tokens[token])
            counts.append(0)
        else:
            counts[-1] += 1
    for index, count in enumerate(counts):
        if index:
            pattern.append(re.escape(markers[index - 1]))
        pattern.append("(.+?)" if count else "()")
    match = re.fullmatch("".join(pattern), fixture.raw_output, re.DOTALL)
    assert match is not None, fixture.id
    pieces: list[Piece] = []
    for index, text in enumerate(match.groups()):
        if index:
            pieces.append(MarkerToken(markers[index - 1]))
        pieces += _split_text(text, counts[index])
    return pieces


def _split_text(text: str, parts: int) -> Iterable[str]:
    """Split text into about as many pieces as it had tokens."""
    if parts:
        size = max(1, len(text) // parts)
        bounds = [index * size for index in range(parts)] + [len(text)]
        yield from (text[start:end] for start, end in pairwise(bounds))


def parse_fixture(fixture: Fixture, chunks: Iterable[list[Piece]]) -> ParseResult:
    """Parse a fixture's output and return what a client receives."""
    output_format = format_of(fixture)
    parser = OutputParser(
        output_format,
        tools_of(fixture),
        in_reasoning=prompt_opens_reasoning(output_format, prompt_of(fixture)),
    )
    events: list[OutputEvent] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    events += parser.finish()
    return to_result(events)


def to_result(events: Iterable[OutputEvent]) -> ParseResult:
    """Return events as the message that a client assembles from them."""
    texts = {ContentText: "", ReasoningText: ""}
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case ContentText(text) | ReasoningText(text):
                texts[type(event)] += text
            case CallStart(number, name):
                assert number == len(calls)
                calls.append({"name": name, "arguments": ""})
            case CallArguments(number, text):
                assert number == len(calls) - 1
                calls[number]["arguments"] += text
    return ParseResult(
        content=texts[ContentText] or None,
        reasoning_content=texts[ReasoningText] or None,
        tool_calls=tuple(ParsedToolCall(call["name"], call["arguments"]) for call in calls),
    )
