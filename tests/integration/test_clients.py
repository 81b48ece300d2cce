"""Official clients and an agent framework, in Python and JavaScript: conversations, tool loops and typed answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
import msgspec
import openai
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ConfigDict, Field
from tests.integration.test_metrics import samples
from tests.support.conversation import (
    APIS,
    Answer,
    Person,
    Question,
    Script,
    Sdks,
    Transcript,
)
from tests.support.javascript_sdk import run_javascript
from tests.support.serve_process import run_serve
from tests.support.waiting import until

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CAPITAL, FOX = "What is the capital of France?", "Tell me a story about a fox."
IN_PARIS = Question("What is the weather in Paris?", tool=WEATHER)
SCRIPT = Script(
    questions={
        "whole": Question(CAPITAL, stream=False),
        "streamed": Question(CAPITAL),
        "stopped": Question("Count from one to nine.", stop=("5",)),
        "reasoning": Question("What is 17 + 25?", effort="low"),
        "call": IN_PARIS,
    },
    tool_loop=IN_PARIS,
    typed=Question("Give me a person as JSON."),
    cancelled=Question(FOX),
)
QUESTION = "What is the weather in Rome?"
MAX_TOKENS = 256
Unit = Literal["celsius", "fahrenheit"]


class Forecast(BaseModel):
    """Forecast for one city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=24, description="Name of the city.")
    temperature: int = Field(ge=-90, le=60)
    sky: Literal["clear", "cloudy", "rain"]


@dataclass(frozen=True)
class Server:
    """A gateway before a replica with the bundled model, as `argosy serve` starts it."""

    base_url: str
    model: str

    @property
    def root_url(self) -> str:
        """Address without the path of the OpenAI API."""
        return self.base_url.removesuffix("/v1")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with run_serve() as running:
        model = running.client().models.list().data[0].id
        yield Server(f"{running.url}/v1", model)


async def ask_in_python(server: Server, api: str) -> dict[str, Answer]:
    """Return the answers to all questions."""
    sdks = Sdks(server.root_url, "unused")
    async with contextlib.aclosing(sdks):
        return {
            name: await sdks.ask(api, server.model, each) for name, each in SCRIPT.questions.items()
        }


async def converse_in_javascript(server: Server) -> dict[str, Transcript]:
    script = msgspec.json.encode(SCRIPT).decode()
    results = await run_javascript("conversation.mjs", server.root_url, server.model, script)
    return msgspec.convert(results, dict[str, Transcript])


async def test_clients_of_all_apis_hold_the_same_conversation(server: Server) -> None:
    cancelled = count_cancelled(server)
    python, javascript = await asyncio.gather(
        asyncio.gather(*(ask_in_python(server, api) for api in APIS)),
        converse_in_javascript(server),
    )
    first, expected = javascript["chat"], python[0]
    for api, answers_in_python in zip(APIS, python, strict=True):
        transcript = javascript[api]
        for answers in (answers_in_python, transcript.answers):
            if api == "responses":  # has no stop sequences
                del answers["stopped"]
            for name, answer in answers.items():
                assert answer == expected[name], (api, name)
        assert transcript.tool_loop == first.tool_loop, api
        Person.model_validate(transcript.typed)
        assert transcript.error[0] == 404
        assert "'missing'" in transcript.error[1]
        assert transcript.cancelled_after
    # On a busy machine some streams end before their client leaves.
    await until(lambda: count_cancelled(server) > cancelled)
    check_answers(first)


def check_answers(transcript: Transcript) -> None:
    answers = transcript.answers
    assert "Paris" in answers["whole"].text
    assert answers["streamed"] == answers["whole"]
    assert answers["stopped"].text.endswith("4, ")
    assert answers["reasoning"].thinking
    assert answers["reasoning"].text
    assert answers["call"].calls == [("get_weather", {"city": "Paris"})]
    assert transcript.tool_loop.calls == answers["call"].calls
    assert transcript.tool_loop.text


