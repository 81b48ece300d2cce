"""Parsed output of a replica: reasoning and tool calls, streamed as they are returned whole, also after a resume."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.support.fake_engine import FakeEngine, Script
from tests.support.replica_servers import MODEL, RunningReplica, serve

from argosy.engine import EngineRequest
from argosy.engine.serving.output_parsing import FORMATS
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.engine.serving.text import ChatTemplate, Tokenizer
from argosy.models import BUNDLED_MODEL
from argosy.protocol import EventParser

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = """{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant: {{ '<think>\n' if enable_thinking is defined and enable_thinking }}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Apply a patch."}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Z\\u00fcrich </tool_call>"}}\n</tool_call>'
CUSTOM_CALL = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** \\"a\\"\\nb"}}\n</tool_call>'
)
THOUGHT = "<think>\nThe user wants the weather.\n</think>\n\n"


@functools.cache
def text_processing() -> TextProcessing:
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    output_format = FORMATS["hermes"].with_vocabulary(
        lambda text: tokenizer.added_token_id(text) is not None
    )
    info = {"chat_template": TEMPLATE}
    template = ChatTemplate(TEMPLATE, {})
    return TextProcessing(tokenizer, template, output_format, tokenizer_info=info)


class Scripted:
    """Replica whose engine generates the text in `output`."""

    output = ""
    replica: RunningReplica

    def script(self, request: EngineRequest) -> Script:
        tokenizer = text_processing().tokenizer
        end = tokenizer.eos_token_ids[0]
        tokens = [*tokenizer.encode(self.output, add_special_tokens=False), end]
        return Script(tokens, stop_token=end)

    async def send(self, output: str, **body: Any) -> Any:  # noqa: ANN401 - any JSON
        self.output = output
        messages = [{"role": "user", "content": "Weather?"}]
        response = await self.replica.client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": messages, **body},
            headers={"x-argosy-response-id": "chatcmpl-1 1700000000"},
        )
        assert response.status_code == 200, response.text
        return response

    async def whole(self, name: str) -> dict[str, Any]:
        """Return the whole response of a case."""
        output, body = CASES[name]
        response: dict[str, Any] = (await self.send(output, **body)).json()
        return response


def accumulate(events: list[bytes]) -> dict[str, Any]:
    """Join the chunks of a stream as the OpenAI SDK does: strings are concatenated, calls go by their index."""
    choices: dict[int, dict[str, Any]] = {}
    response: dict[str, Any] = {}
    for data in events:
        if data == b"[DONE]":
            continue
        chunk = json.loads(data)
        response |= {name: chunk[name] for name in ("id", "created", "model")}
        response["usage"] = chunk["usage"] or response.get("usage")
        response.setdefault("warnings", []).extend(chunk.get("warnings", ()))
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"index": part["index"], "message": {}, "finish_reason": None}
            )
            merge_delta(choice["message"], part["delta"])
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
    response["choices"] = [choices[index] for index in sorted(choices)]
    return response


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    calls.append({})
                merge_delta(calls[part["index"]], {k: v for k, v in part.items() if k != "index"})
        elif isinstance(value, dict):
            merge_delta(message.setdefault(name, {}), value)
        elif value is None:
            message.setdefault(name, None)
        else:
            message[name] = (message.get(name) or "") + value


