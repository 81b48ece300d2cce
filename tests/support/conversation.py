"""Conversation through the official clients of all APIs in Python. `conversation.mjs` is the same in JavaScript."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import anthropic
import msgspec
import ollama
import openai
from anthropic import beta_async_tool
from pydantic import BaseModel, ConfigDict, Field

APIS = ("chat", "responses", "anthropic", "ollama")
SYSTEM = "You are brief."
MAX_TOKENS = 500
TOOL_RESULT = "21 degrees and clear"

Tool = Mapping[str, Any]
"""Name, description and parameters of a function."""
Call = tuple[str, dict[str, Any]]
"""Name and arguments of a call."""


class Question(msgspec.Struct, frozen=True, rename="camel"):
    """Request of the conversation."""

    text: str
    stream: bool = True
    stop: tuple[str, ...] = ()
    """Stop sequences, which the Responses API does not have."""
    effort: str | None = None
    """Effort of reasoning."""
    tool: Tool | None = None


class Answer(msgspec.Struct, frozen=True, rename="camel"):
    """Parts of a response, as a client reads them."""

    text: str
    thinking: str
    calls: list[Call]
    total_tokens: int

    @property
    def parts(self) -> tuple[str, str, list[Call]]:
        return self.text, self.thinking, self.calls


class Person(BaseModel):
    """Typed answer."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=24)
    age: int


class Script(msgspec.Struct, frozen=True, rename="camel"):
    """Conversation that a client has to hold."""

    questions: dict[str, Question]
    tool_loop: Question
    typed: Question
    cancelled: Question
    missing_model: str = "missing"
    system: str = SYSTEM
    max_tokens: int = MAX_TOKENS
    tool_result: str = TOOL_RESULT


class Transcript(msgspec.Struct, frozen=True, rename="camel"):
    """Conversation that a client has held."""

    answers: dict[str, Answer]
    """Answers by name of the question."""
    tool_loop: Answer
    """Last answer of a loop that runs the tool, with the calls of the loop."""
    typed: dict[str, Any]
    """Answer that the client has parsed."""
    error: tuple[int, str]
    """Status and text of an error."""
    cancelled_after: str
    """Text that arrived before the client cancelled a stream."""


class Client(Protocol):
    """Client of one API, with the model that it sends requests to."""

    async def ask(self, question: Question) -> Answer: ...

    async def run_tool_loop(self, question: Question) -> Answer:
        """Let the model call the tool, send the result back, and return the last answer with all calls."""
        ...

    async def parse(self, text: str) -> Person: ...

    async def fail(self, model: str) -> tuple[int, str]:
        """Send a request to a model that is not served, and return the error."""
        ...

    async def cancel(self, text: str) -> str:
        """Stream an answer, and close the stream after the first text."""
        ...


async def converse(client: Client, script: Script) -> Transcript:
    """Have the conversation with one client."""
    return Transcript(
        answers={name: await client.ask(question) for name, question in script.questions.items()},
        tool_loop=await client.run_tool_loop(script.tool_loop),
        typed=(await client.parse(script.typed.text)).model_dump(),
        error=await client.fail(script.missing_model),
        cancelled_after=await client.cancel(script.cancelled.text),
    )


def chat_messages(text: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def function_tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool}


class ChatClient:
    """Chat completions of the OpenAI SDK."""

    def __init__(self, sdk: openai.AsyncOpenAI, model: str) -> None:
        self._chat: Any = sdk.chat.completions
        self._options = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}

    async def ask(self, question: Question) -> Answer:
        response = await self._create(question, chat_messages(question.text))
        message = response.choices[0].message
        return Answer(
            message.content or "",
            getattr(message, "reasoning_content", None) or "",
            [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()],
            response.usage.total_tokens,
        )

    async def run_tool_loop(self, question: Question) -> Answer:
        messages = chat_messages(question.text)
        calls: list[Call] = []
        while True:
            response = await self._create(question, messages)
            message = response.choices[0].message
            if not message.tool_calls:
                return Answer(message.content, "", calls, response.usage.total_tokens)
            messages.append(message)
            for call in message.tool_calls:
                calls.append((call.function.name, json.loads(call.function.arguments)))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT})

    async def _create(self, question: Question, messages: list[Any]) -> Any:  # noqa: ANN401 - a completion
        fields: dict[str, Any] = self._options | {"messages": messages}
        if question.stop:
            fields["stop"] = list(question.stop)
        if question.effort is not None:
            fields["reasoning_effort"] = question.effort
        if question.tool is not None:
            fields["tools"] = [function_tool(question.tool)]
        if not question.stream:
            return await self._chat.create(**fields)
        fields["stream_options"] = {"include_usage": True}
        async with self._chat.stream(**fields) as events:
            return await events.get_final_completion()

    async def parse(self, text: str) -> Person:
        response = await self._chat.parse(
            **self._options, messages=chat_messages(text), response_format=Person
        )
        person: Person = response.choices[0].message.parsed
        return person

    async def fail(self, model: str) -> tuple[int, str]:
        try:
            await self._chat.create(**self._options | {"model": model}, messages=chat_messages(""))
        except openai.APIStatusError as error:
            return error.status_code, str(error)
        return 200, ""

    async def cancel(self, text: str) -> str:
        stream = await self._chat.create(**self._options, messages=chat_messages(text), stream=True)
        async with stream:
            async for chunk in stream:
                if content := chunk.choices[0].delta.content:
                    return str(content)
        return ""