def count_cancelled(server: Server) -> float:
    """Return how many requests ended because their client left."""
    text = httpx2.get(f"{server.root_url}/metrics").text
    return sum(
        value
        for name, labels, value in samples(text)
        if name == "argosy_gateway_requests_total" and labels["status"] == "cancelled"
    )


async def test_the_agents_sdk_runs_a_tool_loop_and_gets_a_typed_answer(server: Server) -> None:
    """After the first call the SDK resets `tool_choice`, and the tool is not there any more."""
    import agents  # takes a second, and each worker collects this file

    cities: list[str] = []

    def get_weather(city: str, unit: Unit) -> str:
        """Get the weather of a city."""
        cities.append(f"{city} in {unit}")
        return "21 degrees and clear"

    sdk = AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    agents.set_tracing_disabled(True)
    common: dict[str, Any] = {
        "name": "Weather",
        "instructions": "Use the tool.",
        "model": agents.OpenAIChatCompletionsModel(server.model, sdk),
    }
    options = agents.ModelSettings(temperature=0.0, max_tokens=MAX_TOKENS, include_usage=True)
    one_call = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
    caller = agents.Agent(
        **common,
        tools=[agents.function_tool(get_weather, is_enabled=lambda *_: not cities)],
        model_settings=options.resolve(one_call),
    )
    async with sdk:
        run = agents.Runner.run_streamed(caller, QUESTION, max_turns=4)
        assert [event async for event in run.stream_events() if event.type == "raw_response_event"]
        typed = agents.Agent(**common, output_type=Forecast, model_settings=options)
        result = await agents.Runner.run(typed, QUESTION)
    assert isinstance(result.final_output, Forecast)
    assert cities
    assert run.final_output
    assert "<tool_call>" not in run.final_output
    items = run.to_input_list()
    calls, results = (
        [item["call_id"] for item in items if item.get("type") == kind]
        for kind in ("function_call", "function_call_output")
    )
    assert calls
    assert len(set(calls)) == len(calls)
    assert results == calls


async def test_javascript_sdks_run_tool_loops_and_get_typed_answers(server: Server) -> None:
    results = await run_javascript("agents.mjs", server.base_url, server.model)
    for forecast in (results["parsed"], results["generatedObject"]):
        Forecast.model_validate(forecast)
    check_openai(results)
    for loop in (results["generateText"], results["streamText"]):
        assert loop["calls"]
        assert loop["text"]
    assert results["generateText"]["finishReasons"][0] == "tool-calls"
    parts = results["streamText"]["parts"]
    assert parts["tool-call"] == parts["tool-result"] == len(results["streamText"]["calls"])
    assert parts["tool-input-delta"]
    assert results["streamText"]["outputTokens"] > 1


def check_openai(results: dict[str, Any]) -> None:
    assert results["streamedArguments"] == results["wholeArguments"]
    assert results["deltas"] == "".join(results["wholeArguments"])
    assert results["parsedArguments"] == list(map(json.loads, results["wholeArguments"]))
    assert results["streamedContent"] is None
    assert results["finishReason"] == "tool_calls"
    assert results["runTools"]["calls"]
    assert results["runTools"]["roles"][:3] == ["user", "assistant", "tool"]
    assert results["streamingRunner"]["chunks"]
    assert results["streamingRunner"]["roles"][:2] == ["user", "assistant"]


# --- helpers of the OpenAI SDK for Python --------------------------------------------------------

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
STRICT_WEATHER: Any = {
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
        {"tools": [STRICT_WEATHER, TIME], "tool_choice": "required"},
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
        assert isinstance(parsed, GetWeather) or STRICT_WEATHER in options["tools"]
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


TOOLS = [STRICT_WEATHER, TIME, QUERY]


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
        (allowed("auto", STRICT_WEATHER), {"get_weather", None}, {"stop", "length", "tool_calls"}),
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


@pytest.mark.parametrize(
    "tools", [[STRICT_WEATHER], [QUERY], TOOLS], ids=["function", "custom", "all"]
)
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
