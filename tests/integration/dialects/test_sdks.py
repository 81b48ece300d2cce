"""A conversation through the official clients of all dialects, also with a replica lost in its middle."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import ollama
import openai
import pytest
from tests.integration.dialects.conftest import MODEL, DialectFleet
from tests.integration.test_parsed_output import CALL, THOUGHT, WEATHER, text_processing
from tests.support.conversation import APIS, SYSTEM, Answer, Question
from tests.support.fake_engine import FAKE_MODEL
from tests.support.replica_servers import MODEL as REPLICA_MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "Weather?"
SCHEMA = WEATHER["function"]["parameters"]  # type: ignore[index] # a constant
CITY = "Zürich </tool_call>"
ANSWER = f"{THOUGHT}I look.\n{CALL}"
BEYOND_CONTEXT = 20_000
"""More output tokens than the context of the model, as Claude Code asks for."""
ASK = Question(QUESTION, tool=WEATHER["function"])  # type: ignore[arg-type] # a constant


async def ask(fleet: DialectFleet, api: str, *, stream: bool) -> Answer:
    model = "claude-of-this-fleet" if api == "anthropic" else MODEL
    return await fleet.sdks().ask(api, model, msgspec.structs.replace(ASK, stream=stream))


@pytest.mark.parametrize("stream", [True, False])
async def test_all_clients_get_the_same_answer_from_the_same_prompt(
    fleet: DialectFleet, *, stream: bool
) -> None:
    fleet.output = ANSWER
    answers = [await ask(fleet, api, stream=stream) for api in APIS]
    prompts = fleet.prompts()
    assert len(set(prompts)) == 1, prompts
    expected = ("I look.", "The user wants the weather.", [("weather", {"city": CITY})])
    assert [answer.parts for answer in answers] == [expected] * len(APIS)
    assert len({answer.total_tokens for answer in answers}) == 1
    rows = await fleet.take_rows(len(APIS))
    totals = {row.input_tokens + row.output_tokens for row in rows}
    assert totals == {answers[0].total_tokens}
    assert {row.status for row in rows} == {"completed"}


async def test_error_of_a_replica_names_the_field_of_the_request(fleet: DialectFleet) -> None:
    client = fleet.openai()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="Hi", max_output_tokens=BEYOND_CONTEXT)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    assert "Shorten it or lower max_output_tokens." in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(
            model=MODEL, input="long " * 300_000
        )  # the gateway refuses it
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("api", APIS[1:])
@pytest.mark.parametrize("stream", [True, False])
async def test_lost_replica_changes_nothing(fleet: DialectFleet, api: str, *, stream: bool) -> None:
    fleet.output = ANSWER
    undisturbed = await ask(fleet, api, stream=stream)
    for crash_after in (0, 9, 20):
        fleet.crash_after = crash_after
        assert await ask(fleet, api, stream=stream) == undisturbed
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
        model=MODEL, max_tokens=BEYOND_CONTEXT, messages=[question], tools=anthropic_tools
    )
    assert [block.type for block in message.content] == ["text", "tool_use"]
    use: Any = message.content[-1]
    options = {"num_predict": BEYOND_CONTEXT}
    answer = await third.chat(MODEL, [question], tools=[WEATHER], options=options)
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
    import anthropic

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
    import anthropic

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
        for name in (MODEL, "claude-of/this-fleet"):
            chat = await client.chat.completions.create(model=name, messages=messages)
            assert chat.choices[0].message.content == "Hello!"
        response = await client.responses.create(model=MODEL, input="Hi", service_tier="flex")
        assert await client.responses.retrieve(response.id) == response
        assert response.service_tier == "default"
        assert MODEL in [model.id async for model in client.models.list()]
    answer = await fleet.client.post(
        "/openai/v1/responses", json={"model": MODEL, "input": "Hi"}, headers={"api-key": fleet.key}
    )
    assert answer.json()["status"] == "completed"
    without_model = {"messages": [{"role": "user", "content": "Hi"}]}
    for deployment, status in ((MODEL, 200), ("none", 404)):
        path = f"/openai/deployments/{deployment}/chat/completions?api-version=2026-10-01"
        answer = await fleet.client.post(path, json=without_model, headers={"api-key": fleet.key})
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
        ("/completions", {"prompt": "Hi"}),
        ("/responses", {"input": "Hi"}),
        ("/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [4]}),
    ],
)
async def test_path_needs_no_version_and_body_no_model_if_there_is_only_one(
    fleet: DialectFleet, path: str, body: dict[str, Any]
) -> None:
    headers = {"authorization": f"Bearer {fleet.key}"}
    is_utility = path.endswith("tokenize")
    prefixed = path if is_utility else f"/v1{path}"
    for each, model in ((path, {}), (path, {"model": None}), (prefixed, {"model": ""})):
        answer = await fleet.client.post(each, json={**body, **model}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert is_utility or f'"model":"{REPLICA_MODEL}"' in answer.text
        refused = await fleet.client.post(each, json={**body, **model})
        assert refused.status_code == 401
    if not is_utility:
        assert [row.asked for row in await fleet.take_rows(3)] == [MODEL] * 3
    assert (await fleet.client.get("/tokenizer_info", headers=headers)).status_code == 200


async def test_limits_end_and_refuse_requests_in_the_shape_of_each_client(
    fleet: DialectFleet,
) -> None:
    import anthropic

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


@pytest.mark.parametrize("api", ["responses", "ollama"])
async def test_conversation_that_is_too_long_goes_on_without_its_beginning(
    fleet: DialectFleet, api: str
) -> None:
    texts = ["plum " * 3_000, "pear", "fig"]
    roles = ("user", "assistant", "user")
    turns: Any = [
        {"role": "system", "content": "Be kind."},
        *({"role": role, "content": text} for role, text in zip(roles, texts, strict=True)),
    ]
    if api == "ollama":
        chat = fleet.ollama()
        assert (await chat.chat(MODEL, turns)).message.content == fleet.output
        refused = {"model": MODEL, "messages": turns, "truncate": False}
        headers = {"api-key": fleet.key}
        answer = await fleet.client.post("/api/chat", json=refused, headers=headers)
        assert answer.status_code == 400
    else:
        responses = fleet.openai().responses.with_raw_response
        raw = await responses.create(model=MODEL, input=turns, truncation="auto")
        assert raw.headers["x-argosy-ignored-fields"] == "messages[1:3]"
        response: Any = raw.parse()
        assert (response.output_text, response.truncation) == (fleet.output, "auto")
        with pytest.raises(openai.BadRequestError):
            await fleet.openai().responses.create(model=MODEL, input=turns)
    prompt = fleet.prompts()[0]
    assert "Be kind." in prompt
    assert "fig" in prompt
    assert "plum" not in prompt


async def test_ollama_client_finds_its_way(fleet: DialectFleet) -> None:
    client = fleet.ollama()
    (listed,) = (await client.list()).models
    assert (listed.model, listed.size) == (MODEL, FAKE_MODEL.size_bytes)
    assert listed.details is not None
    assert listed.details.model_dump(exclude={"parent_model", "families"}) == {
        "format": "safetensors",
        "family": "qwen3",
        "parameter_size": "1.7B",
        "quantization_level": "bfloat16",
    }
    shown = await client.show(f"{MODEL}:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["qwen3.context_length"] == 2048
    assert shown.modelinfo["general.parameter_count"] == FAKE_MODEL.parameters
    template = text_processing().tokenizer_info["chat_template"]
    assert shown.template == template
    assert "tools" in (shown.capabilities or [])
    assert "embedding" not in (shown.capabilities or [])
    assert [model.model for model in (await client.ps()).models] == [MODEL]
    assert (await client.pull(MODEL)).status == "success"
    assert (await client.generate(MODEL)).done_reason == "load"
    fleet.output = THOUGHT + "Hello!"
    generated = await client.generate(MODEL, "Hi", options={"num_predict": 100})
    assert (generated.response, generated.thinking) == ("Hello!", "The user wants the weather.")
    assert (generated.prompt_eval_duration or 0) > 0
    fleet.requests.clear()
    await client.generate(MODEL, "More?", context=generated.context)
    (prompt,) = fleet.prompts()
    assert prompt.index("Hi") < prompt.index("Hello!") < prompt.index("More?")
    raw = await client.generate(MODEL, "Hi", raw=True)
    assert raw.response == fleet.output
    assert fleet.prompts() == ["Hi"]
    for refused, status in (
        (client.delete(MODEL), 501),
        (client.embed(MODEL, "x"), 400),
        (client.push(MODEL), 501),
    ):
        with pytest.raises(ollama.ResponseError) as error:
            await refused
        assert error.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="missing"):
        await client.pull("missing")
    key = {"api-key": fleet.key}
    assert (await fleet.client.head("/api/blobs/sha256:0", headers=key)).status_code == 404
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
