"""Streams and whole responses of each dialect, as the official clients read them without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import httpx
import httpx2
import ollama
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.support.chat_output import CHAT_IDENTITY, Call, ChatOutput

from argosy.protocol.dialects import (
    AnthropicOutput,
    DialectOutput,
    DialectTranslator,
    OllamaOutput,
    OutputIdentity,
    ReasoningCipher,
    ResponsesRequest,
    encode_anthropic_error,
    encode_ollama_error,
    parse_responses_request,
    render_stored_events,
    translate_responses_request,
)

IDENTITY = OutputIdentity(id="0123456789abcdef", created=1_760_000_000, model="big")
CIPHER = ReasoningCipher(lambda text: text[::-1], lambda text: text[::-1])
RESPONSES_BODY = {
    "model": "big",
    "input": "Hi",
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "patch"},
        {
            "type": "namespace",
            "name": "mcp__x__",
            "description": "d",
            "tools": [{"type": "function", "name": "js"}],
        },
    ],
}
FULL = ChatOutput(
    reasoning="Let me think.",
    text="Grüße, Welt!",
    calls=[
        Call("f", '{"a": [1, {"b": "}"}]}'),
        Call("mcp__x__js", ""),
        Call("patch", "*** Begin Patch\n+x", is_custom=True),
    ],
    finish_reason="tool_calls",
)
CASES = {
    "text": ChatOutput(text="Hello."),
    "stop string": ChatOutput(text="Hel", stop_reason="lo"),
    "text cut": ChatOutput(text="Hel", finish_reason="length", stop_reason="budget"),
    "filtered": ChatOutput(text="No", finish_reason="content_filter"),
}
TEXT = st.text(max_size=12)
JSON_OBJECT = st.dictionaries(TEXT, st.integers() | TEXT, max_size=3).map(json.dumps)
OUTPUTS = st.builds(
    ChatOutput,
    reasoning=TEXT,
    text=TEXT,
    calls=st.lists(
        st.builds(Call, st.sampled_from(["f", "mcp__x__js"]), JSON_OBJECT | st.just(""))
        | st.builds(Call, st.just("patch"), TEXT, st.just(True)),
        max_size=3,
    ),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls", "content_filter"]),
    stop_reason=st.sampled_from([None, "lo", "budget"]),
)


def build_responses_output(**fields: object) -> DialectOutput:
    body = json.dumps(RESPONSES_BODY | fields).encode()
    request, _ = parse_responses_request(ResponsesRequest, body)
    return translate_responses_request(request, CIPHER, request.input_items()).output


BUILDERS: dict[str, Callable[[], DialectOutput]] = {
    "responses": build_responses_output,
    "anthropic": lambda: AnthropicOutput(["lo"], max_tokens=10),
    "ollama": lambda: OllamaOutput("big:latest", "chat", lambda: 1_760_000_000.25),
}


SUMMARY = {"summary": lambda: build_responses_output(reasoning={"summary": "auto"})}


def build_translator(dialect: str) -> DialectTranslator:
    encode = encode_ollama_error if dialect == "ollama" else encode_anthropic_error
    return DialectTranslator((BUILDERS | SUMMARY)[dialect](), IDENTITY, encode)


def translate_stream(dialect: str, stream: bytes, cuts: Iterable[int] = ()) -> bytes:
    """Translate a stream that arrives in parts."""
    translator, begin, parts = build_translator(dialect), 0, b""
    for end in sorted({*(cut % (len(stream) + 1) for cut in cuts), len(stream)}):
        parts += translator.translate_events(stream[begin:end])
        begin = end
    return parts + asyncio.run(translator.finish_stream())


def translate_whole(dialect: str, body: bytes) -> bytes:
    return asyncio.run(build_translator(dialect).translate_response(200, body, "req_1"))


def without_custom_calls(output: ChatOutput) -> ChatOutput:
    """Leave out calls that only the Responses API has."""
    return replace(output, calls=[call for call in output.calls if not call.is_custom])


class Replay:
    """Clients of all dialects whose requests get prepared bytes."""

    def __init__(self) -> None:
        import anthropic  # takes a second, and each worker collects this file

        self.body = b""
        self.anthropic_error = anthropic.APIStatusError
        self.anthropic_message = anthropic.types.Message
        self.openai = openai.OpenAI(
            api_key="k", http_client=httpx2.Client(transport=httpx2.MockTransport(self._respond))
        )
        self.anthropic = anthropic.Anthropic(
            api_key="k", http_client=httpx2.Client(transport=httpx2.MockTransport(self._respond))
        )
        self.ollama = ollama.Client(transport=httpx.MockTransport(self._respond_to_httpx))

    def _respond(self, _: httpx2.Request) -> httpx2.Response:
        kind = "application/json" if self.body.startswith(b"{") else "text/event-stream"
        return httpx2.Response(200, content=self.body, headers={"content-type": kind})

    def _respond_to_httpx(self, _: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=self.body)

    def accumulate(self, dialect: str, stream: bytes) -> dict[str, Any]:
        """Return the response that the client's own helper assembles from a stream."""
        self.body = stream
        match dialect:
            case "responses":
                final: Any = None
                with self.openai.responses.stream(model="big", input="Hi") as events:
                    for event in events:
                        final = getattr(event, "response", final)
                return without_parsed(final.to_dict())
            case "anthropic":
                with self.anthropic.messages.stream(
                    model="big", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
                ) as messages:
                    return without_unset(messages.get_final_message().to_dict())
        return join_ollama_lines(list(self.ollama.chat("big", stream=True)))

    def read(self, dialect: str, body: bytes) -> dict[str, Any]:
        """Return a whole response as the client reads it."""
        self.body = body
        match dialect:
            case "responses":
                return dict(self.openai.responses.create(model="big", input="Hi").to_dict())
            case "anthropic":
                message = self.anthropic.messages.create(
                    model="big", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
                )
                return without_unset(message.to_dict())
        return join_ollama_lines([self.ollama.chat("big")])


