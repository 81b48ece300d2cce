"""Questions through the official clients of all APIs in Python, and the conversation that `conversation.mjs` holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import ollama
import openai
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import anthropic

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
    """Conversation that a client in JavaScript has to hold."""

    questions: dict[str, Question]
    tool_loop: Question
    typed: Question
    cancelled: Question
    missing_model: str = "missing"
    system: str = SYSTEM
    max_tokens: int = MAX_TOKENS
    tool_result: str = TOOL_RESULT


class Transcript(msgspec.Struct, frozen=True, rename="camel"):
    """Conversation that a client in JavaScript has held."""

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


def chat_messages(text: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def function_tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool}


async def ask_chat(sdk: openai.AsyncOpenAI, model: str, question: Question) -> Answer:
    chat: Any = sdk.chat.completions
    fields: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}
    fields["messages"] = chat_messages(question.text)
    if question.stop:
        fields["stop"] = list(question.stop)
    if question.effort is not None:
        fields["reasoning_effort"] = question.effort
    if question.tool is not None:
        fields["tools"] = [function_tool(question.tool)]
    if question.stream:
        fields["stream_options"] = {"include_usage": True}
        async with chat.stream(**fields) as events:
            response = await events.get_final_completion()
    else:
        response = await chat.create(**fields)
    message = response.choices[0].message
    return Answer(
        message.content or "",
        getattr(message, "reasoning_content", None) or "",
        [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()],
        response.usage.total_tokens,
    )


async def ask_responses(sdk: openai.AsyncOpenAI, model: str, question: Question) -> Answer:
    responses: Any = sdk.responses
    fields: dict[str, Any] = {"model": model, "input": question.text, "instructions": SYSTEM}
    fields |= {"max_output_tokens": MAX_TOKENS, "temperature": 0}
    if question.effort is not None:
        fields["reasoning"] = {"effort": question.effort}
    if question.tool is not None:
        fields["tools"] = [{"type": "function", "strict": False, **question.tool}]
    if question.stream:
        async with responses.stream(**fields) as events:
            response = await events.get_final_response()
    else:
        response = await responses.create(**fields)
    items = response.output
    return Answer(
        response.output_text,
        "".join(item.content[0].text for item in items if item.type == "reasoning"),
        [(i.name, json.loads(i.arguments)) for i in items if i.type == "function_call"],
        response.usage.total_tokens,
    )


async def ask_anthropic(sdk: anthropic.AsyncAnthropic, model: str, question: Question) -> Answer:
    messages: Any = sdk.messages
    fields: dict[str, Any] = {"model": model, "system": SYSTEM, "max_tokens": MAX_TOKENS}
    fields |= {"extra_body": {"temperature": 0}, "thinking": {"type": "adaptive"}}
    fields["messages"] = [{"role": "user", "content": question.text}]
    if question.stop:
        fields["stop_sequences"] = list(question.stop)
    if question.effort is not None:
        fields["output_config"] = {"effort": question.effort}
    if question.tool is not None:
        tool = dict(question.tool)
        fields["tools"] = [{"input_schema": tool.pop("parameters"), **tool}]
    if question.stream:
        async with messages.stream(**fields) as events:
            message = await events.get_final_message()
    else:
        message = await messages.create(**fields)
    blocks, usage = message.content, message.usage
    calls = [(block.name, block.input) for block in blocks if block.type == "tool_use"]
    assert message.stop_reason in ({"tool_use"} if calls else {"end_turn", "stop_sequence"})
    return Answer(
        "".join(block.text for block in blocks if block.type == "text"),
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        calls,
        usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens,
    )


async def ask_ollama(sdk: ollama.AsyncClient, model: str, question: Question) -> Answer:
    chat: Any = sdk.chat
    options = {"temperature": 0, "num_predict": MAX_TOKENS, "stop": list(question.stop)}
    fields: dict[str, Any] = {"model": model, "options": options}
    fields["messages"] = chat_messages(question.text)
    if question.effort is not None:
        fields["think"] = question.effort
    if question.tool is not None:
        fields["tools"] = [function_tool(question.tool)]
    answer = await chat(**fields, stream=question.stream)
    lines = [line async for line in answer] if question.stream else [answer]
    last = lines[-1]
    return Answer(
        "".join(line.message.content or "" for line in lines),
        "".join(line.message.thinking or "" for line in lines),
        [
            (call.function.name, dict(call.function.arguments))
            for line in lines
            for call in line.message.tool_calls or ()
        ],
        (last.prompt_eval_count or 0) + (last.eval_count or 0),
    )


class Sdks:
    """Official SDKs with one key, without retries."""

    def __init__(self, url: str, key: str) -> None:
        import anthropic  # takes a second, and each worker collects the tests that use it

        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
        self.ollama = ollama.AsyncClient(url, headers={"authorization": f"Bearer {key}"})

    async def ask(self, api: str, model: str, question: Question) -> Answer:
        """Ask a question through one of `APIS`."""
        match api:
            case "chat":
                return await ask_chat(self.openai, model, question)
            case "responses":
                return await ask_responses(self.openai, model, question)
            case "anthropic":
                return await ask_anthropic(self.anthropic, model, question)
        return await ask_ollama(self.ollama, model, question)

    async def aclose(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.ollama._client.aclose()  # noqa: SLF001 - the client has no method for it