def normalize(response: dict[str, Any]) -> dict[str, Any]:
    """Reduce a response to what stream and whole response share."""
    for choice in response["choices"]:
        choice["message"].pop("refusal", None)
    names = ("id", "created", "model", "usage")
    choices = [
        {name: choice[name] for name in ("index", "message", "finish_reason")}
        for choice in response["choices"]
    ]
    return {name: response[name] for name in names} | {"choices": choices}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted() -> AsyncIterator[Scripted]:
    state = Scripted()
    engine = FakeEngine(text_processing().tokenizer, state.script, max_model_len=2048)
    async with serve(engine, load_text=text_processing) as state.replica:
        yield state


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello!", {}),
    "reasoning": (THOUGHT + "Hello!", {}),
    "reasoning opened by the prompt": (
        "So.\n</think>\n\nHi",
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    "reasoning only": ("<think>\nHm", {"max_tokens": 3}),
    "hidden reasoning": (THOUGHT + "Hello!", {"include_reasoning": False}),
    "call": (CALL, {"tools": [WEATHER]}),
    "reasoning, text and two calls": (
        THOUGHT + "I look.\n" + CALL + "\n" + CALL,
        {"tools": [WEATHER, PATCH], "tool_choice": "auto"},
    ),
    "call cut by the limit": (CALL, {"tools": [WEATHER], "max_tokens": 16}),
    "named call": (
        CALL,
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    "custom call": ("Ok. " + CUSTOM_CALL, {"tools": [PATCH]}),
    "legacy function": (CALL, {"functions": [WEATHER["function"]]}),
    "call without tools": (CALL, {}),
    "call that the request forbids": (CALL, {"tools": [WEATHER], "tool_choice": "none"}),
    "unknown tool": (CALL.replace("weather", "other"), {"tools": [WEATHER]}),
    "two choices": (THOUGHT + CALL, {"tools": [WEATHER], "n": 2}),
    "stop string": (THOUGHT + "One. Two. Three.", {"stop": ["Two", "user"]}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_also_resumed_after_any_token_equals_the_whole_response(
    scripted: Scripted, name: str
) -> None:
    whole = normalize(await scripted.whole(name))
    body = CASES[name][1] | {"stream": True, "stream_options": {"include_usage": True}}
    headers = {
        "x-argosy-resume-metadata": "1",
        "x-argosy-response-id": "chatcmpl-1 1700000000",
    }
    messages = [{"role": "user", "content": "Weather?"}]
    body |= {"model": MODEL, "messages": messages}
    post = functools.partial(scripted.replica.client.post, "/v1/chat/completions")
    complete = (await post(json=body, headers=headers)).text
    assert normalize(accumulate(EventParser().feed(complete.encode()))) == whole
    for end in range(len(complete.split("\n\n"))):
        blocks = complete.split("\n\n")[: end + 1]
        if not blocks[-1].startswith(": argosy ") or " prompt " in blocks[-1]:
            continue
        tokens: list[list[int]] = [[] for _ in whole["choices"]]
        for block in blocks:
            words = block.split(" ")
            if words[:2] == [":", "argosy"] and words[2] != "prompt":
                tokens[int(words[2])] += [int(i) for i in words[3].split(",") if i]
        resumed = await post(
            json=body | {"resume": {"token_ids": tokens}},
            headers=headers
            | {
                "x-argosy-cached-tokens": str(
                    whole["usage"]["prompt_tokens_details"]["cached_tokens"]
                )
            },
        )
        assert resumed.status_code == 200, resumed.text
        first = EventParser().feed(("\n\n".join(blocks) + "\n\n").encode())
        joined = accumulate([*first, *EventParser().feed(resumed.content)])
        assert normalize(joined) == whole


@pytest.mark.parametrize(
    ("name", "finish_reason"),
    [
        ("text", "stop"),
        ("reasoning only", "length"),
        ("call", "tool_calls"),
        ("reasoning, text and two calls", "tool_calls"),
        ("call cut by the limit", "length"),
        ("named call", "stop"),
        ("custom call", "tool_calls"),
        ("legacy function", "function_call"),
        ("call without tools", "stop"),
        ("stop string", "stop"),
    ],
)
async def test_finish_reasons_are_those_of_openai(
    scripted: Scripted, name: str, finish_reason: str
) -> None:
    response = await scripted.whole(name)
    assert response["choices"][0]["finish_reason"] == finish_reason


async def test_the_message_has_reasoning_text_and_calls(scripted: Scripted) -> None:
    response = await scripted.whole("reasoning, text and two calls")
    message = response["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "The user wants the weather."
    assert message["content"] == "I look."
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 29 and call_id.startswith("call_") for call_id in ids)
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"city": "Zürich </tool_call>"}] * 2
    tokenizer = text_processing().tokenizer
    details = response["usage"]["completion_tokens_details"]
    spelled = tokenizer.encode("\nThe user wants the weather.\n</think>", add_special_tokens=False)
    marker = tokenizer.encode("</think>", add_special_tokens=False)
    assert len(spelled) - len(marker) <= details["reasoning_tokens"] <= len(spelled)


async def test_a_custom_call_has_its_plain_input(scripted: Scripted) -> None:
    (call,) = (await scripted.whole("custom call"))["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom"
    assert call["custom"] == {"name": "patch", "input": '*** "a"\nb'}


async def test_logprobs_and_token_ids_cover_every_token_of_a_parsed_stream(
    scripted: Scripted,
) -> None:
    output, body = CASES["reasoning, text and two calls"]
    extra = {"logprobs": True, "return_token_ids": True}
    response = await scripted.send(output, stream=True, **body, **extra)
    chunks = [
        json.loads(data) for data in EventParser().feed(response.content) if data != b"[DONE]"
    ]
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [i for choice in choices for i in choice.get("token_ids") or ()]
    logprobs = [
        item for choice in choices for item in (choice["logprobs"] or {}).get("content", ())
    ]
    tokenizer = text_processing().tokenizer
    expected = tokenizer.encode(output, add_special_tokens=False)
    assert ids == [*expected, tokenizer.eos_token_ids[0]]
    assert len(logprobs) == len(ids)


async def test_a_report_says_what_was_done(scripted: Scripted) -> None:
    scripted.output, body = CASES["reasoning, text and two calls"]
    messages = [{"role": "user", "content": "Weather?"}]
    response = await scripted.replica.client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "stream": True, "speculation": False, **body},
        headers={"x-argosy-report": "content"},
    )
    (line,) = [line for line in response.text.split("\n") if line.startswith(": argosy report ")]
    report = msgspec.json.decode(line.removeprefix(": argosy report "))
    assert report["tool_calls"] == 2
    assert "switches drafts off" in report["no_drafts_reason"]
    assert (
        report["steps"] + report.get("accepted_drafts", 0)
        == len(text_processing().tokenizer.encode(scripted.output, add_special_tokens=False)) + 1
    )
    assert report["parser_events"]["call_start"] == 2
    assert "Weather?" in report["prompts"][0]
    assert report["outputs"][0].startswith(scripted.output)