class ResponsesClient:
    """Responses of the OpenAI SDK."""

    def __init__(self, sdk: openai.AsyncOpenAI, model: str) -> None:
        self._responses: Any = sdk.responses
        self._options = {
            "model": model,
            "instructions": SYSTEM,
            "max_output_tokens": MAX_TOKENS,
            "temperature": 0,
        }

    async def ask(self, question: Question) -> Answer:
        response = await self._create(question, input=question.text)
        items = response.output
        return Answer(
            response.output_text,
            "".join(item.content[0].text for item in items if item.type == "reasoning"),
            [(i.name, json.loads(i.arguments)) for i in items if i.type == "function_call"],
            response.usage.total_tokens,
        )

    async def run_tool_loop(self, question: Question) -> Answer:
        items: list[Any] = [{"role": "user", "content": question.text}]
        calls: list[Call] = []
        while True:
            response = await self._create(question, input=items)
            made = [item for item in response.output if item.type == "function_call"]
            if not made:
                return Answer(response.output_text, "", calls, response.usage.total_tokens)
            items += response.output
            for call in made:
                calls.append((call.name, json.loads(call.arguments)))
                output = {"call_id": call.call_id, "output": TOOL_RESULT}
                items.append({"type": "function_call_output", **output})

    async def _create(self, question: Question, **fields: Any) -> Any:  # noqa: ANN401 - a response
        fields |= self._options
        if question.effort is not None:
            fields["reasoning"] = {"effort": question.effort}
        if question.tool is not None:
            fields["tools"] = [{"type": "function", "strict": False, **question.tool}]
        if not question.stream:
            return await self._responses.create(**fields)
        async with self._responses.stream(**fields) as events:
            return await events.get_final_response()

    async def parse(self, text: str) -> Person:
        response = await self._responses.parse(**self._options, input=text, text_format=Person)
        person: Person = response.output_parsed
        return person

    async def fail(self, model: str) -> tuple[int, str]:
        try:
            await self._responses.create(**self._options | {"model": model}, input="")
        except openai.APIStatusError as error:
            return error.status_code, str(error)
        return 200, ""

    async def cancel(self, text: str) -> str:
        stream = await self._responses.create(**self._options, input=text, stream=True)
        async with stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    return str(event.delta)
        return ""


