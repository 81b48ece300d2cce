"""A conversation through the official clients of all dialects, also with a replica lost in its middle."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import anthropic
import ollama
import openai
import pytest
from tests.integration.dialects.conftest import MODEL, DialectFleet
from tests.integration.test_parsed_output import CALL, THOUGHT, WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM, QUESTION = "You are brief.", "Weather?"
SCHEMA = WEATHER["function"]["parameters"]  # type: ignore[index] # a constant
CITY = "Zürich </tool_call>"
ANSWER = f"{THOUGHT}I look.\n{CALL}"


class Answer(NamedTuple):
    """Parts of a response, as a client reads them."""

    text: str
    thinking: str
    calls: list[tuple[str, dict[str, Any]]]
    total_tokens: int


class Ask(Protocol):
    """Sends a question with a tool and reads the answer with one client."""

    async def __call__(self, fleet: DialectFleet, *, stream: bool) -> Answer: ...


async def ask_chat(fleet: DialectFleet, *, stream: bool) -> Answer:
    messages: Any = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    client, tools = fleet.openai(), [WEATHER]
    request: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools}
    if stream:
        async with client.chat.completions.stream(
            **request, stream_options={"include_usage": True}
        ) as events:
            response: Any = await events.get_final_completion()
    else:
        response = await client.chat.completions.create(**request)
    message = response.choices[0].message
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
    total = response.usage.total_tokens
    return Answer(message.content or "", message.reasoning_content, calls, total)


async def ask_responses(fleet: DialectFleet, *, stream: bool) -> Answer:
    client = fleet.openai()
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    request: dict[str, Any] = {"model": MODEL, "instructions": SYSTEM, "input": QUESTION}
    if stream:
        async with client.responses.stream(**request, tools=[tool]) as events:
            response: Any = await events.get_final_response()
    else:
        response = await client.responses.create(**request, tools=[tool])
    assert response.status == "completed"
    items = response.output
    thinking = "".join(item.content[0].text for item in items if item.type == "reasoning")
    calls = [(i.name, json.loads(i.arguments)) for i in items if i.type == "function_call"]
    return Answer(response.output_text, thinking, calls, response.usage.total_tokens)


async def ask_anthropic(fleet: DialectFleet, *, stream: bool) -> Answer:
    client = fleet.anthropic()
    request: dict[str, Any] = {
        "model": "claude-of-this-fleet",
        "max_tokens": 500,
        "system": SYSTEM,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive"},
    }
    if stream:
        async with client.messages.stream(**request) as events:
            message: Any = await events.get_final_message()
    else:
        message = await client.messages.create(**request)
    blocks, usage = message.content, message.usage
    calls = [(block.name, block.input) for block in blocks if block.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    return Answer(
        "".join(block.text for block in blocks if block.type == "text"),
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        calls,
        usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens,
    )


async def ask_ollama(fleet: DialectFleet, *, stream: bool) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    client: Any = fleet.ollama()
    request = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
    if stream:
        lines = [line async for line in await client.chat(**request, stream=True)]
    else:
        lines = [await client.chat(**request)]
    calls = [
        (call.function.name, dict(call.function.arguments))
        for line in lines
        for call in line.message.tool_calls or ()
    ]
    last = lines[-1]
    return Answer(
        "".join(line.message.content or "" for line in lines),
        "".join(line.message.thinking or "" for line in lines),
        calls,
        (last.prompt_eval_count or 0) + (last.eval_count or 0),
    )


DIALECTS: dict[str, Ask] = {
    "chat": ask_chat,
    "responses": ask_responses,
    "anthropic": ask_anthropic,
    "ollama": ask_ollama,
}
OTHERS = [name for name in DIALECTS if name != "chat"]


@pytest.mark.parametrize("stream", [True, False])
async def test_all_clients_get_the_same_answer_from_the_same_prompt(
    fleet: DialectFleet, *, stream: bool
) -> None:
    fleet.output = ANSWER
    answers = [await ask(fleet, stream=stream) for ask in DIALECTS.values()]
    prompts = fleet.prompts()
    assert len(set(prompts)) == 1, prompts
    expected = ("I look.", "The user wants the weather.", [("weather", {"city": CITY})])
    assert [answer[:3] for answer in answers] == [expected] * len(DIALECTS)
    assert len({answer.total_tokens for answer in answers}) == 1
    rows = await fleet.take_rows(len(DIALECTS))
    totals = {row.input_tokens + row.output_tokens for row in rows}
    assert totals == {answers[0].total_tokens}
    assert {row.status for row in rows} == {"completed"}


@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("stream", [True, False])
async def test_lost_replica_changes_nothing(
    fleet: DialectFleet, dialect: str, *, stream: bool
) -> None:
    fleet.output = ANSWER
    undisturbed = await DIALECTS[dialect](fleet, stream=stream)
    for crash_after in (0, 9, 20):
        fleet.crash_after = crash_after
        assert await DIALECTS[dialect](fleet, stream=stream) == undisturbed
        assert fleet.crash_after is None
    rows = await fleet.take_rows(4)
    assert {(row.status, row.output_tokens) for row in rows} == {
        ("completed", rows[0].output_tokens)
    }


async def test_tool_result_returns_to_the_model(fleet: DialectFleet) -> None:
    fleet.output = ANSWER
    client, other, third = fleet.openai(), fleet.anthropic(), fleet.ollama()
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    first = await client.responses.create(model=MODEL, input=QUESTION, tools=[tool])
    call: Any = first.output[-1]
    anthropic_tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    question: Any = {"role": "user", "content": QUESTION}
    message = await other.messages.create(
        model=MODEL, max_tokens=500, messages=[question], tools=anthropic_tools
    )
    assert [block.type for block in message.content] == ["text", "tool_use"]
    use: Any = message.content[-1]
    answer = await third.chat(MODEL, [question], tools=[WEATHER])
    fleet.output = "Sunny."
    fleet.requests.clear()
    again = await client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "21 C"}],
        tools=[tool],
    )
    result: Any = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "21 C"}],
    }
    turn: Any = {"role": "assistant", "content": message.content}
    then = await other.messages.create(
        model=MODEL, max_tokens=500, messages=[question, turn, result], tools=anthropic_tools
    )
    tool_message = {"role": "tool", "tool_name": "weather", "content": "21 C"}
    last = await third.chat(MODEL, [question, answer.message, tool_message], tools=[WEATHER])
    texts = [again.output_text, getattr(then.content[0], "text", ""), last.message.content]
    assert texts == ["Sunny."] * 3
    assert len(set(fleet.prompts())) == 1


async def test_errors_have_the_shape_of_each_client(fleet: DialectFleet) -> None:
    question: Any = [{"role": "user", "content": "Hi"}]
    for key, model in (("sk-wrong", MODEL), ("", "missing")):
        openai_error = openai.NotFoundError if model == "missing" else openai.AuthenticationError
        with pytest.raises(openai_error) as failed:
            await fleet.openai(key).responses.create(model=model, input="Hi")
        assert failed.value.code in {"model_not_found", "invalid_api_key"}
        anthropic_error = (
            anthropic.NotFoundError if model == "missing" else anthropic.AuthenticationError
        )
        with pytest.raises(anthropic_error) as refused:
            await fleet.anthropic(key).messages.create(model=model, max_tokens=9, messages=question)
        body: Any = refused.value.body
        assert body["error"]["type"] in {"not_found_error", "authentication_error"}
        assert refused.value.request_id == body["request_id"]
        with pytest.raises(ollama.ResponseError) as rejected:
            await fleet.ollama(key).chat(model, question)
        assert rejected.value.status_code in {401, 404}
        assert "API key" in rejected.value.error or "missing" in rejected.value.error


async def read_ollama(fleet: DialectFleet, messages: Any, *, stream: bool) -> None:  # noqa: ANN401 - the client's type
    client: Any = fleet.ollama()
    response = await client.chat(MODEL, messages, stream=stream)
    if stream:
        async for _ in response:
            pass


async def test_error_of_the_replica_is_translated(fleet: DialectFleet) -> None:
    messages: Any = [{"role": "user", "content": "x " * 5000}]
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await fleet.anthropic().messages.create(
                model=MODEL, max_tokens=9, messages=messages, stream=stream
            )
        with pytest.raises(ollama.ResponseError, match="context length"):
            await read_ollama(fleet, messages, stream=stream)


async def test_tokens_are_counted_as_they_are_billed(fleet: DialectFleet) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    client = fleet.anthropic()
    counted = await client.messages.count_tokens(
        model=MODEL, messages=messages, system=SYSTEM, tools=tools
    )
    message = await client.messages.create(
        model=MODEL, max_tokens=9, messages=messages, system=SYSTEM, tools=tools
    )
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    events = await client.messages.create(
        model=MODEL, max_tokens=9, messages=messages, system=SYSTEM, tools=tools, stream=True
    )
    first, *others = [event async for event in events]
    assert first.type == "message_start"
    assert others[-2].type == "message_delta"
    for name in ("input_tokens", "cache_read_input_tokens"):
        counts = {getattr(one, name) for one in (first.message.usage, others[-2].usage, usage)}
        assert len(counts) == 1, "the start of a stream has the counts of its end"
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    response = await fleet.openai().responses.input_tokens.count(
        model=MODEL, input=QUESTION, instructions=SYSTEM, tools=[tool]
    )
    assert response.input_tokens == counted.input_tokens


async def test_azure_client_finds_the_chat(fleet: DialectFleet) -> None:
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=fleet.url, api_key=fleet.key, api_version="2026-10-01", max_retries=0
    ) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        response = await client.chat.completions.create(model=MODEL, messages=messages)
    assert response.choices[0].message.content == "Hello!"
    answer = await fleet.client.post(
        "/openai/v1/responses", json={"model": MODEL, "input": "Hi"}, headers={"api-key": fleet.key}
    )
    assert answer.json()["status"] == "completed"
    for deployment, status in ((MODEL, 200), ("none", 404)):
        path = f"/openai/deployments/{deployment}/chat/completions?api-version=2026-10-01"
        without_model = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = await fleet.client.post(path, json=without_model, headers={"api-key": fleet.key})
        assert answer.status_code == status


async def test_limits_end_and_refuse_requests_in_the_shape_of_each_client(
    fleet: DialectFleet,
) -> None:
    project, messages = fleet.accounts.project("poor"), [{"role": "user", "content": "Hi"}]
    fleet.accounts.price(1_000)
    fleet.accounts.limit(project, "nano_dollars", 20_000, "day")
    fleet.accounts.limit(project, "tokens", 10_000, "day")
    key = fleet.accounts.key(project)
    fleet.output = "One. Two. Three. " * 60
    await fleet.wait_for_key(key)
    events: Any = await fleet.openai(key).responses.create(model=MODEL, input="Hi", stream=True)
    last = [event async for event in events][-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.to_dict() == {
        "reason": "max_output_tokens",
        "stop_reason": "budget",
    }
    assert 20 <= last.response.usage.output_tokens <= 21
    client: Any = fleet.anthropic(key)
    with pytest.raises(anthropic.RateLimitError) as refused:
        await client.messages.create(model=MODEL, max_tokens=20, messages=messages)
    headers = refused.value.response.headers
    assert int(headers["retry-after"]) > 0
    assert headers["anthropic-ratelimit-tokens-limit"] == "10000"
    assert datetime.fromisoformat(headers["anthropic-ratelimit-tokens-reset"]).year >= 2026
    with pytest.raises(ollama.ResponseError, match="exceeds") as rejected:
        await fleet.ollama(key).chat(MODEL, messages)
    assert rejected.value.status_code == 429


async def test_stop_sequence_ends_a_message(fleet: DialectFleet) -> None:
    fleet.output = "One. Two. Three."
    message = await fleet.anthropic().messages.create(
        model=MODEL,
        max_tokens=50,
        messages=[{"role": "user", "content": "Count"}],
        stop_sequences=["Two"],
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Two")
    assert getattr(message.content[0], "text", "") == "One. "


async def test_ollama_client_finds_its_way(fleet: DialectFleet) -> None:
    client = fleet.ollama()
    assert [model.model for model in (await client.list()).models] == [MODEL]
    shown = await client.show(f"{MODEL}:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["argosy.context_length"] == 2048
    assert "tools" in (shown.capabilities or [])
    assert [model.model for model in (await client.ps()).models] == [MODEL]
    assert (await client.pull(MODEL)).status == "success"
    assert (await client.generate(MODEL)).done_reason == "load"
    fleet.output = THOUGHT + "Hello!"
    generated = await client.generate(MODEL, "Hi", options={"num_predict": 100})
    assert (generated.response, generated.thinking) == ("Hello!", "The user wants the weather.")
    fleet.requests.clear()
    raw = await client.generate(MODEL, "Hi", raw=True)
    assert raw.response == fleet.output
    assert fleet.prompts() == ["Hi"]
    for refused in (client.delete(MODEL), client.embed(MODEL, "x"), client.push(MODEL)):
        with pytest.raises(ollama.ResponseError) as error:
            await refused
        assert error.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="missing"):
        await client.pull("missing")
    home = await fleet.client.get("/")
    version = (await fleet.client.get("/api/version")).json()["version"]
    assert (home.text, len(version.split("."))) == ("Ollama is running", 3)


async def test_anthropic_client_lists_models(fleet: DialectFleet) -> None:
    client = fleet.anthropic()
    models = [model async for model in client.models.list()]
    assert [(model.id, model.type) for model in models] == [(MODEL, "model")]
    assert (await client.models.retrieve("claude-opus-9")).max_input_tokens == 2048
    assert [model.id async for model in fleet.openai().models.list()] == [MODEL]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_repeated_request_gets_the_first_response(
    fleet: DialectFleet, path: str, body: dict[str, Any], *, stream: bool
) -> None:
    headers = {"authorization": f"Bearer {fleet.key}", "idempotency-key": f"{path} {stream}"}
    headers["idempotency-key"] = headers["idempotency-key"].replace(" ", "-")
    request = {"model": MODEL, "stream": stream, **body}
    first = await fleet.client.post(path, json=request, headers=headers)
    again = await fleet.client.post(path, json=request, headers=headers)
    assert again.headers["idempotent-replayed"] == "true"
    assert (again.status_code, again.text) == (200, first.text)
    assert again.headers["content-type"] == first.headers["content-type"]
    assert len(fleet.requests) == 1


async def test_fields_without_effect_are_named(fleet: DialectFleet) -> None:
    raw = await fleet.openai().responses.with_raw_response.create(
        model=MODEL, input="Hi", tools=[{"type": "web_search"}], extra_body={"x_new": 1}
    )
    named = ",".join(raw.headers.get_list("x-argosy-ignored-fields"))
    assert named == "x_new,tools[0]"