def without_unset(message: dict[str, Any]) -> dict[str, Any]:
    """Remove fields that are None, which the stream helper adds."""
    return {name: value for name, value in message.items() if value is not None}


def without_parsed(response: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields that the stream helper adds to a response."""
    output = [
        {name: value for name, value in item.items() if name != "parsed_arguments"}
        for item in response["output"]
    ]
    for item in output:
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return response | {"output": output}


def join_ollama_lines(lines: list[ollama.ChatResponse]) -> dict[str, Any]:
    """Join the messages of a stream's lines, as applications do."""
    calls = [call.function.model_dump() for line in lines for call in line.message.tool_calls or ()]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1].model_dump(exclude={"message", "total_duration"})
    return last | {
        "content": "".join(line.message.content or "" for line in lines),
        "thinking": "".join(line.message.thinking or "" for line in lines),
        "calls": calls,
    }


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay()


@pytest.mark.parametrize("dialect", BUILDERS)
@given(
    output=OUTPUTS,
    piece_chars=st.integers(1, 8),
    cuts=st.lists(st.integers(0), max_size=4),
    interleaves_calls=st.booleans(),
)
def test_division_of_a_stream_changes_nothing(
    dialect: str,
    replay: Replay,
    output: ChatOutput,
    piece_chars: int,
    cuts: list[int],
    *,
    interleaves_calls: bool,
) -> None:
    if dialect != "responses":
        output = without_custom_calls(output)
    whole = replay.read(dialect, translate_whole(dialect, output.body()))
    chat = output.stream(piece_chars, interleaves_calls=interleaves_calls)
    stream = translate_stream(dialect, chat, cuts)
    assert replay.accumulate(dialect, stream) == whole


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names must agree with their data."""
    events = []
    for frame in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


@pytest.mark.parametrize(
    ("dialect", "field", "part", "text"),
    [
        ("responses", "content", "content_part", "reasoning_text"),
        ("summary", "summary", "reasoning_summary_part", "reasoning_summary_text"),
    ],
)
def test_responses_events_are_valid_and_in_the_order_that_clients_need(
    dialect: str, field: str, part: str, text: str
) -> None:
    """A client that asks for a summary of the reasoning receives the reasoning as one."""
    events = events_of(translate_stream(dialect, FULL.stream(100)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", f"{part}.added", f"{text}.delta", f"{text}.done"),
        *(f"{part}.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done",),
        *("output_item.done", "output_item.added", "custom_tool_call_input.delta"),
        *("custom_tool_call_input.done", "output_item.done", "completed"),
    ]
    adapter = TypeAdapter[Any](ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
    response = events[-1]["response"]
    Response.model_validate(response)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done
    reasoning, message, call, namespaced, custom = done
    assert reasoning["encrypted_content"] == FULL.reasoning[::-1]
    texts = {name: [part["text"] for part in reasoning[name]] for name in ("summary", "content")}
    assert texts == {"summary": [], "content": [], field: [FULL.reasoning]}
    assert response["reasoning"]["summary"] == ("auto" if field == "summary" else None)
    replayed = events_of(b"".join(render_stored_events(response)))
    assert [event["type"] for event in replayed] == [event["type"] for event in events]
    assert message["content"][0]["text"] == FULL.text
    assert call["arguments"] == FULL.calls[0].text
    assert (namespaced["namespace"], namespaced["name"]) == ("mcp__x__", "js")
    assert custom["input"] == FULL.calls[2].text
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 5


def test_anthropic_counts_cached_tokens_separately(replay: Replay) -> None:
    output = without_custom_calls(FULL)
    message = replay.accumulate("anthropic", translate_stream("anthropic", output.stream()))
    replay.anthropic_message.model_validate(message)
    assert [block["type"] for block in message["content"]] == [
        *("thinking", "text", "tool_use", "tool_use")
    ]
    assert message["content"][0]["signature"]
    assert message["content"][3]["input"] == {}
    assert message["usage"] == {
        "input_tokens": 15,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 3},
    }


@pytest.mark.parametrize(
    ("output", "stop_reason", "stop_sequence"),
    [
        (CASES["text"], "end_turn", None),
        (CASES["stop string"], "stop_sequence", "lo"),
        (CASES["text cut"], "max_tokens", None),
        (FULL, "tool_use", None),
        (CASES["filtered"], "refusal", None),
        (ChatOutput(calls=[Call("f", "{}")], finish_reason="stop"), "tool_use", None),
        (ChatOutput(text="cut", finish_reason="length"), "model_context_window_exceeded", None),
    ],
)
def test_anthropic_stop_reasons(
    output: ChatOutput, stop_reason: str, stop_sequence: str | None
) -> None:
    message = json.loads(translate_whole("anthropic", output.body()))
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


@pytest.mark.parametrize(
    ("is_streamed", "first_output_s", "prompt_duration", "duration"),
    [(True, None, 2_000, 3_000), (False, None, None, 5_000), (False, 1e-6, 1_000, 4_000)],
)
def test_ollama_counts_the_time_after_the_first_output_as_generation(
    *, is_streamed: bool, first_output_s: float | None, prompt_duration: int | None, duration: int
) -> None:
    """The time of the first token of a whole response is unknown where a server sends no stream."""
    times = iter([0.0, 2e-6])
    output = OllamaOutput("m", "chat", lambda: next(times, 5e-6), is_streamed=is_streamed)
    output.read_first_output_s = lambda: first_output_s
    chat = ChatOutput(calls=[Call("f", "{}")]).body()
    message = asyncio.run(DialectTranslator(output, IDENTITY).translate_response(200, chat, ""))
    counts = json.loads(message)
    assert counts.get("prompt_eval_duration") == prompt_duration
    assert counts["eval_duration"] == duration


def test_thinking_is_left_out_unless_the_request_enables_it() -> None:
    translator = DialectTranslator(
        AnthropicOutput(shows_thinking=False), IDENTITY, encode_anthropic_error
    )
    message = json.loads(asyncio.run(translator.translate_response(200, FULL.body(), "")))
    assert message["content"][0] == {"type": "text", "text": FULL.text}


@pytest.mark.parametrize(
    ("name", "details"),
    [
        ("text", None),
        ("text cut", {"reason": "max_output_tokens", "stop_reason": "budget"}),
        ("filtered", {"reason": "content_filter"}),
    ],
)
def test_cut_responses_are_incomplete(name: str, details: dict[str, str] | None) -> None:
    response = json.loads(translate_whole("responses", CASES[name].body()))
    status = "completed" if details is None else "incomplete"
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert response["output"][-1]["status"] == status


ERROR_EVENT = b'data: {"error": {"message": "Lost.", "type": "server_error", "code": "x"}}\n\n'


@pytest.mark.parametrize("has_started", [True, False])
def test_error_ends_a_stream_in_the_shape_of_each_client(
    replay: Replay, *, has_started: bool
) -> None:
    begin = CASES["text"].stream().partition(b"data: [DONE]")[0] if has_started else b""
    response = replay.accumulate("responses", translate_stream("responses", begin + ERROR_EVENT))
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "Lost."}
    with pytest.raises(replay.anthropic_error, match=r"Lost\."):
        replay.accumulate("anthropic", translate_stream("anthropic", begin + ERROR_EVENT))
    with pytest.raises(ollama.ResponseError, match=r"Lost\."):
        replay.accumulate("ollama", translate_stream("ollama", begin + ERROR_EVENT))


def test_idle_ollama_stream_sends_a_line_without_text(replay: Replay) -> None:
    translator = build_translator("ollama")
    stream = translator.translate_comment(b": keep-alive\n\n")
    stream += translator.translate_events(CASES["text"].stream())
    stream += asyncio.run(translator.finish_stream())
    assert replay.accumulate("ollama", stream)["content"] == CASES["text"].text


@pytest.mark.parametrize("dialect", BUILDERS)
@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices": 1}', b"\xff"])
def test_malformed_events_are_reported(dialect: str, data: bytes) -> None:
    with pytest.raises(ValueError, match="malformed"):
        build_translator(dialect).translate_events(b"data: " + data + b"\n\n")


@pytest.mark.parametrize("dialect", BUILDERS)
def test_calls_may_have_any_index(dialect: str, replay: Replay) -> None:
    chunks = [
        {"tool_calls": [{"index": index, "id": f"call_{index}", "function": {"name": "f"}}]}
        for index in (2, 0)
    ]
    chunks += [{"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}]
    events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in chunks]
    stream = "".join([*events, "data: [DONE]\n\n"]).encode()
    accumulated = json.dumps(replay.accumulate(dialect, translate_stream(dialect, stream)))
    assert accumulated.count('"f"') == (3 if dialect == "responses" else 2), "it repeats the tools"
    assert '"a": 1' in accumulated or '{\\"a\\": 1}' in accumulated


def test_call_is_passed_on_once_the_one_before_it_is_complete() -> None:
    chat = ChatOutput(calls=[Call("f", '{"a": 1}'), Call("f", '{"b": 2}')]).stream()
    unfinished = chat[: chat.index(b'"finish_reason": "stop"')].rpartition(b"data:")[0]
    events = events_of(build_translator("responses").translate_events(unfinished))
    deltas = [event for event in events if event["type"].endswith("arguments.delta")]
    assert {event["output_index"] for event in deltas} == {0, 1}


def test_log_probabilities_reach_responses() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"content": "a"},
        "finish_reason": "stop",
        "logprobs": {"content": [entry]},
    }
    body = json.dumps({**CHAT_IDENTITY, "choices": [choice]}).encode()
    response = json.loads(translate_whole("responses", body))
    assert response["output"][0]["content"][0]["logprobs"] == [entry]
