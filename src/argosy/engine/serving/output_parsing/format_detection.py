# ruff: noqa: RUF001 - DeepSeek's markers contain full-width bars
"""Detection of the output format from a chat template, and of reasoning that a rendered prompt has opened."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from argosy.engine.serving.output_parsing.formats import FORMATS
from argosy.engine.serving.output_parsing.output_format import OutputFormat

_TOOL_VARIABLES = ("tools", "available_tools")
_TURN_MARKER = re.compile(
    r"<[|｜]|[|｜]>|</?s>|\[/?(?:INST|SYSTEM_PROMPT)\]|<(?:start|end)_of_turn>", re.IGNORECASE
)


class _Signature(NamedTuple):
    """Texts by which a chat template shows its format."""

    name: str
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()


_SIGNATURES = (
    _Signature("deepseek-v41", ("DSML", " calls>", " invoke name=")),
    _Signature("deepseek-v32", ("DSML", "function_calls>")),
    _Signature("deepseek-v4", ("DSML", "tool_calls>")),
    _Signature("kimi-k3", ("<|open|>", "<|sep|>")),
    _Signature("kimi-k2", ("<|tool_calls_section_begin|>",)),
    _Signature("gpt-oss", ("<|channel|>", "<|message|>")),
    _Signature("deepseek-v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Signature("deepseek-v31", ("<｜tool▁calls▁begin｜>",), ("<arg_key>",)),
    _Signature("gemma4", ("<|tool_call>", '<|"|>')),
    _Signature("functiongemma", ("<start_function_call>",)),
    _Signature("minimax-m2", ("<minimax:tool_call>",)),
    _Signature("seed-oss", ("<seed:tool_call>",)),
    _Signature("longcat", ("<longcat_tool_call>",)),
    _Signature("lfm2", ("<|tool_call_start|>",)),
    _Signature("lfm2", ("<|tool_list_start|>",)),
    _Signature("nemotron-json", ("<TOOLCALL>",)),
    _Signature("hunyuan", ("<tool_calls><tool_call>", "```json")),
    _Signature("glm45", ("<tool_call>", "<arg_key>"), ("<tool_calls>",)),
    _Signature("qwen3-xml", ("<tool_call>", "<function=", "<parameter=")),
    _Signature("qwen3-xml", ("<function=", "<parameter="), ("_tool_call>",)),
    _Signature("mistral-v11", ("[TOOL_CALLS]", "[ARGS]")),
    _Signature("mistral-v3", ("[TOOL_CALLS]",)),
    _Signature("granite", ("<|tool_call|>",)),
    _Signature("apriel", ("<tool_calls>[",)),
    _Signature("hermes", ("<tool_call>",), ("<invoke", "<tool_calls>")),
    _Signature("phi4-mini", ("<|tool|>",), ("<tool_call>",)),
    _Signature("pythonic", ("<|python_start|>",)),
    _Signature("pythonic", ("python list", "tool_call.name + '('")),
    _Signature("llama3-json", ('{"name": function name, "parameters"',)),
    _Signature("xlam", ('[{"name": "tool_call_name", "arguments"',)),
)
"""Signatures of formats with calls, the most specific first."""


def detect_format(
    template_source: str | None,
    response_template: Mapping[str, Any] | None,
    has_token: Callable[[str], bool],
) -> OutputFormat | None:
    """Return the output format of a model, adapted to its vocabulary, or None if it is unknown.

    Args:
        template_source: Jinja source of the chat template.
        response_template: Description of responses in `tokenizer_config.json`, which transformers reads.
        has_token: Whether a text is one token of the vocabulary.
    """
    name = ""
    if response_template:
        name = _find_calls(_join_strings(response_template))
    if not name and template_source and any(word in template_source for word in _TOOL_VARIABLES):
        name = _find_calls(_unescape(template_source))
    if not name and template_source and "DSML" in template_source:
        name = _find_calls(_unescape(template_source))
    if not name:
        name = _find_thinking(template_source or "", has_token)
    return FORMATS[name].with_vocabulary(has_token) if name else None


def _find_calls(source: str) -> str:
    """Return the name of the format whose signature a source shows, or an empty string."""
    for signature in _SIGNATURES:
        if all(text in source for text in signature.present) and not any(
            text in source for text in signature.absent
        ):
            return signature.name
    return ""


def _find_thinking(source: str, has_token: Callable[[str], bool]) -> str:
    """Return the name of the format without calls, or an empty string."""
    (block,) = FORMATS["think"].thinking
    has_tokens = has_token(block.open) and has_token(block.close)
    return "think" if block.close in source or has_tokens else ""


def _unescape(source: str) -> str:
    """Return Jinja source with the quotes of its string literals unescaped."""
    return source.replace('\\"', '"').replace("\\'", "'").replace("\\n", "\n")


def _join_strings(value: object) -> str:
    """Return all strings of a response template, with the escapes of regular expressions removed."""
    return json.dumps(list(_iter_strings(value)), ensure_ascii=False).replace("\\", "")


def _iter_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iter_strings(item)


def prompt_opens_reasoning(output_format: OutputFormat, prompt_text: str) -> bool:
    """Return whether the prompt ends within a reasoning block.

    An opening marker in an earlier message does not count, because the marker of a turn follows it.
    """
    for block in output_format.thinking:
        before, opener, rest = prompt_text.rpartition(block.open)
        del before
        if opener and block.close not in rest and _TURN_MARKER.search(rest) is None:
            return True
    return False