class AnthropicClient:
    """Messages of the Anthropic SDK."""

    def __init__(self, sdk: anthropic.AsyncAnthropic, model: str) -> None:
        self._messages: Any = sdk.messages
        self._beta_messages: Any = sdk.beta.messages
        self._options = {"model": model, "system": SYSTEM, "max_tokens": MAX_TOKENS}
        self._options |= {"extra_body": {"temperature": 0}}

    async def ask(self, question: Question) -> Answer:
        fields = self._options | self._fields(question)
        if question.stream:
            async with self._messages.stream(**fields) as events:
                return read_message(await events.get_final_message())
        return read_message(await self._messages.create(**fields))

    async def run_tool_loop(self, question: Question) -> Answer:
        assert question.tool is not None
        calls: list[Call] = []

        async def call(**arguments: Any) -> str:  # noqa: ANN401 - those of the schema
            calls.append((name, arguments))
            return TOOL_RESULT

        name, schema = question.tool["name"], question.tool["parameters"]
        description = question.tool["description"]
        tool = beta_async_tool(call, name=name, description=description, input_schema=schema)
        fields = self._options | self._fields(question) | {"tools": [tool]}
        runner = self._beta_messages.tool_runner(**fields, stream=question.stream)
        answer = read_message(await runner.until_done())
        return Answer(answer.text, "", calls, answer.total_tokens)

    def _fields(self, question: Question) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": question.text}],
            "thinking": {"type": "adaptive"},
        }
        if question.stop:
            fields["stop_sequences"] = list(question.stop)
        if question.effort is not None:
            fields["output_config"] = {"effort": question.effort}
        if question.tool is not None:
            tool = dict(question.tool)
            fields["tools"] = [{"input_schema": tool.pop("parameters"), **tool}]
        return fields

    async def parse(self, text: str) -> Person:
        messages = [{"role": "user", "content": text}]
        message = await self._messages.parse(
            **self._options, messages=messages, output_format=Person
        )
        person: Person = message.parsed_output
        return person

    async def fail(self, model: str) -> tuple[int, str]:
        try:
            await self._messages.create(
                **self._options | {"model": model}, messages=[{"role": "user", "content": "Hi"}]
            )
        except anthropic.APIStatusError as error:
            return error.status_code, str(error)
        return 200, ""

    async def cancel(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        async with self._messages.stream(**self._options, messages=messages) as stream:
            async for part in stream.text_stream:
                return str(part)
        return ""


def read_message(message: Any) -> Answer:  # noqa: ANN401 - a message
    blocks, usage = message.content, message.usage
    calls = [(block.name, block.input) for block in blocks if block.type == "tool_use"]
    assert message.stop_reason in ({"tool_use"} if calls else {"end_turn", "stop_sequence"})
    return Answer(
        "".join(block.text for block in blocks if block.type == "text"),
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        calls,
        usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens,
    )


class OllamaClient:
    """Chat of Ollama's client."""

    def __init__(self, sdk: ollama.AsyncClient, model: str) -> None:
        self._sdk: Any = sdk
        self._model = model

    async def ask(self, question: Question) -> Answer:
        return read_lines(await self._lines(question, chat_messages(question.text)))

    async def run_tool_loop(self, question: Question) -> Answer:
        messages = chat_messages(question.text)
        calls: list[Call] = []
        while True:
            lines = await self._lines(question, messages)
            answer = read_lines(lines)
            if not answer.calls:
                return Answer(answer.text, "", calls, answer.total_tokens)
            calls += answer.calls
            tool_calls = [call for line in lines for call in line.message.tool_calls or ()]
            messages.append({"role": "assistant", "content": answer.text, "tool_calls": tool_calls})
            for name, _ in answer.calls:
                messages.append({"role": "tool", "tool_name": name, "content": TOOL_RESULT})

    async def _lines(self, question: Question, messages: list[Any]) -> list[Any]:
        options = {"temperature": 0, "num_predict": MAX_TOKENS, "stop": list(question.stop)}
        fields: dict[str, Any] = {"messages": messages, "options": options}
        if question.effort is not None:
            fields["think"] = question.effort
        if question.tool is not None:
            fields["tools"] = [function_tool(question.tool)]
        if question.stream:
            return [line async for line in await self._chat(**fields, stream=True)]
        return [await self._chat(**fields)]

    async def _chat(self, **fields: Any) -> Any:  # noqa: ANN401 - a response or a stream
        return await self._sdk.chat(**{"model": self._model, **fields})

    async def parse(self, text: str) -> Person:
        response = await self._chat(
            messages=chat_messages(text),
            format=Person.model_json_schema(),
            options={"temperature": 0},
        )
        return Person.model_validate_json(response.message.content)

    async def fail(self, model: str) -> tuple[int, str]:
        try:
            await self._chat(model=model, messages=chat_messages(""))
        except ollama.ResponseError as error:
            return error.status_code, str(error)
        return 200, ""

    async def cancel(self, text: str) -> str:
        stream = await self._chat(messages=chat_messages(text), stream=True)
        async with contextlib.aclosing(stream):
            async for line in stream:
                if line.message.content:
                    return str(line.message.content)
        return ""


def read_lines(lines: list[Any]) -> Answer:
    """Join the lines of a response."""
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


class Sdks:
    """Official SDKs with one key, without retries."""

    def __init__(self, url: str, key: str) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
        self.ollama = ollama.AsyncClient(url, headers={"authorization": f"Bearer {key}"})

    def clients(self, model: str) -> dict[str, Client]:
        """Return a client of each API."""
        return {
            "chat": ChatClient(self.openai, model),
            "responses": ResponsesClient(self.openai, model),
            "anthropic": AnthropicClient(self.anthropic, model),
            "ollama": OllamaClient(self.ollama, model),
        }

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.ollama._client.aclose()  # noqa: SLF001 - the client has no method for it


@contextlib.asynccontextmanager
async def open_sdks(url: str, key: str) -> AsyncIterator[Sdks]:
    """Open the official SDKs, and close them at the end."""
    sdks = Sdks(url, key)
    try:
        yield sdks
    finally:
        await sdks.close()
