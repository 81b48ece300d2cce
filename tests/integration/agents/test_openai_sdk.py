"""Helpers of the OpenAI SDK for Python: parsed answers and calls, streams of events, tools of every kind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ConfigDict, Field
from tests.support.agents.task import MAX_TOKENS, QUESTION, Forecast, Server, Unit

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
MAX_THINKING_TOKENS = 16
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TIME: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": NO_PARAMETERS, "strict": True},
}
QUERY: Any = {
    "type": "custom",
    "custom": {
        "name": "run_query",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "regex", "definition": "SELECT [a-z]{1,8}"},
        },
    },
}


class GetWeather(BaseModel):
    """Get the weather."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    unit: Unit


class Client:
    """Client that sends the same conversation with every request."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._chat: Any = client.chat.completions
        self._defaults = {
            "model": model,
            "messages": MESSAGES,
            "max_tokens": MAX_TOKENS,
            "seed": 3,
            "temperature": 0.7,
            "extra_body": {"thinking_token_budget": MAX_THINKING_TOKENS},
        }

    async def create(self, **options: Any) -> ChatCompletion:  # noqa: ANN401 - as the SDK takes them
        """Return a completion, validated more strictly than the SDK does it."""
        raw = await self._chat.with_raw_response.create(**self._defaults | options)
        return ChatCompletion.model_validate(json.loads(raw.content))

    async def chunks(self, **options: Any) -> list[ChatCompletionChunk]:  # noqa: ANN401 - the same
        stream = await self._chat.create(**self._defaults | options, stream=True)
        return [check_chunk(chunk) async for chunk in stream]

    async def parse(self, **options: Any) -> Any:  # noqa: ANN401 - the same
        return (await self._chat.parse(**self._defaults | options)).choices[0]

    def stream(self, **options: Any) -> Any:  # noqa: ANN401 - the same
        return self._chat.stream(**self._defaults | options)


def check_chunk(chunk: ChatCompletionChunk) -> ChatCompletionChunk:
    """Validate a chunk, which the SDK does not. Its type does not know custom calls."""
    calls = [call for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    if all(call.type in {"function", None} for call in calls):
        ChatCompletionChunk.model_validate(chunk.model_dump())
    return chunk


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as sdk:
        yield Client(sdk, server.model)


async def test_parse_reports_an_answer_that_is_cut_off(client: Client) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as error:
        await client.parse(response_format=Forecast, max_tokens=4)
    assert error.value.completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": Forecast},
        {"tools": [pydantic_function_tool(GetWeather)], "tool_choice": "required"},
        {"tools": [pydantic_function_tool(GetWeather)], "response_format": Forecast},
        {"tools": [WEATHER, TIME], "tool_choice": "required"},
    ],
    ids=["answer", "calls", "answer or calls", "calls of several tools"],
)
async def test_streamed_events_accumulate_to_the_whole_answer(
    client: Client, options: dict[str, Any]
) -> None:
    options = {"parallel_tool_calls": False, **options} if "tools" in options else options
    async with client.stream(**options, stream_options={"include_usage": True}) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_completion()
    whole = await client.parse(**options)
    assert comparable(streamed.choices[0]) == comparable(whole)
    message = whole.message
    assert message.tool_calls or isinstance(message.parsed, Forecast)
    for call in message.tool_calls or ():
        parsed = call.function.parsed_arguments
        assert isinstance(parsed, GetWeather) or WEATHER in options["tools"]
    texts = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(texts) == (message.content or "")
    arguments: dict[int, str] = {}
    for event in events:
        if event.type == "tool_calls.function.arguments.delta":
            arguments[event.index] = arguments.get(event.index, "") + event.arguments_delta
    calls = enumerate(message.tool_calls or ())
    assert arguments == {i: c.function.arguments for i, c in calls if c.type == "function"}
    done = [event.name for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done == [c.function.name for c in message.tool_calls or () if c.type == "function"]
    assert streamed.usage.completion_tokens > 0


def comparable(choice: Any) -> dict[str, Any]:  # noqa: ANN401 - a choice of the SDK
    """Return the choice without what each response makes anew, and without null fields."""
    result: dict[str, Any] = choice.model_dump(exclude_none=True, warnings=False)
    for call in result["message"].get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
        call.pop("index", None)
    return result


TOOLS = [WEATHER, TIME, QUERY]


def allowed(mode: Literal["auto", "required"], *tools: Any) -> dict[str, Any]:  # noqa: ANN401 - the same
    names = [{"type": t["type"], t["type"]: {"name": t[t["type"]]["name"]}} for t in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}


@pytest.mark.parametrize(
    ("tool_choice", "names", "finish_reasons"),
    [
        ("none", set(), {"stop", "length"}),
        ("auto", {"get_weather", "get_time", "run_query", None}, {"stop", "length", "tool_calls"}),
        ("required", {"get_weather", "get_time", "run_query"}, {"tool_calls"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}, {"stop"}),
        ({"type": "custom", "custom": {"name": "run_query"}}, {"run_query"}, {"stop"}),
        (allowed("required", TIME), {"get_time"}, {"tool_calls"}),
        (allowed("required", TIME, QUERY), {"get_time", "run_query"}, {"tool_calls"}),
        (allowed("auto", WEATHER), {"get_weather", None}, {"stop", "length", "tool_calls"}),
    ],
    ids=(
        "none", "auto", "required", "named-function", "named-custom", "allowed-one",
        "allowed-two", "allowed-auto",
    ),
)  # fmt: skip
async def test_tool_choice_decides_which_tools_are_called(
    client: Client, tool_choice: object, names: set[str | None], finish_reasons: set[str]
) -> None:
    response = await client.create(tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False)
    (choice,) = response.choices
    calls = choice.message.tool_calls or []
    assert choice.finish_reason in finish_reasons
    assert len(calls) <= 1
    assert calls or None in names or not names
    for call in calls:
        if call.type == "custom":
            assert call.custom.name in names
            assert call.custom.input.startswith("SELECT ")
        else:
            assert call.function.name in names
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "get_time" or arguments["days"] in {1, 2}


@pytest.mark.parametrize("tools", [[WEATHER], [QUERY], TOOLS], ids=["function", "custom", "all"])
async def test_chunks_of_several_choices_accumulate_to_their_calls(
    client: Client, tools: list[Any]
) -> None:
    options = {"tools": tools, "tool_choice": "required", "n": 2}
    whole, chunks = await client.create(**options), await client.chunks(**options)
    for choice in whole.choices:
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        calls: dict[int, dict[str, Any]] = {}
        for delta in (call for d in deltas for call in d.delta.tool_calls or ()):
            fields = delta.model_dump(exclude_none=True)
            call = calls.setdefault(delta.index, {"text": "", "ids": [], **fields})
            part = fields.get("function") or fields.get("custom") or {}
            call["text"] += part.get("arguments") or part.get("input") or ""
            call["ids"] += [fields["id"]] if "id" in fields else []
        expected = choice.message.tool_calls or []
        assert [call["text"] for call in calls.values()] == [
            c.custom.input if c.type == "custom" else c.function.arguments for c in expected
        ]
        assert [call["type"] for call in calls.values()] == [c.type for c in expected]
        assert all(len(call["ids"]) == 1 for call in calls.values())
        assert deltas[-1].finish_reason == choice.finish_reason
