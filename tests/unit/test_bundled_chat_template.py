"""Chat template of the bundled model: renders the messages that clients send as the training text has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from argosy.models import BUNDLED_MODEL, DRAFT_MODEL

TEMPLATE = (BUNDLED_MODEL / "chat_template.jinja").read_text("utf-8")
USER = {"role": "user", "content": "Weather?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
RESULT = [{"type": "text", "text": "18"}]
LINE = json.dumps(WEATHER["function"])
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def call(arguments: object, **message: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a message
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": function}],
    } | message


def render(messages: list[dict[str, Any]], **variables: Any) -> str:  # noqa: ANN401 - as templates take them
    (text,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=TEMPLATE,
        tools=variables.pop("tools", None),
        add_generation_prompt=variables.pop("add_generation_prompt", False),
        bos_token="<|begin|>",
        **variables,
    )
    return str(text)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        pytest.param([USER], "<|user|>Weather?<|end|>", id="user"),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "<|user|>ab<|end|>",
            id="parts",
        ),
        pytest.param(
            [{"role": "developer", "content": "One."}, {"role": "system", "content": "Two."}, USER],
            "<|system|>One.<|end|><|system|>Two.<|end|><|user|>Weather?<|end|>",
            id="several systems",
        ),
        pytest.param(
            [USER, call({"city": "Köln"}, content=None)],
            f"<|user|>Weather?<|end|><|assistant|>{CALL}<|end|>",
            id="call with a mapping",
        ),
        pytest.param(
            [USER, call('{"city": "Köln"}', content="I look.")],
            f"<|user|>Weather?<|end|><|assistant|>I look.\n{CALL}<|end|>",
            id="call with a text and content",
        ),
        pytest.param(
            [USER, call({"city": "Köln"}), {"role": "tool", "tool_call_id": "1", "content": RESULT}],
            f"<|user|>Weather?<|end|><|assistant|>{CALL}<|end|><|tool|>18<|end|>",
            id="result",
        ),
        pytest.param(
            [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "sh", "input": "ls"}}]}],
            '<|assistant|><tool_call>\n{"name": "sh", "arguments": {"input": "ls"}}\n</tool_call><|end|>',
            id="custom call",
        ),
        pytest.param(
            [USER, {"role": "assistant", "content": "Sun.", "reasoning_content": "Easy."}, USER],
            "<|user|>Weather?<|end|><|assistant|>Sun.<|end|><|user|>Weather?<|end|>",
            id="old reasoning is dropped",
        ),
        pytest.param(
            [USER, call({"city": "Köln"}, reasoning_content="Hm."), {"role": "tool", "content": None}],
            f"<|user|>Weather?<|end|><|assistant|><think>\nHm.\n</think>\n\n{CALL}<|end|><|tool|><|end|>",
            id="reasoning of the loop is kept",
        ),
    ],
)  # fmt: skip
def test_messages_are_rendered(messages: list[dict[str, Any]], text: str) -> None:
    assert render(messages) == f"<|begin|>{text}"


@pytest.mark.parametrize(
    ("system", "text"),
    [([], ""), ([{"role": "system", "content": "Be kind."}], "Be kind.")],
)
def test_tools_follow_the_system_prompt(system: list[dict[str, Any]], text: str) -> None:
    prompt = render([*system, USER], tools=[WEATHER, WEATHER["function"]])
    tools = f"<|tools|>\n{LINE}\n{LINE}"
    assert prompt == f"<|begin|><|system|>{text}{tools}<|end|><|user|>Weather?<|end|>"


@pytest.mark.parametrize(
    ("variables", "tail"),
    [({}, ""), ({"enable_thinking": False}, ""), ({"enable_thinking": True}, "<think>\n")],
)
def test_thinking_is_opened_on_request(variables: dict[str, bool], tail: str) -> None:
    prompt = render([USER], add_generation_prompt=True, **variables)
    assert prompt.endswith(f"<|end|><|assistant|>{tail}")


def test_template_is_the_same_in_all_files() -> None:
    for folder in (BUNDLED_MODEL, DRAFT_MODEL):
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        assert config["chat_template"] == TEMPLATE
        assert (folder / "chat_template.jinja").read_text("utf-8") == TEMPLATE
